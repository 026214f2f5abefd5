"""Child processes end with this process, and a fork of it holds nothing of this process.

    end_with(pipe)     the kernel kills this process when no process holds the writing end of the pipe any more
    start_guard(pipe)  for a child with children of its own: a guard kills them all, and removes their folder
    protect_forks()    os.fork by a model's code -> in the fork: each own(...) file and each connection to the broker
                       is /dev/null, and the kernel kills the fork when this process is gone
    ForksEnd()         around each call of a model's code: a fork that returns from it ends there

PR_SET_PDEATHSIG does not fit here: it fires when the thread that started the child ends, and threads that load models
end long before the worker. compose/stack/launch.py uses it, because the thread of a supervisor outlives its children.
The pipe survives an exec only where it is passed on; programs that a model's code starts are the model's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["ForksEnd", "end_with", "own", "protect_forks", "start_guard"]

_DEFAULT_PORTS: Final = {"redis": 6379, "rediss": 6379, "amqp": 5672, "amqps": 5671}

_owned: Final[set[tuple[int, int]]] = set()
"""(Device, inode) of each file that a fork must not hold."""
_broker_peers: Final[set[str | int]] = set()
"""Ports, or paths of unix sockets."""
_lifeline = -1
"""The reading end of a pipe. Its writing end is held by the process with which a fork of this process must end."""


def own(descriptor: int) -> None:
    """Forks of this process get /dev/null instead of this file, also behind duplicates of the descriptor."""
    about = os.fstat(descriptor)
    _owned.add((about.st_dev, about.st_ino))


def protect_forks(lifeline: int | None = None, *, broker_urls: Iterable[str] = ()) -> None:
    """From now on forks of this process end with it. Call once, early. Does nothing on other systems than Linux.

    lifeline: the reading end of a pipe, for a process that itself ends with another one; its forks then do, too.
    broker_urls: forks lose connections to the ports and sockets of these.
    """
    global _lifeline
    if sys.platform != "linux":
        return
    _broker_peers.update(map(_peer_of_url, broker_urls))
    if lifeline is None:
        _lifeline, writing = os.pipe()
        own(writing)
    else:
        # Libraries close and replace low descriptors.
        _lifeline = fcntl.fcntl(lifeline, fcntl.F_DUPFD_CLOEXEC, 3)
    os.register_at_fork(after_in_child=_become_fork)


class ForksEnd:
    """A block around a call of a model's code: a fork that is made inside ends when it leaves, also by an exception.

    It has the jobs of this process and none of its other threads. This holds without `protect_forks`, too: an
    in-memory client runs models in the process of its program.
    """

    # Not a generator: that would write to the model's exception, which may refuse it.
    __slots__ = ("_process",)

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._process:
            os._exit(1)


def end_with(lifeline: int) -> None:
    """The kernel kills this process as soon as no process holds the writing end of this pipe.

    A thread that waits for that would wait in vain while a forward holds the interpreter's lock.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if _is_closed(lifeline):
        # The other process was gone before the signal was set.
        os.kill(os.getpid(), signal.SIGKILL)


def start_guard(lifeline: int, folder: Path) -> None:
    """Fork a guard, which kills the process group of this process when no process holds the pipe's writing end.

    The guard then removes `folder`, too. It ends with this process, and kills the children that this process leaves.
    Call it before this process starts a thread, in a process group of its own.
    """
    this = os.pidfd_open(os.getpid())
    if os.fork():
        os.close(this)
        return
    try:
        _guard(lifeline, this, folder)
    finally:
        os._exit(0)


def _guard(lifeline: int, guarded: int, folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(lifeline, 0)
    poll.register(guarded, select.POLLIN)
    woken = {descriptor for descriptor, _ in poll.poll()}
    if guarded not in woken:
        # When the guarded process has ended by itself, its parent reads the folder and removes it.
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _become_fork() -> None:
    global _lifeline
    try:
        # A file description of its own: the one to which the kernel's signal is bound has one receiver.
        lifeline = os.open(f"/proc/self/fd/{_lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(_lifeline)
        _lifeline = lifeline
        _release()
        end_with(lifeline)
    except OSError:
        # This fork could outlive its parent.
        os._exit(1)


def _release() -> None:
    """Replace what this fork must not hold. The numbers stay in use: objects of this process still name them."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor not in (null, _lifeline) and _must_go(descriptor):
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _must_go(descriptor: int) -> bool:
    try:
        about = os.fstat(descriptor)
    except OSError:
        # The listing itself had this number.
        return False
    if (about.st_dev, about.st_ino) in _owned:
        return True
    return stat.S_ISSOCK(about.st_mode) and _peer_of(descriptor) in _broker_peers


def _peer_of(descriptor: int) -> str | int | None:
    """The port or the path at the other end of a socket; None without one."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        address = connection.getpeername()
        return int(address[1]) if isinstance(address, tuple) else str(address)
    return None


def _peer_of_url(url: str) -> str | int:
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.scheme.endswith("+socket"):
        return unquote(parts.path)
    return parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def _is_closed(lifeline: int) -> bool:
    poll = select.poll()
    poll.register(lifeline, 0)
    return bool(poll.poll(0))
