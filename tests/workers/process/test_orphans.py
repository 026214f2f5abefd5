"""A start ends the processes that a dead worker left behind, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.workers.process.device import pin
from penstock.workers.process.orphans import identify
from tests.processes import is_alive, kill
from tests.servers import ROOT, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")

HOLDER: Final = """
import ctypes, os, pathlib, signal, sys, time
from penstock.workers.process.device import pin
home, kind, supervisor = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
pin("cpu", 0, home, {}, supervisor=supervisor or None)
if kind == "forks":
    # The fork of a library in C: no hook of the interpreter runs in it.
    if not ctypes.CDLL(None).fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(600)
else:
    print(os.getpid(), flush=True)
time.sleep(600)
"""
Start = Callable[..., tuple[subprocess.Popen[str], int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker that pins cpu0; returns it and the process that holds the lock last."""
    with ExitStack() as ends:

        def start_one(kind: str, supervisor: int = 0) -> tuple[subprocess.Popen[str], int]:
            program = [sys.executable, "-c", HOLDER, str(tmp_path), kind, str(supervisor)]
            worker = ends.enter_context(subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            ends.callback(worker.kill)
            assert worker.stdout is not None
            holder = int(worker.stdout.readline())
            ends.callback(kill, holder)
            return worker, holder

        yield start_one


def test_start_ends_what_a_killed_worker_left(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A fork holds the lock and ignores SIGTERM. The next start kills it, says so in one line, and has the device."""
    worker, fork = start("forks")
    worker.kill()
    worker.wait()
    assert is_alive(fork)
    assert pin("cpu", 0, tmp_path, {}).name == "cpu0"
    assert not is_alive(fork)
    (line,) = (record for record in caplog.records if "orphans" in record.message)
    facts = vars(line)
    assert (facts["pids"], facts["left_by"], facts["device"]) == ([fork], worker.pid, "cpu-0")


def test_start_ends_a_worker_whose_supervisor_is_gone(start: Start, tmp_path: Path):
    """No supervisor will stop it or start it again."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supervisor:
        worker, _ = start("worker", supervisor.pid)
        with pytest.raises(ConfigurationError, match=r"Another worker is cpu0 already.*--index 1"):
            pin("cpu", 0, tmp_path, {})
        supervisor.kill()
    assert pin("cpu", 0, tmp_path, {}).name == "cpu0"
    assert worker.wait(180) != 0


@pytest.mark.parametrize("kind", ["worker", "forks"])
def test_living_worker_keeps_its_device(kind: str, start: Start, tmp_path: Path):
    """It and its forks are left alone; the refusal names the option that helps."""
    worker, holder = start(kind)
    with pytest.raises(ConfigurationError, match=r"Another worker is cpu0 already.*--index 1"):
        pin("cpu", 0, tmp_path, {})
    assert worker.poll() is None
    assert is_alive(holder)


@pytest.mark.parametrize("record", ["", "{}", '["another boot", [1, 1], null]', "\x00" * 100, "[1, 2, 3]"])
def test_unknown_record_ends_nothing(record: str, start: Start, tmp_path: Path):
    """A lock file of another machine, of an earlier version, or with foreign bytes does not tell who is an orphan."""
    worker, fork = start("forks")
    (tmp_path / "locks" / "cpu-0.lock").write_text(record)
    worker.kill()
    worker.wait()
    with pytest.raises(ConfigurationError, match="Another worker is cpu0 already"):
        pin("cpu", 0, tmp_path, {})
    assert is_alive(fork)


def test_process_with_the_id_of_a_dead_worker_is_left_alone(start: Start, tmp_path: Path):
    """The recorded id belongs to another process by now: it started at another time, and has no lock file open."""
    worker, fork = start("forks")
    file = tmp_path / "locks" / "cpu-0.lock"
    machine, (_, started), supervisor = json.loads(file.read_text())
    worker.kill()
    worker.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        file.write_text(json.dumps([machine, [bystander.pid, started], supervisor]))
        assert pin("cpu", 0, tmp_path, {}).name == "cpu0"
        assert not is_alive(fork)
        assert bystander.poll() is None
        bystander.kill()


def test_process_is_known_by_its_start():
    """The same process has one identity; a process that has ended has none."""
    assert identify(os.getpid()) == identify(os.getpid()) is not None
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        wait_until(lambda: identify(ended.pid) is None, 30, "it is a zombie")
    assert identify(ended.pid) is None
