"""The jobs whose forward runs now, in a file that outlives the process.

    model thread -- begin, touch, end --> file, memory-mapped <-- hung? -- supervisor
                                               |
    the process dies, the kernel frees its lock '--> report_crashes --> WorkerEnd.suspect, note_death

After a process died in a forward, only the jobs of that forward are suspects, and the process can no longer name them.
A write to the page cache costs some microseconds per batch; a message to the broker before every forward would cost a
round trip. A worker that stops in order removes its journal, so a normal stop counts against no job.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from penstock.registry.broker.base import Held, WorkerEnd
from penstock.registry.broker.incidents import timeout_incident
from penstock.registry.queues import Priority
from penstock.workers import children

__all__ = [
    "MARGIN_S",
    "FileJournal",
    "FormInUse",
    "Journal",
    "NoteDeath",
    "NullJournal",
    "hung",
    "journal_path",
    "report_crashes",
]

_MAGIC: Final = b"PSJ2"
_HEAD: Final = struct.Struct("<4sHH")
"""Magic, number of seats, length of the consumer's name in bytes; the name follows."""
_SEAT: Final = struct.Struct("=ddQd")
"""Last progress and the longest time without any, in monotonic seconds; length of the jobs in bytes; a note: the last
progress of a forward that was found to be over its limit, so that progress makes the note void; or _NO_NOTE."""
_SIZE_AT: Final = 16
_NOTE_AT: Final = 24
_NOTE: Final = struct.Struct("=d")
_NO_NOTE: Final = -1.0
"""The process stood still during this forward: its time is not noted."""
_HEAD_BYTES: Final = 4096
_SEAT_BYTES: Final = 256 * 1024
"""Room for about 2,000 jobs. Of a larger batch the first jobs are kept."""
_LONGEST_CONSUMER: Final = 1024
_SUFFIX: Final = ".journal"
_LOOK_AGAIN_S: Final = 0.02
MARGIN_S: Final = 0.5
"""A forward is killed from outside this long after its limit: its own process acts first and releases other jobs."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(
    tuple[tuple[str, str, str] | None, list[tuple[str, int, bytes, str]], bool],
)

logger = logging.getLogger("penstock.server")

NoteDeath: TypeAlias = Callable[[str, str, str], None]
"""(model, content hash, form): a process died while this form ran jobs. Raises OSError, InvalidInput."""


class FormInUse(NamedTuple):
    """The optimized form that ran the jobs, for example a compiled one."""

    model: str
    content_hash: str
    form: str


class Journal(Protocol):
    """Records every forward. Each seat, numbered from 0, belongs to one thread. Times are monotonic seconds."""

    def begin(
        self,
        seat: int,
        jobs: Sequence[Held],
        limit_s: float,
        now: float,
        form: FormInUse | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        """These jobs are about to run; between two signs of progress at most `limit_s` may pass.

        form: the optimized form that runs them; None for the model as its author built it. is_last: if this forward
        exceeds its limit, its jobs have no further one.
        """

    def touch(self, seat: int, now: float) -> None:
        """The jobs of this seat make progress."""

    def exceeded(self, seat: int) -> None:
        """The forward on this seat exceeded its limit, and its process ends for that."""

    def disturbed(self, seat: int) -> None:
        """The process stood still during the forward on this seat: its jobs get another one."""

    def end(self, seat: int) -> None:
        """The jobs of this seat have run."""

    def retire(self) -> None:
        """The worker stops in order: from now on its death counts against no job."""


class NullJournal:
    """Records nothing, for tests and simulations."""

    def begin(
        self,
        seat: int,
        jobs: Sequence[Held],
        limit_s: float,
        now: float,
        form: FormInUse | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        """Records nothing."""

    def touch(self, seat: int, now: float) -> None:
        """Records nothing."""

    def exceeded(self, seat: int) -> None:
        """Records nothing."""

    def disturbed(self, seat: int) -> None:
        """Records nothing."""

    def end(self, seat: int) -> None:
        """Records nothing."""

    def retire(self) -> None:
        """Removes nothing."""


def journal_path(home: Path, pid: int) -> Path:
    """The journal of the worker process `pid` of this machine."""
    return _folder(home) / f"{socket.gethostname()}-{pid}{_SUFFIX}"


def _folder(home: Path) -> Path:
    return home / "running"


class FileJournal:
    """A journal in a file that this process holds locked.

    Raises OSError when the file cannot be made, or when another process still holds it after `patience_s`.
    """

    def __init__(self, path: Path, consumer: str, seats: int, *, patience_s: float = 10.0) -> None:
        name = consumer.encode()[:_LONGEST_CONSUMER]
        size = _HEAD_BYTES + seats * _SEAT_BYTES
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self.fd: Final = _own(path, patience_s)
        """Holds the lock: when it is closed, the supervisor takes this process for a dead one."""
        os.ftruncate(self.fd, 0)
        # Not a sparse file: on a full disk, a write to the map of a sparse file kills the process.
        os.posix_fallocate(self.fd, 0, size)
        self._map = mmap.mmap(self.fd, size)
        # A fork that a model's code makes neither writes to the map nor holds the lock.
        children.own(self.fd)
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTFORK)
        # The supervisor reads these fields at any time. Each write here is one store; struct.pack_into would clear
        # the field first.
        self._times = memoryview(self._map).cast("d")
        self._sizes = memoryview(self._map).cast("Q")
        self._map[_HEAD.size : _HEAD.size + len(name)] = name
        _HEAD.pack_into(self._map, 0, _MAGIC, seats, len(name))

    def begin(
        self,
        seat: int,
        jobs: Sequence[Held],
        limit_s: float,
        now: float,
        form: FormInUse | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        """See Journal.begin."""
        packed = _encode((form, jobs, is_last))
        while len(packed) > _SEAT_BYTES - _SEAT.size:
            jobs = jobs[: len(jobs) // 2]
            packed = _encode((form, jobs, is_last))
        start = _seat_start(seat)
        self._map[start + _SEAT.size : start + _SEAT.size + len(packed)] = packed
        self._times[start // 8] = now
        self._times[start // 8 + 1] = limit_s
        self._times[(start + _NOTE_AT) // 8] = 0.0
        # Comes last: as long as the size is 0 the seat counts as empty.
        self._sizes[(start + _SIZE_AT) // 8] = len(packed)

    def touch(self, seat: int, now: float) -> None:
        """See Journal.touch."""
        self._times[_seat_start(seat) // 8] = now

    def exceeded(self, seat: int) -> None:
        """See Journal.exceeded."""
        start = _seat_start(seat)
        self._times[(start + _NOTE_AT) // 8] = self._times[start // 8]

    def disturbed(self, seat: int) -> None:
        """See Journal.disturbed."""
        self._times[(_seat_start(seat) + _NOTE_AT) // 8] = _NO_NOTE

    def end(self, seat: int) -> None:
        """See Journal.end."""
        self._sizes[(_seat_start(seat) + _SIZE_AT) // 8] = 0

    def retire(self) -> None:
        """See Journal.retire. A forward that still runs may go on writing to the file, which has no name any more."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def close(self) -> None:
        """Retire, and close the file. The map stays valid for threads that still write to it."""
        self.retire()
        os.close(self.fd)


