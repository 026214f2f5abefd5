"""Keeps programs running: one worker per device, and for the embedded stack its Redis and its Flower.

    Program --start--> child --lines on the heartbeat pipe--> ChildHealth --(hung | ended)--> kill, wait, start again

The decisions (`ChildHealth`, `stop_signal`) are pure: time and randomness are arguments. `Supervisor` acts on them, in
one thread. It restarts a child for ever, after longer and longer delays. A child that exits with EXIT_CONFIGURATION is
not restarted, because it would exit the same way: the child has said why, in one line, and the supervisor stops all
children and returns that status. Each change of a `ChildState` is reported (compose/stack/restarts.py).
Children die with the thread that runs the supervisor (compose/stack/launch.py), also when it is killed.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from penstock.registry.backoff import backoff_delay_s
from penstock.workers.process.exit_status import EXIT_CONFIGURATION

__all__ = [
    "SupervisorTimeouts",
    "Program",
    "Supervisor",
    "ChildHealth",
    "ChildState",
    "LivenessProbe",
    "stop_signal",
]

_LAUNCHER: Final = str(Path(__file__).with_name("launch.py"))
_TICK_S: Final = 0.1
_log = logging.getLogger("penstock.supervisor")


class LivenessProbe(Protocol):
    """Checks a running process from outside. Called on the supervisor's thread: must not block."""

    def kill_reason(self, pid: int, now: float) -> str | None:
        """Why the process must be killed, or None; `now` is monotonic."""

    def silence_s(self) -> float:
        """The longest silence of a healthy process, as far as it is known now; 0: unknown.

        Called when the process has been silent for longer than was expected until now.
        """

    def on_exit(self) -> None:
        """Called when the process has ended without a stop signal."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run. `beats`: it writes to the pipe that PENSTOCK_HEARTBEAT_FD names (workers/process/heartbeat.py).

    `output`: the file to which stdout and stderr are appended; None: the child inherits those of this process.
    `probe`: checks the process beside its heartbeat.
    """

    name: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    beats: bool = False
    output: Path | None = None
    probe: LivenessProbe | None = None


@dataclass(frozen=True, slots=True)
class SupervisorTimeouts:
    """How long a supervisor waits, in seconds."""

    first_beat_s: float = 120.0
    """From the start to the first heartbeat; loading frameworks from a cold disk takes long."""
    silence_s: float = 31.0
    """From a heartbeat to the kill: the limit of a forward and a second. The probe may know a longer one by then."""
    warm_s: float = 15.0
    """From SIGTERM to SIGQUIT: the grace period of a drain and a margin."""
    cold_s: float = 3.0
    """From SIGQUIT to SIGKILL."""
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    steady_s: float = 60.0
    """After a run of this length the count of failures starts again at 0."""


@dataclass(frozen=True, slots=True)
class ChildState:
    """One child for its report. Times are monotonic seconds of this machine."""

    name: str
    restarts: int
    """Starts after the first one."""
    failures: int
    """Failures in a row; 0 after a run of `steady_s`."""
    last_status: int | None
    """The last exit status, negative for a signal; None before the first exit."""
    next_start: float | None
    """When it is started again; None while it runs."""


def stop_signal(now: float, requests: Sequence[float], timeouts: SupervisorTimeouts) -> signal.Signals:
    """The signal that is due at `now`, when a stop was requested at the times `requests`.

    First SIGTERM; SIGQUIT after the warm time or a second request; SIGKILL last.
    """
    cold_at = min([requests[0] + timeouts.warm_s, *requests[1:2]])
    if now < cold_at:
        return signal.SIGTERM
    return signal.SIGQUIT if now < cold_at + timeouts.cold_s else signal.SIGKILL


