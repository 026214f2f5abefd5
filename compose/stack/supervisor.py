"""Keeps programs running: one worker per device, and for the embedded stack its Redis and its Flower.

    Program --start--> child --lines on the heartbeat pipe--> ChildHealth --(hung | ended)--> kill, wait, start again

The decisions (`ChildHealth`, `stop_signal`) are pure: time and randomness are arguments.
`Supervisor` acts on them, in one thread. A child is started again for ever, ever more slowly, except when it exits with
EXIT_CONFIGURATION: another start would end the same way, so the supervisor stops all and passes that status on.
Children die with the thread that runs the supervisor (compose/stack/launch.py), also when that is killed.
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
from collections.abc import Mapping, Sequence
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
    "LivenessProbe",
    "stop_signal",
]

_LAUNCHER: Final = str(Path(__file__).with_name("launch.py"))
_TICK_S: Final = 0.1
_log = logging.getLogger("penstock.supervisor")


class LivenessProbe(Protocol):
    """Looks at a running process from outside. Called on the supervisor's thread: must not block."""

    def hung(self, pid: int, now: float) -> str | None:
        """Why the process must be killed, or None; `now` is monotonic."""

    def ended(self) -> None:
        """The process is gone, and was not asked to go."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. `beats`: it writes to the pipe that PENSTOCK_HEARTBEAT_FD names (workers/process/heartbeat.py).

    `output`: the file that stdout and stderr are appended to; None leaves them where this process has its own.
    `witness`: whoever sees more of the process than its beats.
    """

    name: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    beats: bool = False
    output: Path | None = None
    probe: LivenessProbe | None = None


@dataclass(frozen=True, slots=True)
class SupervisorTimeouts:
    """How long a supervisor waits, in seconds, before it does what."""

    first_beat_s: float = 120.0
    """From the start to the first sign of life; loading frameworks from a cold disk takes a while."""
    silence_s: float = 31.0
    """From one sign of life to the kill: the forward's limit and a second."""
    warm_s: float = 15.0
    """From SIGTERM to SIGQUIT: the grace period of a drain, and some margin."""
    cold_s: float = 3.0
    """From SIGQUIT to SIGKILL."""
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    steady_s: float = 60.0
    """A child that ran this long starts with a clean record."""


def stop_signal(now: float, asked: Sequence[float], timeouts: SupervisorTimeouts) -> signal.Signals:
    """The signal that children should have had by `now`, when their end was asked for at the times `asked`.

    SIGTERM at first; SIGQUIT once the warm time has passed or the end was asked for again; at last SIGKILL.
    """
    cold_at = min([asked[0] + timeouts.warm_s, *asked[1:2]])
    if now < cold_at:
        return signal.SIGTERM
    return signal.SIGQUIT if now < cold_at + timeouts.cold_s else signal.SIGKILL


class ChildHealth:
    """What is known of one child, and what follows from it."""

    def __init__(self, timeouts: SupervisorTimeouts, *, beats: bool) -> None:
        self.failures = 0
        """Ends in a row, of runs that were not steady."""
        self._timeouts = timeouts
        self._beats = beats
        self._started = 0.0
        self._last_beat: float | None = None
        self._complaint = ""

    def started(self, now: float) -> None:
        """The child was started."""
        self._started = now
        self._last_beat = None
        self._complaint = ""

    def on_heartbeat(self, line: str, now: float) -> None:
        """The child wrote one line: a sign of life when empty, else what is wrong with it."""
        self._last_beat = now
        self._complaint = self._complaint or line

    def kill_reason(self, now: float) -> str | None:
        """Why the child must be killed, or None."""
        if self._complaint:
            return self._complaint
        if not self._beats:
            return None
        if self._last_beat is None:
            late = now - self._started > self._timeouts.first_beat_s
            return f"no sign of life within {self._timeouts.first_beat_s:g} s of its start" if late else None
        silent = now - self._last_beat > self._timeouts.silence_s
        return f"no sign of life for {self._timeouts.silence_s:g} s" if silent else None

    def ended(self, now: float, jitter: float) -> float:
        """The child is gone: when to start the next one."""
        self.failures = 1 if now - self._started >= self._timeouts.steady_s else self.failures + 1
        first_s, longest_s = self._timeouts.first_delay_s, self._timeouts.longest_delay_s
        return now + backoff_delay_s(self.failures, first_s, longest_s, jitter)