def _own(path: Path, patience_s: float) -> int:
    """Open and lock the journal's file. A process that reports an older file of this name may finish first."""
    give_up_at = time.monotonic() + patience_s
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _locks(fd) and os.fstat(fd).st_nlink > 0:
            return fd
        os.close(fd)
        if time.monotonic() >= give_up_at:
            raise BlockingIOError(errno.EAGAIN, "another process holds it")
        time.sleep(_LOOK_AGAIN_S)


def _seat_start(seat: int) -> int:
    return _HEAD_BYTES + seat * _SEAT_BYTES


def hung(path: Path, now: float) -> str | None:
    """Why a living worker must be killed: its journal shows a forward over its limit. None: no reason.

    Notes that in the journal for the report of the worker's death: the worker itself may hang in a call that never
    releases the interpreter. A journal that a dead process with the same pid left is ignored.
    """
    try:
        with path.open("r+b", buffering=0) as file:
            magic, seats, _ = _HEAD.unpack(file.read(_HEAD.size))
            over = list(_over_limit(file, seats, now)) if magic == _MAGIC else []
            if not over or _locks(file.fileno()):
                return None
            for seat in over:
                if seat.note != _NO_NOTE:
                    os.pwrite(file.fileno(), _NOTE.pack(seat.since), _seat_start(seat.number) + _NOTE_AT)
            return f"a forward took longer than its limit of {over[0].limit_s:g} s"
    except (OSError, struct.error):
        # The file does not exist yet, exists no longer, or is being made: the next call decides.
        return None


