"""The demo's text: the docstrings of this Python's standard library."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from penstock.compose.docstrings import Passage, documents
from tests.servers import ROOT

COUNT = 3_000
WITH_SIDE_EFFECTS = ["antigravity", "tkinter"]


class Collected(NamedTuple):
    """What one process found, and which modules of the library with side effects it has imported."""

    passages: list[Passage]
    imported: list[str]


def collected(hash_seed: str) -> Collected:
    """The passages of a fresh process: pytest replaces parts of the library in this one."""
    code = (
        "import json, sys; from penstock.compose.docstrings import collect\n"
        f"print(json.dumps([collect({COUNT}), [name for name in {WITH_SIDE_EFFECTS} if name in sys.modules]]))"
    )
    environ = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    passages, imported = json.loads(ended.stdout)
    return Collected([Passage(*each) for each in passages], imported)


@pytest.fixture(scope="module")
def first_run() -> Collected:
    return collected("1")


@pytest.fixture
def passages(first_run: Collected) -> list[Passage]:
    return first_run.passages


def test_there_is_enough_text_on_every_machine(passages):
    """There are a few thousand passages, each name and each text once."""
    assert len(passages) == COUNT
    assert len({passage.name for passage in passages}) == COUNT
    assert len({passage.text for passage in passages}) == COUNT


@pytest.mark.parametrize(
    "name",
    [
        "time.strptime",
        "datetime.datetime.strptime",
        "zlib.compress",
        "gzip.compress",
        "bz2.compress",
        "shutil.copytree",
    ],
)
def test_common_functions_are_collected(passages, name):
    """Functions written in C are collected as well as those written in Python."""
    assert name in {passage.name for passage in passages}


def test_passages_are_short_sentences_without_signatures(passages):
    """A passage is one or two sentences, without a signature."""
    strptime = next(passage for passage in passages if passage.name == "time.strptime")
    assert str(strptime) == "Parse a string to a time tuple according to a format specification. (time.strptime)"
    assert all(30 <= len(passage.text) <= 144 for passage in passages)
    assert not any("\n" in passage.text for passage in passages)


def test_nothing_private_and_no_tests(passages):
    """No passage comes from a private name, a test suite, IDLE or another package."""
    parts = [passage.name.split(".") for passage in passages]
    assert not any(part.startswith("_") for names in parts for part in names)
    assert not {names[0] for names in parts} & {"test", "idlelib", "lib2to3", "numpy", "pip"}


@pytest.mark.slow
def test_the_same_passages_on_every_run(passages):
    """Another process, with another hash seed, collects the same passages in the same order."""
    assert collected("7").passages == passages


def test_parsing_imports_no_module_of_the_library(first_run: Collected):
    """Source files are parsed, not imported, so imports with side effects do not run."""
    assert first_run.imported == []


@pytest.mark.slow
def test_documents_are_source_code():
    """Each is one function or class of nothing but the first paragraphs of its docstring; each text is there once."""
    found = documents()
    assert len(found) > COUNT
    assert found == documents()
    assert not any(">>>" in text for text in found)
    # Source code would escape backslashes and quotes.
    plain = [text for text in found if "\\" not in text and text.count('"') == 6]
    docstrings = [_docstring(text) for text in plain]
    assert len(set(docstrings)) == len(plain) > COUNT
    assert any(text.startswith("def compress(data, compresslevel=") and "Compress a block" in text for text in plain)


def _docstring(text: str) -> str:
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return ast.get_docstring(node) or ""
