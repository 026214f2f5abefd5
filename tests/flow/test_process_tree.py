"""Every process that `penstock up` starts, directly or not, ends with the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from penstock import Client
from penstock.registry import stack_file
from penstock.registry.settings import Settings
from tests.flow.conftest import amend
from tests.packages import write_double
from tests.processes import descendants, is_alive, kill
from tests.servers import ROOT, require_module, wait_until
from tests.workers.compilation.packages import write_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent"),
]

PENSTOCK: Final = [sys.executable, "-m", "penstock"]
HANGS_IN_THE_COMPILER: Final = """
import subprocess, sys, time
if "penstock.workers.compilation.build" in sys.orig_argv:
    # As the C++ compiler of a build.
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
"""


class Stack:
    """`penstock up` on a home of its own, with a model that has two instances and one whose build hangs."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        models, self.home = folder / "models", folder / "home"
        amend(write_double(models), instances=2)
        write_module(models, before_build=HANGS_IN_THE_COMPILER)
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "PENSTOCK_HOME": str(self.home),
            "PENSTOCK_INFERENCE_REPO_ROOT": str(models),
            "PENSTOCK_INFERENCE_DEVICE": "cpu",
            "PENSTOCK_METRICS_PORT": "0",
            "PENSTOCK_INFERENCE_SERVER_PORT": "0",
            "PENSTOCK_INFERENCE_SERVER_GRPC_PORT": "0",
        }
        nowhere = subprocess.DEVNULL
        self.up = ends.enter_context(
            subprocess.Popen([*PENSTOCK, "up"], env=self._environ, stdin=nowhere, stdout=nowhere)
        )
        ends.callback(self.up.kill)
        wait_until(self._is_ready, 90, "the stack is up")

    def compile(self) -> None:
        """Begin a build, which hangs, and wait until it and what it started run."""
        with Client.from_env(settings=Settings.load(environ={"PENSTOCK_HOME": str(self.home)})) as client:
            # Nothing is compiled for a model that is not used, and answers are compared for inputs that were seen.
            rows = np.random.default_rng().random((16, 4, 16), np.float32)
            client.gather(client.submit_many("module", [{"x": x} for x in rows]), timeout=180)
        # The command waits for the end of the build.
        nowhere = subprocess.DEVNULL
        with subprocess.Popen([*PENSTOCK, "models", "compile", "module"], env=self._environ, stdout=nowhere) as asking:
            wait_until(lambda: self.processes("sleep"), 90, "the build runs")
            asking.kill()

    def processes(self, word: str) -> set[int]:
        """The stack's processes whose command line has this word."""
        return {pid for pid in descendants(self.up.pid) if word in _words(pid)}

    def _is_ready(self) -> bool:
        assert self.up.poll() is None
        found = stack_file.read(self.home)
        return found is not None and found.is_ready


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@pytest.fixture
def stack() -> Iterator[Stack]:
    """Not pytest's tmp_path: the path of a unix socket ends at 107 bytes."""
    require_module("torch")
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as folder, ExitStack() as ends:
        yield Stack(Path(folder), ends)


@pytest.mark.timeout(1200)
def test_no_descendant_outlives_a_killed_parent(stack: Stack):
    """kill -9 of a build, of the worker with instances and a build, and of `penstock up` with all of these."""
    stack.compile()
    # Its guard is a fork of it, with the same command line.
    build = max(stack.processes("penstock.workers.compilation.build"), key=lambda pid: len(descendants(pid)))
    _killed(build, least=2)
    for word, least in (("penstock.workers", 4), ("up", 9)):
        wait_until(lambda: len(stack.processes("penstock.workers.runtime.instance")) == 2, 90, "both instances run")
        wait_until(lambda: not stack.processes("sleep"), 90, "the last build has ended")
        wait_until(stack._is_ready, 90, "the stack is up")
        stack.compile()
        (victim,) = stack.processes(word) or {stack.up.pid}
        _killed(victim, least=least)


def _killed(parent: int, *, least: int) -> None:
    """Kill a process that has at least so many descendants, and wait for their end."""
    below = descendants(parent)
    assert len(below) >= least
    kill(parent)
    wait_until(lambda: not any(map(is_alive, below)), 30, "no descendant is left")