class ChildHealth:
    """The health of one child, from its heartbeats and exits."""

    def __init__(self, timeouts: SupervisorTimeouts, *, beats: bool) -> None:
        self.failures = 0
        """Exits in a row, each after a run that was shorter than `steady_s`."""
        self.starts = 0
        self.last_status: int | None = None
        """The last exit status; None before the first exit."""
        self._timeouts = timeouts
        self._silence_s = timeouts.silence_s
        self._beats = beats
        self._started = 0.0
        self._last_beat: float | None = None
        self._reported_reason = ""

    def on_start(self, now: float) -> None:
        """The child has started."""
        self.starts += 1
        self._started = now
        self._last_beat = None
        self._reported_reason = ""

    def on_heartbeat(self, line: str, now: float) -> None:
        """The child wrote a line: an empty one while it is healthy, else the reason why it must be replaced."""
        self._last_beat = now
        self._reported_reason = self._reported_reason or line

    def kill_reason(self, now: float) -> str | None:
        """Why the child must be killed, or None."""
        if self._reported_reason:
            return self._reported_reason
        if not self._beats:
            return None
        if self._last_beat is None:
            late = now - self._started > self._timeouts.first_beat_s
            return f"no heartbeat within {self._timeouts.first_beat_s:g} s of its start" if late else None
        return f"no heartbeat for {self._silence_s:g} s" if self.is_silent(now) else None

    def is_silent(self, now: float) -> bool:
        """Whether the last heartbeat is older than the longest silence of a healthy child."""
        return self._beats and self._last_beat is not None and now - self._last_beat > self._silence_s

    def allow_silence(self, silence_s: float) -> None:
        """From now on the child may be silent for so long; an earlier, longer limit stays."""
        self._silence_s = max(self._silence_s, silence_s)

    def is_steady(self, now: float) -> bool:
        """Whether the child, which runs, has run for so long that earlier failures do not count."""
        return now - self._started >= self._timeouts.steady_s

    def on_exit(self, now: float, jitter: float, status: int | None = None) -> float:
        """The child has exited, or could not be started (None); returns the time of the next start."""
        self.last_status = status
        self.failures = 1 if self.is_steady(now) else self.failures + 1
        first_s, longest_s = self._timeouts.first_delay_s, self._timeouts.longest_delay_s
        return now + backoff_delay_s(self.failures, first_s, longest_s, jitter)


class _Child:
    """One program and, while it runs, its process and the reading end of its heartbeat pipe."""

    def __init__(self, program: Program, timeouts: SupervisorTimeouts) -> None:
        self.program = program
        self.health = ChildHealth(timeouts, beats=program.beats)
        self.process: subprocess.Popen[bytes] | None = None
        self.due = 0.0
        self._pipe = -1
        self._unfinished = b""
        self._last_signal: signal.Signals | None = None

    def start(self, now: float) -> None:
        """Start the process in a session of its own. Raises OSError when the machine cannot start one now."""
        self.health.on_start(now)
        with ExitStack() as parent_files:
            output = parent_files.enter_context(open(self.program.output, "ab")) if self.program.output else None
            pipe, child_end = os.pipe()
            parent_files.callback(os.close, child_end)
            environ = dict(self.program.environ)
            if self.program.beats:
                environ["PENSTOCK_HEARTBEAT_FD"] = str(child_end)
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *self.program.arguments],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(child_end,),
                    # Then Ctrl-C in a terminal reaches only the supervisor, which stops its children in order.
                    start_new_session=True,
                )
            except OSError:
                os.close(pipe)
                raise
            os.set_blocking(pipe, False)
            self._pipe = pipe

    def read_heartbeats(self, now: float) -> None:
        """Read the lines that the child has written."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._pipe, 4096):
                *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
                for line in lines:
                    self.health.on_heartbeat(line.decode("utf-8", "replace"), now)

    def kill_reason(self, now: float) -> str | None:
        """Why the process must be killed, by its heartbeat and its probe; or None."""
        probe = self.program.probe
        if probe and self.health.is_silent(now):
            # The limit is that of the packages at the start, and a version with a longer one may have come since.
            self.health.allow_silence(probe.silence_s())
        reason = self.health.kill_reason(now)
        return reason or (probe.kill_reason(self.process.pid, now) if probe and self.process else None)

    def send_signal(self, number: signal.Signals) -> bool:
        """Send the process a signal. Does nothing, and returns False, when that was its last signal."""
        if self.process is None or self._last_signal == number:
            return False
        self._last_signal = number
        self.process.send_signal(number)
        return True

    def state(self, now: float) -> ChildState:
        """The child for its report."""
        health = self.health
        is_running = self.process is not None
        return ChildState(
            self.program.name,
            restarts=max(0, health.starts - 1),
            failures=0 if is_running and health.is_steady(now) else health.failures,
            last_status=health.last_status,
            next_start=None if is_running else self.due,
        )

    def reap(self) -> int | None:
        """The exit status of the process, once, after its end; negative for a signal."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        # Its own children, in its session, must not outlive it: they may hold the device.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self._pipe)
        self.process, self._unfinished, self._last_signal = None, b"", None
        return status


