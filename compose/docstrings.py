"""Text for the demos and for benchmarks: the docstrings of the user's own Python standard library.

    sources -> collect    the first sentences of each, to embed
            -> documents  the first paragraphs, below the line that they document, to learn from

Python files are parsed, never imported. Functions written in C have no source: for a few modules that are safe to
import, the docstrings are read from the objects.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

__all__ = ["Passage", "collect", "documents"]

_SKIPPED: Final = frozenset(
    {
        "__pycache__",
        "distutils",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_C_MODULES: Final = (
    *("array", "binascii", "bisect", "builtins", "cmath", "collections", "datetime", "functools", "hashlib", "heapq"),
    *("itertools", "math", "operator", "os", "re", "select", "signal", "socket", "sys", "time", "zlib"),
)
_MIN_CHARACTERS: Final = 30
_MAX_CHARACTERS: Final = 140
"""One or two sentences: questions ask for the subject of a docstring's first lines."""
_Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BELOW_A_LINE: Final = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MAX_DOCUMENT: Final = 500
"""Characters: what comes later is details and tables."""
_SIGNATURE_LINE: Final = re.compile(r"[\w.]+\(.*\)(\s*->.*)?")
_ARROW: Final = re.compile(r"[^.]*?->\s*")


class Passage(NamedTuple):
    """`name` is qualified (`datetime.datetime.strptime`), `text` the beginning of the docstring."""

    name: str
    text: str

    def __str__(self) -> str:
        """The text to embed: the name carries as much information as the docstring."""
        return f"{self.text} ({self.name})"


def collect(count: int) -> list[Passage]:
    """`count` passages, or all when there are fewer; the same ones on every run.

    First the functions written in C, which are used most, then modules, functions and classes, then methods.
    """
    sources = sorted(_from_sources(), key=lambda passage: passage.name.count("."))
    by_name: dict[str, Passage] = {}
    for passage in (*_from_c(), *sources):
        by_name.setdefault(passage.name, passage)
    # Aliases, and Python versions of functions in C, repeat a docstring under another name.
    by_text: dict[str, Passage] = {}
    for passage in by_name.values():
        by_text.setdefault(passage.text, passage)
    return list(by_text.values())[:count]


def _beginning(docstring: str | None) -> str:
    """The first sentences of a docstring on one line, without a signature; empty when they are too short."""
    lines = inspect.cleandoc(docstring or "").split("\n")
    while lines and (_SIGNATURE_LINE.fullmatch(lines[0].strip()) or not lines[0].strip()):
        del lines[0]
    kept = ""
    for paragraph in "\n".join(lines).split("\n\n"):
        kept = f"{kept} {' '.join(paragraph.split())}".strip()
        if len(kept) >= _MIN_CHARACTERS:
            break
    kept = _ARROW.sub("", kept, count=1)
    return _cut(kept) if len(kept) >= _MIN_CHARACTERS else ""


def _cut(text: str) -> str:
    """Whole sentences up to _MAX_CHARACTERS, or as many words as fit."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    end = text.rfind(". ", _MIN_CHARACTERS, _MAX_CHARACTERS)
    return text[: end + 1] if end > 0 else text[:_MAX_CHARACTERS].rpartition(" ")[0] + " ..."


def documents() -> list[str]:
    """The beginning of each docstring below its `def` or `class`, as source code; the same ones on every run.

    Whole paragraphs, without examples. Private names are in it, too. A text that occurs twice is there once.
    """
    by_text: dict[str, str] = {}
    for _, tree in _trees(with_private=True):
        for node in ast.walk(tree):
            if isinstance(node, _BELOW_A_LINE) and (text := _paragraphs(ast.get_docstring(node))):
                by_text.setdefault(text, _below_its_line(node, text))
    return list(by_text.values())


def _paragraphs(docstring: str | None) -> str:
    """The first paragraphs, as many as are not too long; empty for a docstring that begins with an example."""
    kept = ""
    for paragraph in (docstring or "").split("\n\n"):
        if ">>>" in paragraph or (kept and len(kept) + len(paragraph) > _MAX_DOCUMENT):
            break
        kept = f"{kept}\n\n{paragraph}".strip()
    return kept


def _below_its_line(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        line = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    else:
        line = f"def {node.name}({ast.unparse(node.args)}):"
    close = "\n" if "\n" in text else ""
    return line + "\n" + textwrap.indent(f'"""{text}{close}"""', "    ") + "\n"


def _from_sources() -> Iterator[Passage]:
    for name, tree in _trees():
        yield from _from_tree(tree, name)


def _trees(*, with_private: bool = False) -> Iterator[tuple[str, ast.Module]]:
    """The modules of the standard library by their dotted names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        if not _SKIPPED.isdisjoint(parts) or not names:
            continue
        if any(name.startswith("_") for name in names) and not with_private:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            # A few files of the standard library are invalid on purpose.
            continue
        yield ".".join(names), tree


def _from_tree(node: _Documented, name: str) -> Iterator[Passage]:
    if text := _beginning(ast.get_docstring(node, clean=False)):
        yield Passage(name, text)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield from _from_tree(child, f"{name}.{child.name}")


def _from_c() -> Iterator[Passage]:
    for module_name in _C_MODULES:
        module = importlib.import_module(module_name)
        for name, member in sorted(vars(module).items()):
            if name.startswith("_"):
                continue
            if inspect.isbuiltin(member):
                yield from _from_member(member, f"{module_name}.{name}")
            elif inspect.isclass(member) and member.__module__.lstrip("_") == module_name:
                yield from _from_class(member, f"{module_name}.{name}")


def _from_member(member: object, name: str) -> Iterator[Passage]:
    if text := _beginning(inspect.getdoc(member)):
        yield Passage(name, text)


def _from_class(written: type, name: str) -> Iterator[Passage]:
    yield from _from_member(written, name)
    if issubclass(written, BaseException):
        return
    for attribute, value in sorted(vars(written).items()):
        if not attribute.startswith("_") and (inspect.isroutine(value) or isinstance(value, classmethod)):
            yield from _from_member(value, f"{name}.{attribute}")
