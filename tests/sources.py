"""Python files -> syntax trees -> their nodes. Many tests read all sources: each file is parsed once in a process."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["nodes", "parsed", "without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps the garbage collector from looking through millions of nodes, none of which is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file that no test changes; do not change the tree either."""
    with without_collections():
        return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of that tree, as `ast.walk` yields them."""
    with without_collections():
        return list(ast.walk(parsed(path)))
