"""The descriptors of this process that it cannot do without, in case a model closes them.

    stderr -- copied at start --> OwnLog <-- log lines
    stdout, stderr, stdin -- closed? --> StandardStreams.restore: put back, after each batch and ten times a second
    journal, lock, wake-up, heartbeat -- closed? --> OwnDescriptor.is_intact --> the process is replaced

A model shares the process: `sys.stdout.close()`, `os.close(1)` and `os.closerange(3, 4096)` are calls that libraries
make, too. A number that was closed belongs to whatever is opened next: a line that was meant for the log would go to
a connection of the broker. So what is written to often has a high number, which is given to nothing else, and what is
written to seldom is compared with what it was.
"""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import resource
import select
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, TextIO, TypeAlias

__all__ = ["OwnDescriptor", "OwnLog", "StandardStreams", "first_lost", "moved_up"]

logger = logging.getLogger("penstock.server")

_Identity: TypeAlias = tuple[int, ...]
"""Inode and device."""
_UP_FROM: Final = 5_000
"""Numbers from here on, where the limit allows it, are given to no file or connection: these get the lowest ones."""
_BELOW_THE_LIMIT: Final = 16
_NAMES: Final = ("stdin", "stdout", "stderr")
_OUTPUT: Final = (1, 2)
_AFTER_STDERR: Final = 3


class OwnDescriptor:
    """A descriptor and what it stood for when this object was made. For any thread."""

    def __init__(self, fd: int) -> None:
        self.fd: Final = fd
        self._identity = _identity(fd)

    @property
    def is_intact(self) -> bool:
        """Whether the number still stands for the same file, pipe or socket."""
        return self._identity is not None and _identity(self.fd) == self._identity


def first_lost(descriptors: Mapping[str, OwnDescriptor]) -> str:
    """The name of the first descriptor that is not intact; empty while all are."""
    return next((name for name, descriptor in descriptors.items() if not descriptor.is_intact), "")


def moved_up(fd: int) -> int:
    """The same descriptor under a number that is given to nothing else; child processes do not inherit it."""
    copy = _copy_of(fd)
    os.close(fd)
    return copy


class OwnLog(io.TextIOBase):
    """A text stream on a copy of stderr. Closing stderr does not end it. For any thread.

    When the copy was closed as well, `write` takes another one, and raises OSError if stderr has gone, too.
    """

    def __init__(self, fd: int = 2) -> None:
        self._original = OwnDescriptor(fd)
        self._copy = _copy_of(fd)
        self._lock = threading.Lock()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str, /) -> int:
        """Write all of the text. Raises OSError."""
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        with self._lock:
            while data:
                data = data[self._write(data) :]
        return len(text)

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._copy, data)
        except OSError as error:
            if error.errno != errno.EBADF or not self._original.is_intact:
                raise
        self._copy = _copy_of(self._original.fd)
        return os.write(self._copy, data)


class StandardStreams:
    """stdin, stdout and stderr as they were at the start, and `restore` for those that were closed. For any thread."""

    def __init__(self) -> None:
        self._copies = {fd: OwnDescriptor(_copy_of(fd)) for fd in range(3) if _is_open(fd)}
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def restore(self) -> None:
        """Put back what was closed, and say so once for each stream.

        A descriptor that stands for another file is left alone: a model may redirect its output. So is one that was
        closed and belongs to a connection by now, until it is free again.
        """
        if _are_open(_OUTPUT) and not any(map(_is_closed_in_python, _OUTPUT)):
            return
        with self._lock:
            restored = {_NAMES[fd] for fd, copy in self._copies.items() if not _is_open(fd) and _put_back(fd, copy)}
            restored |= {_NAMES[fd] for fd in _OUTPUT if _is_closed_in_python(fd) and _reopened(fd)}
            new, self._told = sorted(restored - self._told), self._told | restored
        for name in new:
            logger.warning("a model closed %s, which is open again. Expected code that leaves it open", name)


def _identity(fd: int) -> _Identity | None:
    """What a descriptor stands for; None for a closed one."""
    try:
        # By place: the log and each wake-up of the drain ask.
        return os.fstat(fd)[1:3]
    except OSError:
        return None


def _copy_of(fd: int) -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = _UP_FROM if limit == resource.RLIM_INFINITY else min(_UP_FROM, limit - _BELOW_THE_LIMIT)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        # A low limit, and many of them: any other number will do.
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _AFTER_STDERR)


def _put_back(fd: int, copy: OwnDescriptor) -> bool:
    if not copy.is_intact:
        return False
    # Not dup2, which would close what another thread has opened under this number meanwhile.
    with suppress(OSError):
        found = fcntl.fcntl(copy.fd, fcntl.F_DUPFD, fd)
        if found == fd:
            return True
        os.close(found)
    return False


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _are_open(fds: Iterable[int]) -> bool:
    """Whether all of them are open. One system call: it is asked after each batch."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, 0)
    return not any(event & select.POLLNVAL for _, event in poller.poll(0))


def _is_closed_in_python(fd: int) -> bool:
    """Whether `sys.stdout` or `sys.stderr` was closed, which leaves its descriptor open."""
    stream: TextIO | None = getattr(sys, _NAMES[fd])
    return stream is not None and stream.closed


def _reopened(fd: int) -> bool:
    """Replace `sys.stdout` or `sys.stderr`, if the descriptor is open."""
    name = _NAMES[fd]
    if not _is_open(fd):
        return False
    binary = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    setattr(sys, name, io.TextIOWrapper(binary, "utf-8", "backslashreplace", line_buffering=True))
    return True
