"""`python -m tests`: every test is in one unit, and an option decides what is left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import units
from tests.servers import ROOT, wait_until


def test_every_test_file_is_in_one_unit():
    """A folder that is added belongs to the last unit by itself, and no file is run twice."""
    covered = [
        file
        for unit in units()
        for path in unit
        for file in ([path] if path.suffix else sorted(path.rglob("test_*.py")))
        if "__pycache__" not in file.parts
    ]
    assert sorted(covered) == sorted((ROOT / "tests").rglob("test_*.py"))


def test_a_folder_that_is_left_out_is_in_no_unit():
    """Its neighbours in the same unit stay."""
    left = {path for unit in units(["workers/levels", "flow", "install"]) for path in unit}
    assert not {path for path in left if {"flow", "levels", "install"} & {*path.relative_to(ROOT).parts}}
    assert {ROOT / "tests" / "workers" / "runtime", ROOT / "tests" / "test_runner.py"} <= left


@pytest.mark.parametrize(("option", "outcome"), [("", "1 passed"), ("--no-server", "1 deselected")])
def test_no_server_leaves_out_what_asks_for_one(option: str, outcome: str):
    """A fixture that starts a server decides, whichever fixture asks for it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *option.split()]
    test = "tests/test_servers.py::test_paused_redis_answers_after_the_pause"
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    ended = subprocess.run([*command, test], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert outcome in ended.stdout


def test_sigterm_ends_the_units():
    """A run that is told to stop leaves no pytest process behind."""
    run = subprocess.Popen([sys.executable, "-m", "tests", "--collect-only", "-q"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        children = wait_until(lambda: _children(run.pid), 60, "the first units run")
        run.terminate()
        assert run.wait(180) == 128 + signal.SIGTERM
        wait_until(lambda: not any(map(Path.exists, children)), 60, "the units have ended")
    finally:
        run.kill()
        run.wait()


def _children(pid: int) -> list[Path]:
    return [Path("/proc", child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