class _Child:
    """One program and, while it runs, its process and the reading end of its heartbeat pipe."""

    def __init__(self, program: Program, timeouts: SupervisorTimeouts) -> None:
        self.program = program
        self.vigil = ChildHealth(timeouts, beats=program.beats)
        self.process: subprocess.Popen[bytes] | None = None
        self.due = 0.0
        self._pipe = -1
        self._unfinished = b""
        self._told: signal.Signals | None = None

    def start(self, now: float) -> None:
        """Start the process, in a session of its own. Raises OSError when the machine has no room for it."""
        self.vigil.started(now)
        with ExitStack() as ours:
            output = ours.enter_context(open(self.program.output, "ab")) if self.program.output else None
            pipe, child_end = os.pipe()
            ours.callback(os.close, child_end)
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
                    # Ctrl-C in a terminal then reaches the supervisor alone, which stops its children in order.
                    start_new_session=True,
                )
            except OSError:
                os.close(pipe)
                raise
            os.set_blocking(pipe, False)
            self._pipe = pipe

    def listen(self, now: float) -> None:
        """Read what the child wrote."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._pipe, 4096):
                *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
                for line in lines:
                    self.vigil.on_heartbeat(line.decode("utf-8", "replace"), now)

    def hung(self, now: float) -> str | None:
        """Why the process must be killed, by what its witness sees."""
        probe = self.program.probe
        return probe.hung(self.process.pid, now) if probe and self.process else None

    def tell(self, number: signal.Signals) -> bool:
        """Send the process a signal; False, and nothing happens, when that was the last one it was sent."""
        if self.process is None or self._told == number:
            return False
        self._told = number
        self.process.send_signal(number)
        return True

    def reap(self) -> int | None:
        """The exit status of the process, once, after its end; negative for a signal."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        # What it left running in its session must not outlive it: that may hold the device.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self._pipe)
        self.process, self._unfinished, self._told = None, b"", None
        return status


class Supervisor:
    """Runs programs until it is told to stop. `stop` may be called from any thread and from a signal handler."""

    def __init__(self, programs: Sequence[Program], timeouts: SupervisorTimeouts | None = None) -> None:
        self._timeouts = timeouts or SupervisorTimeouts()
        self._children = [_Child(program, self._timeouts) for program in programs]
        self._asked: list[float] = []
        self._status = 0
        self._thread: threading.Thread | None = None

    def run(self) -> int:
        """Start the programs and keep them running until `stop`; returns the exit status for this process.

        0 after a stop, EXIT_CONFIGURATION after a child that exited with it.
        """
        while not self._asked:
            self._supervise(time.monotonic())
            time.sleep(_TICK_S)
        while any(child.process for child in self._children):
            self._shut_down(time.monotonic())
            time.sleep(_TICK_S)
        return self._status

    def start(self) -> None:
        """Run on a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self.run, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask for the end: after the first time children finish their work, after the second they stop at once."""
        self._asked.append(time.monotonic())

    def close(self) -> int:
        """End what `start` began; returns the exit status of `run` once no child is left."""
        if not self._asked:
            self.stop()
        if self._thread is not None:
            self._thread.join()
        return self._status

    @property
    def has_failed(self) -> bool:
        """Whether a child that cannot work as it is configured ended this supervisor."""
        return self._status != 0

    @property
    def failures(self) -> int:
        """How often in a row the least lucky child ended before it had run steadily."""
        return max((child.vigil.failures for child in self._children), default=0)

    def pids(self) -> dict[str, int]:
        """The processes that run, by program name."""
        running = [(child.program.name, child.process) for child in self._children]
        return {name: process.pid for name, process in running if process}

    def _supervise(self, now: float) -> None:
        for child in self._children:
            if child.process is None:
                if now >= child.due:
                    self._begin(child, now)
                continue
            # Read before judging: this process may have been suspended for a while itself.
            child.listen(now)
            if (reason := child.vigil.kill_reason(now) or child.hung(now)) and child.tell(signal.SIGKILL):
                _log.error("%s is killed: %s", child.program.name, reason)
            if (status := child.reap()) is not None:
                self._on_exit(child, status, now)

    def _begin(self, child: _Child, now: float) -> None:
        try:
            child.start(now)
        except OSError as error:
            # No memory, no process or no file left: that may pass.
            child.due = child.vigil.ended(now, random.random())  # noqa: S311 - jitter, no secret
            _log.error("%s could not be started: %s", child.program.name, error.strerror)

    def _on_exit(self, child: _Child, status: int, now: float) -> None:
        if status == EXIT_CONFIGURATION:
            _log.error("%s cannot work as it is configured (exit status %d)", child.program.name, status)
            self._status = status
            self.stop()
            return
        if child.program.probe:
            child.program.probe.ended()
        child.due = child.vigil.ended(now, random.random())  # noqa: S311 - jitter, no secret
        _log.warning("%s ended with status %d; starts again in %.1f s", child.program.name, status, child.due - now)

    def _shut_down(self, now: float) -> None:
        for child in self._children:
            child.tell(stop_signal(now, self._asked, self._timeouts))
            child.reap()
