"""CONTRIBUTING.md: how long the parts of the product may be. What is longer is two things."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.servers import ROOT

ROOMS = ("compose", "producers", "registry", "safety", "testing", "workers")
LINES_OF_A_FILE = 700
LINES_OF_A_CLASS = 400


def sources() -> Iterator[tuple[Path, str]]:
    """Each module of the product, with its text."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text()


def test_no_file_is_two_things():
    assert [str(path) for path, text in sources() if len(text.splitlines()) > LINES_OF_A_FILE] == []


def test_no_class_is_two_things():
    found = [
        f"{path}: {node.name} has {length} lines"
        for path, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and (length := (node.end_lineno or 0) - node.lineno + 1) > LINES_OF_A_CLASS
    ]
    assert found == []


def test_the_limits_are_those_of_the_document():
    document = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"no class has more than {LINES_OF_A_CLASS} lines" in document
    assert f"no file more than {LINES_OF_A_FILE}" in document
