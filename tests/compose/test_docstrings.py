"""The demo's text: the docstrings of this Python's standard library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from penstock.compose.docstrings import Passage
from tests.servers import ROOT

COUNT = 3_000


def collected(hash_seed: str) -> list[Passage]:
    """What a fresh process collects; this one has replaced parts of the library, as pytest does."""
    code = f"import json; from penstock.compose.docstrings import collect; print(json.dumps(collect({COUNT})))"
    environ = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return [Passage(*each) for each in json.loads(ended.stdout)]


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    return collected("1")


def test_there_is_enough_text_on_every_machine(passages):
    """A few thousand passages, each name and each text once."""
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
def test_what_people_ask_for_is_there(passages, name):
    """Functions written in C are found as well as those written in Python."""
    assert name in {passage.name for passage in passages}


def test_passages_are_short_sentences_without_signatures(passages):
    """A passage says what the thing does, in about a sentence or two."""
    strptime = next(passage for passage in passages if passage.name == "time.strptime")
    assert str(strptime) == "Parse a string to a time tuple according to a format specification. (time.strptime)"
    assert all(30 <= len(passage.text) <= 144 for passage in passages)
    assert not any("\n" in passage.text for passage in passages)


def test_nothing_private_and_no_tests(passages):
    """Neither underscored names nor test suites, IDLE and other people's packages."""
    parts = [passage.name.split(".") for passage in passages]
    assert not any(part.startswith("_") for names in parts for part in names)
    assert not {names[0] for names in parts} & {"test", "idlelib", "lib2to3", "numpy", "pip"}


def test_the_same_passages_on_every_run(passages):
    """Another process, with other hash seeds, collects the same ones in the same order."""
    assert collected("7") == passages


def test_parsing_imports_no_module_of_the_library():
    """Source files are read, not imported: nothing of what they do at import happens."""
    code = (
        "import sys; from penstock.compose.docstrings import collect; collect(9999)\n"
        "print('antigravity' in sys.modules, 'tkinter' in sys.modules)"
    )
    environ = {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert ended.stdout == "False False\n"