class Supervisor:
    """Runs programs until `stop`, which may be called from any thread and from a signal handler.

    on_change: called on the supervisor's thread with the states of all children, after each change.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        timeouts: SupervisorTimeouts | None = None,
        *,
        on_change: Callable[[Sequence[ChildState]], None] = lambda states: None,
    ) -> None:
        self._timeouts = timeouts or SupervisorTimeouts()
        self._children = [_Child(program, self._timeouts) for program in programs]
        self._on_change = on_change
        self._states: list[ChildState] = []
        self._stop_requests: list[float] = []
        self._status = 0
        self._thread: threading.Thread | None = None

    def run(self) -> int:
        """Start the programs and keep them running until `stop`; returns the exit status for this process.

        The status is 0 after a stop, and EXIT_CONFIGURATION after a child that exited with it.
        """
        while not self.is_stopping:
            now = time.monotonic()
            self._supervise(now)
            self._report(now)
            time.sleep(_TICK_S)
        while any(child.process for child in self._children):
            self._shut_down(time.monotonic())
            time.sleep(_TICK_S)
        return self._status

    def start(self) -> None:
        """Run on a new thread until `close`."""
        self._thread = threading.Thread(target=self.run, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Request a stop. After the first request children finish their work; after the second they stop at once."""
        self._stop_requests.append(time.monotonic())

    def close(self) -> int:
        """Stop the thread of `start`; returns the exit status of `run` once all children have ended."""
        if not self.is_stopping:
            self.stop()
        if self._thread is not None:
            self._thread.join()
        return self._status

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return bool(self._stop_requests)

    @property
    def has_failed(self) -> bool:
        """Whether a child exited with EXIT_CONFIGURATION, which ends this supervisor."""
        return self._status != 0

    @property
    def failures(self) -> int:
        """The highest count of failures in a row among the children."""
        return max((child.health.failures for child in self._children), default=0)

    def pids(self) -> dict[str, int]:
        """The running processes, by program name."""
        running = [(child.program.name, child.process) for child in self._children]
        return {name: process.pid for name, process in running if process}

    def _supervise(self, now: float) -> None:
        for child in self._children:
            if child.process is None:
                if now >= child.due:
                    self._start_child(child, now)
                continue
            # Read first: after a suspension of this process, heartbeats wait in the pipe.
            child.read_heartbeats(now)
            if (reason := child.kill_reason(now)) and child.send_signal(signal.SIGKILL):
                _log.error("%s is killed: %s", child.program.name, reason)
            if (status := child.reap()) is not None:
                self._on_exit(child, status, now)

    def _report(self, now: float) -> None:
        states = [child.state(now) for child in self._children]
        if states != self._states:
            self._states = states
            self._on_change(states)

    def _start_child(self, child: _Child, now: float) -> None:
        try:
            child.start(now)
        except OSError as error:
            # The machine has no memory, process or file descriptor left, which may pass.
            child.due = child.health.on_exit(now, random.random())  # noqa: S311 - jitter, no secret
            _log.error("%s could not be started: %s", child.program.name, error.strerror)

    def _on_exit(self, child: _Child, status: int, now: float) -> None:
        if status == EXIT_CONFIGURATION:
            # The child has written its reason; a second line would only repeat it.
            _log.debug("%s refuses its configuration (exit status %d)", child.program.name, status)
            self._status = status
            self.stop()
            return
        if child.program.probe:
            child.program.probe.on_exit()
        child.due = child.health.on_exit(now, random.random(), status)  # noqa: S311 - jitter, no secret
        _log.warning(
            "%s exited with status %d; the next start is in %.1f s", child.program.name, status, child.due - now
        )

    def _shut_down(self, now: float) -> None:
        for child in self._children:
            child.send_signal(stop_signal(now, self._stop_requests, self._timeouts))
            child.reap()