class _OverLimit(NamedTuple):
    number: int
    since: float
    limit_s: float
    note: float


def _over_limit(file: RawIOBase, seats: int, now: float) -> Iterator[_OverLimit]:
    for seat in range(seats):
        file.seek(_seat_start(seat))
        since, limit_s, size, note = _SEAT.unpack(file.read(_SEAT.size))
        if size and now - since > limit_s + MARGIN_S:
            yield _OverLimit(seat, since, limit_s, note)


def _locks(fd: int) -> bool:
    """Lock the file; False when a living process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Forward(NamedTuple):
    """The jobs of one seat. exceeded_s: the limit, if their last forward exceeded it; else 0."""

    jobs: list[Held]
    form: FormInUse | None
    exceeded_s: float


def _read(path: Path) -> tuple[str, list[_Forward]]:
    """The consumer, and what it ran."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        magic, seats, length = _HEAD.unpack_from(head)
        if magic != _MAGIC:
            raise ValueError("not a journal")
        forwards = []
        for seat in range(seats):
            file.seek(_seat_start(seat))
            since, limit_s, size, note = _SEAT.unpack(file.read(_SEAT.size))
            if size > _SEAT_BYTES - _SEAT.size:
                raise ValueError("not a journal")
            if not size:
                continue
            form, held, is_last = _decoder.decode(file.read(size))
            jobs = [Held(slot, Priority(priority), entry, job) for slot, priority, entry, job in held]
            exceeded_s = limit_s if is_last and note == since else 0.0
            forwards.append(_Forward(jobs, FormInUse(*form) if form else None, exceeded_s))
    return head[_HEAD.size : _HEAD.size + length].decode(), forwards


def report_crashes(home: Path, broker: WorkerEnd, ttl_ms: int, note_death: NoteDeath) -> int:
    """Count one crash for each job whose forward ran in a process that is gone; return the number of jobs.

    `note_death` gets each form that ran these jobs; the caller can then refuse a form that kills processes. Reads
    every journal under `home` that no living process holds. Several processes may call this at once, and again after
    an error: each death counts once. Raises BrokerUnavailable, and then keeps the journals that are not reported yet.
    """
    counted = 0
    for path in sorted(_folder(home).glob(f"*{_SUFFIX}")):
        with _ownerless(path) as is_ownerless:
            if not is_ownerless:
                continue
            counted += _report(path, broker, ttl_ms, note_death)
            path.unlink(missing_ok=True)
    return counted


def _report(path: Path, broker: WorkerEnd, ttl_ms: int, note_death: NoteDeath) -> int:
    try:
        consumer, forwards = _read(path)
    except (OSError, ValueError, struct.error, msgspec.DecodeError):
        logger.warning("a journal cannot be read and is dropped", extra={"journal": path.name})
        return 0
    suspects: defaultdict[tuple[str, str], list[Held]] = defaultdict(list)
    for forward in forwards:
        incident = timeout_incident(consumer, forward.exceeded_s) if forward.exceeded_s else consumer
        for job in forward.jobs:
            suspects[job.slot, incident].append(job)
    for (slot, incident), jobs in sorted(suspects.items()):
        broker.suspect(slot, jobs, incident, ttl_ms)
    for model, content_hash, form in sorted({forward.form for forward in forwards if forward.form is not None}):
        try:
            note_death(model, content_hash, form)
        except (OSError, ValueError) as error:
            logger.warning("a death could not be noted", extra={"model": model, "form": form, "reason": str(error)})
    count = sum(len(jobs) for jobs in suspects.values())
    if count:
        logger.warning("a worker died during a forward", extra={"worker": consumer, "jobs": count})
    return count


@contextmanager
def _ownerless(path: Path) -> Iterator[bool]:
    """Whether the journal's process is gone. While the block runs, no other process gets True for it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        # Another reporter may have removed the file between our open and our lock.
        yield _locks(fd) and os.fstat(fd).st_nlink > 0
    finally:
        os.close(fd)
