"""How often the workers of this machine crashed, and when they start again: for `penstock status` and `doctor`.

    Supervisor -- ChildState of each worker --> RestartReport: <home>/supervised/<pid>-<number>.json -- read --> rows

A worker that crashes at its start never reports to the broker, so its supervisor does, in a file of this machine. The
file is locked while the supervisor lives; the file of a killed one is ignored.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

from penstock.compose.stack.supervisor import ChildState
from penstock.registry.errors import ConfigurationError

__all__ = ["RestartReport", "failing", "read", "sentence"]

_FOLDER: Final = "supervised"
_log = logging.getLogger("penstock.supervisor")
_numbers = count()


class RestartReport:
    """The file of one supervisor. `open` makes and locks it; at the end of the block it is gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._length = 0
        self._has_failed = False

    @classmethod
    @contextmanager
    def open(cls, home: Path) -> Iterator[Self]:
        """The report of a supervisor that begins. Raises ConfigurationError when `home` cannot be written to."""
        folder = home / _FOLDER
        path = folder / f"{os.getpid()}-{next(_numbers)}.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_old(folder)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"PENSTOCK_HOME cannot be written to ({error.strerror}). Expected a writable folder"
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield cls(fd)
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def write(self, states: Sequence[ChildState]) -> None:
        """Replace the report. A disk that is full costs the report, not the workers."""
        text = json.dumps([asdict(state) for state in states]).encode()
        # One write of at least the old length: a reader finds one report, and spaces behind it.
        padded = text.ljust(self._length)
        try:
            os.pwrite(self._fd, padded, 0)
        except OSError as error:
            if not self._has_failed:
                _log.warning("the restarts of workers cannot be noted: %s", error.strerror)
            self._has_failed = True
            return
        self._length = len(padded)


def read(home: Path, now: float) -> list[dict[str, Any]]:
    """The workers under live supervisors on this home: worker, restarts, failures in a row, last exit status.

    next_start_in_s: None while the worker runs. now: monotonic seconds.
    """
    host = socket.gethostname()
    return [
        {
            "worker": f"{state['name']}@{host}",
            "restarts": state["restarts"],
            "failures": state["failures"],
            "last_status": state["last_status"],
            "next_start_in_s": None if state["next_start"] is None else round(max(0.0, state["next_start"] - now), 1),
        }
        for states in _reports(home / _FOLDER)
        for state in states
    ]


def failing(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers that crashed and have not run steadily since."""
    return [row for row in rows if row["failures"]]


def sentence(row: dict[str, Any]) -> str:
    """A worker that fails, in words.

    >>> row = {"worker": "cpu0@host", "failures": 3, "last_status": -9, "next_start_in_s": 4.0}
    >>> sentence(row)
    'worker cpu0@host failed 3 times in a row, at last by SIGKILL; the next start is in 4.0 s'
    """
    times = "once" if row["failures"] == 1 else f"{row['failures']} times in a row"
    wait_s = row["next_start_in_s"]
    then = "it runs again" if wait_s is None else f"the next start is in {wait_s:.1f} s"
    return f"worker {row['worker']} failed {times}, at last {_ended(row['last_status'])}; {then}"


def _ended(status: int | None) -> str:
    if status is None:
        return "before it started"
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


def _reports(folder: Path) -> Iterator[list[dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError), path.open("rb") as file:
            if _is_held(file.fileno()):
                yield json.load(file)


def _remove_old(folder: Path) -> None:
    """Delete the files of killed supervisors. An empty one may belong to a supervisor that locks it next."""
    for path in folder.glob("*.json"):
        with suppress(OSError), path.open("rb") as file:
            if not _is_held(file.fileno()) and file.read(1):
                path.unlink()


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
