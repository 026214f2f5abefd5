"""The file in which a supervisor notes crashes: who reads it, and when it counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.compose.stack.restarts import RestartReport, failing, read, sentence
from penstock.compose.stack.supervisor import ChildState
from penstock.registry.errors import ConfigurationError
from tests.servers import ROOT

CRASHED = ChildState("cpu0", restarts=2, failures=3, last_status=-9, next_start=110.0)
WRITER = (
    "import sys, time; from pathlib import Path\n"
    "from penstock.compose.stack.restarts import RestartReport\n"
    "from penstock.compose.stack.supervisor import ChildState\n"
    "with RestartReport.open(Path(sys.argv[1])) as report:\n"
    "    report.write([ChildState('cpu5', 1, 1, 70, None)]); print('written', flush=True); time.sleep(600)"
)


def workers(home: Path, now: float = 100.0) -> list[str]:
    return [row["worker"].partition("@")[0] for row in read(home, now)]


def test_a_report_is_read_while_its_supervisor_lives(tmp_path):
    """Rows have the seconds to the next start; a shorter report replaces a longer one; the end removes the file."""
    with RestartReport.open(tmp_path) as report, RestartReport.open(tmp_path) as other:
        report.write([CRASHED, CRASHED])
        report.write([CRASHED])
        other.write([ChildState("cpu1", 0, 0, None, None)])
        crashed, healthy = read(tmp_path, 100.0)
        assert (crashed["restarts"], crashed["failures"], crashed["next_start_in_s"]) == (2, 3, 10.0)
        assert read(tmp_path, 120.0)[0]["next_start_in_s"] == 0.0
        assert failing([crashed, healthy]) == [crashed]
    assert read(tmp_path, 100.0) == []
    assert not list((tmp_path / "supervised").iterdir())


def test_the_report_of_a_killed_supervisor_is_ignored(tmp_path):
    """After SIGKILL the file is still there and counts no more; the next supervisor removes it."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], env=environ, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        assert workers(tmp_path) == ["cpu5"]
        writer.send_signal(signal.SIGKILL)
    assert workers(tmp_path) == []
    assert len(list((tmp_path / "supervised").iterdir())) == 1
    with RestartReport.open(tmp_path):
        assert len(list((tmp_path / "supervised").iterdir())) == 1
    assert not list((tmp_path / "supervised").iterdir())


def test_a_home_without_supervisors_has_no_rows(tmp_path):
    """A home that does not exist is no error."""
    assert read(tmp_path / "nowhere", 0.0) == []


def test_a_home_that_is_a_file_is_refused(tmp_path):
    """The error names the setting."""
    home = tmp_path / "file"
    home.touch()
    with pytest.raises(ConfigurationError, match="PENSTOCK_HOME cannot be written to"), RestartReport.open(home):
        pass


def test_ends_are_named():
    """Statuses, signals, and starts that the machine refused."""
    row = {"worker": "cpu0@host", "failures": 1, "last_status": 70, "next_start_in_s": None}
    assert sentence(row) == "worker cpu0@host failed once, at last with exit status 70; it runs again"
    assert "by signal 99;" in sentence({**row, "last_status": -99})
    assert "before it started" in sentence({**row, "last_status": None})
