"""The supervisor: its decisions without processes, then its effects on real ones."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.compose.stack.supervisor import (
    ChildHealth,
    ChildState,
    Program,
    Supervisor,
    SupervisorTimeouts,
    _Child,
    stop_signal,
)
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.servers import ROOT, wait_until

QUICK = SupervisorTimeouts(
    first_beat_s=20, silence_s=2.5, warm_s=20, cold_s=1, first_delay_s=0.2, longest_delay_s=1, steady_s=60
)
HEARTBEAT = (
    "import os, sys, time; from penstock.workers.process.heartbeat import start; "
    "fd = int(os.environ['PENSTOCK_HEARTBEAT_FD'])"
)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def lines(output: Path) -> list[str]:
    """What a program has written so far."""
    return output.read_text().splitlines() if output.exists() else []


def python(name: str, code: str, *, beats: bool = False, output: Path | None = None) -> Program:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return Program(name, [sys.executable, "-c", code], environ, beats, output)


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    """Starts supervisors and closes them at the end."""
    started: list[Supervisor] = []

    def start(*programs: Program, timeouts: SupervisorTimeouts = QUICK, **more: Any) -> Supervisor:
        supervisor = Supervisor(programs, timeouts, **more)
        supervisor.start()
        started.append(supervisor)
        return supervisor

    yield start
    for supervisor in started:
        supervisor.stop()
        supervisor.stop()
        supervisor.close()


def test_a_steady_run_clears_the_record():
    """After a steady run the next start waits only the first delay."""
    timeouts = SupervisorTimeouts(first_delay_s=1, steady_s=60)
    health = ChildHealth(timeouts, beats=True)
    for start in (0.0, 10.0):
        health.on_start(start)
        health.on_exit(start + 1, jitter=1)
    health.on_start(20.0)
    assert health.on_exit(21.0, jitter=1) == 21.0 + 4
    health.on_start(30.0)
    assert health.on_exit(90.0, jitter=1) == 90.0 + 1


def test_silence_is_a_kill_reason_after_its_limit():
    """A child is killed when it has been silent for longer than the limit, and not before."""
    health = ChildHealth(SupervisorTimeouts(silence_s=31, first_beat_s=120), beats=True)
    health.on_start(0.0)
    assert health.kill_reason(119.0) is None
    assert "within 120 s of its start" in str(health.kill_reason(121.0))
    health.on_heartbeat("", 121.0)
    assert health.kill_reason(151.0) is None
    assert "no heartbeat for 31 s" in str(health.kill_reason(152.5))


def test_a_longer_silence_is_allowed_from_then_on():
    """A longer limit replaces that of the start, and a shorter one does not."""
    health = ChildHealth(SupervisorTimeouts(silence_s=31), beats=True)
    health.on_start(0.0)
    health.on_heartbeat("", 1.0)
    assert health.is_silent(33.0)
    health.allow_silence(61.0)
    health.allow_silence(31.0)
    assert health.kill_reason(61.0) is None
    assert "no heartbeat for 61 s" in str(health.kill_reason(63.0))


def test_a_reported_reason_is_a_kill_reason_at_once():
    """A reason that the child reports counts at once, and no longer after the next start."""
    health = ChildHealth(SupervisorTimeouts(), beats=True)
    health.on_start(0.0)
    health.on_heartbeat("a forward ran for more than 30 s", 1.0)
    health.on_heartbeat("", 2.0)
    assert health.kill_reason(2.0) == "a forward ran for more than 30 s"
    health.on_start(5.0)
    assert health.kill_reason(6.0) is None


def test_programs_without_heartbeat_are_never_hung():
    """Silence is no kill reason for a program without a heartbeat."""
    health = ChildHealth(SupervisorTimeouts(), beats=False)
    health.on_start(0.0)
    assert health.kill_reason(1e6) is None


def test_stop_escalates():
    """SIGTERM first, SIGQUIT after the warm time or a second request, SIGKILL at last."""
    timeouts = SupervisorTimeouts(warm_s=15, cold_s=3)
    assert stop_signal(114.9, [100.0], timeouts) is signal.SIGTERM
    assert stop_signal(115.0, [100.0], timeouts) is signal.SIGQUIT
    assert stop_signal(118.0, [100.0], timeouts) is signal.SIGKILL
    assert stop_signal(103.0, [100.0, 102.0, 102.5], timeouts) is signal.SIGQUIT
    assert stop_signal(105.0, [100.0, 102.0], timeouts) is signal.SIGKILL


def test_a_killed_child_is_started_again(supervise):
    """kill -9 of a child brings a new one within the first delay."""
    supervisor = supervise(python("sleeper", "import time; time.sleep(600)"))
    wait_until(supervisor.pids, 20, "a child runs")
    first = supervisor.pids()["sleeper"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: supervisor.pids().get("sleeper", first) != first, 20, "another child runs")


def test_each_crash_is_reported_with_the_next_start(supervise):
    """After each change the report has restarts, failures in a row, the last status, and when the next start is due."""
    reports: list[ChildState] = []
    crashing = python("crashing", "import sys; sys.exit(3)")
    supervise(crashing, on_change=lambda states: reports.extend(states))
    wait_until(lambda: any(state.restarts >= 2 and state.next_start for state in reports), 30, "it crashed three times")
    running, first, again = reports[:3]
    assert running == ChildState("crashing", restarts=0, failures=0, last_status=None, next_start=None)
    assert (first.restarts, first.failures, first.last_status) == (0, 1, 3)
    assert first.next_start is not None
    assert again == ChildState("crashing", restarts=1, failures=1, last_status=3, next_start=None)


def test_a_child_that_runs_steadily_has_no_failures():
    """A worker that crashed once is not named for ever: after a steady run its failures in a row are 0."""
    child = _Child(python("child", ""), SupervisorTimeouts(steady_s=60))
    child.health.on_start(0.0)
    child.due = child.health.on_exit(1.0, jitter=1, status=70)
    assert child.state(1.0) == ChildState("child", 0, 1, 70, next_start=child.due)
    child.health.on_start(10.0)
    with subprocess.Popen([sys.executable, "-c", ""]) as child.process:
        assert child.state(69.0) == ChildState("child", 1, 1, 70, None)
        assert child.state(70.0) == ChildState("child", 1, 0, 70, None)


@pytest.mark.slow
def test_a_child_that_holds_the_interpreter_is_killed(supervise, tmp_path):
    """A call that never gives the GIL back silences the heartbeat: the child is killed and started again."""
    stuck = f"{HEARTBEAT}; import re; start(fd, lambda: None); print('up'); re.match('(a+)+b', 'a' * 60)"
    supervise(python("stuck", stuck, beats=True, output=tmp_path / "output"))
    wait_until(lambda: lines(tmp_path / "output").count("up") >= 2, 40, "another child runs")


def test_a_child_that_reports_a_reason_is_replaced(supervise, tmp_path, caplog):
    """The reason that a child reports is logged, and the child is killed and started again."""
    # It says that it is up before it can be killed.
    sick = f"print('up'); {HEARTBEAT}; start(fd, lambda: 'the drain thread died'); time.sleep(600)"
    supervise(python("sick", sick, beats=True, output=tmp_path / "output"))
    wait_until(lambda: lines(tmp_path / "output").count("up") >= 2, 20, "another child runs")
    assert caplog.text.count("sick is killed: the drain thread died") <= lines(tmp_path / "output").count("up")
    assert "sick is killed: the drain thread died" in caplog.text


def test_a_healthy_child_is_left_alone(supervise, tmp_path):
    """A child with a heartbeat runs for many times the silence limit."""
    output = tmp_path / "output"
    healthy = f"{HEARTBEAT}; start(fd, lambda: print('beat')); time.sleep(600)"
    supervisor = supervise(
        python("healthy", healthy, beats=True, output=output),
        timeouts=SupervisorTimeouts(first_beat_s=20, silence_s=1.6),
    )
    wait_until(lambda: "beat" in lines(output), 20, "the child beats")
    first = supervisor.pids()
    wait_until(lambda: len(lines(output)) >= 6, 20, "the child beats on")
    assert supervisor.pids() == first


def test_a_configuration_error_ends_the_supervisor(supervise, caplog):
    """Exit status 78 is passed on, without a word beside the child's own, and the other children are stopped."""
    supervisor = supervise(
        python("wrong", "import sys, time; time.sleep(0.5); sys.exit(78)"),
        python("other", "import time; time.sleep(600)"),
    )
    wait_until(lambda: supervisor.has_failed, 20, "the supervisor gives up")
    assert supervisor.close() == EXIT_CONFIGURATION
    assert not supervisor.pids()
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_stop_lets_children_finish(supervise, tmp_path):
    """A child gets one SIGTERM and time to finish; the supervisor returns 0 when it has ended."""
    slow = (
        "import signal, sys, time\n"
        "def finish(*_): time.sleep(1); print('finished'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, finish); print('up'); time.sleep(600)"
    )
    output = tmp_path / "output"
    supervisor = supervise(python("slow", slow, output=output))
    wait_until(lambda: "up" in lines(output), 20, "the child runs")
    assert supervisor.close() == 0
    assert output.read_text() == "up\nfinished\n"


def test_second_stop_does_not_wait(supervise, tmp_path):
    """A child that ignores SIGTERM and SIGQUIT is killed soon after a second stop request."""
    deaf = (
        "import signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGQUIT): signal.signal(number, signal.SIG_IGN)\n"
        "print('up'); time.sleep(600)"
    )
    output = tmp_path / "output"
    supervisor = supervise(python("deaf", deaf, output=output))
    wait_until(lambda: "up" in lines(output), 20, "the child runs")
    supervisor.stop()
    supervisor.stop()
    supervisor.close()


def test_a_child_that_cannot_be_started_is_tried_again(supervise, tmp_path, caplog):
    """A child that cannot be started now is started later: here, once the folder of its output exists."""
    output = tmp_path / "not yet" / "output"
    supervise(python("patient", "import time; print('up'); time.sleep(600)", output=output))
    wait_until(lambda: "patient could not be started: No such file or directory" in caplog.text, 20, "the first try")
    output.parent.mkdir()
    wait_until(lambda: "up" in lines(output), 20, "the child runs")


def test_the_children_of_a_child_are_killed_with_it(supervise, tmp_path):
    """The children of a child do not outlive it, because they may hold the device."""
    parent = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid); sys.exit(1)"
    )
    output = tmp_path / "output"
    supervise(python("parent", parent, output=output))
    wait_until(lambda: len(lines(output)) >= 2, 20, "another child runs")
    assert not is_alive(int(lines(output)[0]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
def test_children_die_with_a_killed_supervisor(tmp_path):
    """kill -9 of the supervising process leaves no child, though they run in sessions of their own."""
    code = (
        "import os, sys, time\n"
        "from penstock.compose.stack.supervisor import Program, Supervisor\n"
        "sleeper = Program('sleeper', [sys.executable, '-c', 'import time; time.sleep(600)'], dict(os.environ))\n"
        "supervisor = Supervisor([sleeper]); supervisor.start()\n"
        "while not supervisor.pids(): time.sleep(0.01)\n"
        "print(supervisor.pids()['sleeper'], flush=True); time.sleep(600)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_until(lambda: b"launch.py" not in Path(f"/proc/{child}/cmdline").read_bytes(), 20, "the program runs")
        assert os.getsid(child) != os.getsid(parent.pid)
        parent.kill()
    wait_until(lambda: not is_alive(child), 5, "the child is gone")


def test_a_heartbeat_without_a_supervisor_is_refused():
    """A PENSTOCK_HEARTBEAT_FD that is not open is named in one line."""
    code = "from penstock.workers.process.heartbeat import start; start(99, lambda: None)"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert "ConfigurationError: PENSTOCK_HEARTBEAT_FD=99 is not an open pipe" in ended.stderr


def test_worker_shuts_down_when_its_supervisor_is_gone():
    """When the reading end of the heartbeat pipe is closed, a worker ends as on SIGTERM."""
    reading, writing = os.pipe()
    code = (
        "import time; from penstock.workers.process.heartbeat import start; "
        f"start({writing}, lambda: None); time.sleep(600)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, pass_fds=(writing,)) as worker:
        os.close(writing)
        assert os.read(reading, 1) == b"\n"
        os.close(reading)
        assert worker.wait(180) == -signal.SIGTERM


def test_children_outlive_the_thread_that_asked_for_them(supervise, tmp_path):
    """The life of a child depends on the supervising thread, not on the thread that started the supervisor."""
    output = tmp_path / "output"
    ticking = python("ticking", "import time\nwhile True: print('tick'); time.sleep(0.1)", output=output)
    started: list[Supervisor] = []
    asking = threading.Thread(target=lambda: started.append(supervise(ticking)))
    asking.start()
    asking.join()
    wait_until(lambda: "tick" in lines(output), 20, "the child runs")
    first = started[0].pids()
    wait_until(lambda: len(lines(output)) > 10, 20, "the child runs on")
    assert started[0].pids() == first
