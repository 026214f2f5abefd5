"""Which jobs are on the model now, in a file that outlives the process that runs them.

    model thread -- begin, touch, end --> file, memory-mapped <-- hung? -- supervisor
                                               |
    process dies, the kernel frees its lock    '--> leftovers --> report_crashes --> WorkerEnd.suspect

A process that dies in a forward cannot say any more which jobs it was running, and only those are suspects. Writing
it to the page cache costs some microseconds per batch; telling the broker before every forward would cost a round
trip. A worker that stops in order has no journal left: drains and releases count against nobody.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from penstock.registry.broker.base import Held, WorkerEnd
from penstock.registry.queues import Priority
from penstock.workers.levels.decision_log import DecisionLog

__all__ = ["MARGIN_S", "FileJournal", "FormInUse", "Journal", "NullJournal", "hung", "journal_path", "report_crashes"]

_MAGIC: Final = b"PSJ1"
_HEAD: Final = struct.Struct("<4sHH")
"""Magic, seats, bytes of the consumer's name, which follows."""
_SEAT: Final = struct.Struct("=ddQ")
"""When it last showed progress and for how long it may be silent, in monotonic seconds; bytes of the jobs."""
_SIZE_AT: Final = 16
_HEAD_BYTES: Final = 4096
_SEAT_BYTES: Final = 256 * 1024
"""For some 2,000 jobs. Of larger batches the first jobs are kept."""
_LONGEST_CONSUMER: Final = 1024
_SUFFIX: Final = ".journal"
_LOOK_AGAIN_S: Final = 0.02
MARGIN_S: Final = 0.5
"""How far beyond its limit a forward is killed from outside: its own process comes first, and gives back the rest."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(
    tuple[tuple[str, str, str] | None, list[tuple[str, int, bytes, str]]],
)

logger = logging.getLogger("penstock.server")


class FormInUse(NamedTuple):
    """What ran the jobs, where that was not the model as its author built it."""

    model: str
    content_hash: str
    form: str


class Journal(Protocol):
    """Told of every forward. Seats are numbered from 0; one thread each. Times are monotonic seconds."""

    def begin(self, seat: int, jobs: Sequence[Held], limit_s: float, now: float, form: FormInUse | None = None) -> None:
        """These jobs are about to run, for up to `limit_s` from one sign of progress to the next.

        form: in which their model does, None where that is as its author built it.
        """

    def touch(self, seat: int, now: float) -> None:
        """They show progress."""

    def end(self, seat: int) -> None:
        """They have run."""

    def retire(self) -> None:
        """The worker stops in order: from here on no death counts against anybody."""


class NullJournal:
    """The journal of a worker whose death nobody will look into."""

    def begin(self, seat: int, jobs: Sequence[Held], limit_s: float, now: float, form: FormInUse | None = None) -> None:
        """Nothing is kept."""

    def touch(self, seat: int, now: float) -> None:
        """Nothing is kept."""

    def end(self, seat: int) -> None:
        """Nothing is kept."""

    def retire(self) -> None:
        """Nothing was kept."""


def journal_path(home: Path, pid: int) -> Path:
    """The journal of the worker process `pid` of this machine."""
    return _folder(home) / f"{socket.gethostname()}-{pid}{_SUFFIX}"


def _folder(home: Path) -> Path:
    return home / "running"


class FileJournal:
    """A journal in a file of this process, locked for as long as it lives.

    Raises OSError when it cannot be made, also when somebody else has not let go of the file after `patience_s`.
    """

    def __init__(self, path: Path, consumer: str, seats: int, *, patience_s: float = 10.0) -> None:
        name = consumer.encode()[:_LONGEST_CONSUMER]
        size = _HEAD_BYTES + seats * _SEAT_BYTES
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._fd = _own(path, patience_s)
        os.ftruncate(self._fd, 0)
        # Not a sparse file: to write to a map that the disk has no room for is a deadly signal.
        os.posix_fallocate(self._fd, 0, size)
        self._map = mmap.mmap(self._fd, size)
        # Fields that the supervisor reads meanwhile: each is one store, where struct.pack_into clears them first.
        self._times = memoryview(self._map).cast("d")
        self._sizes = memoryview(self._map).cast("Q")
        self._map[_HEAD.size : _HEAD.size + len(name)] = name
        _HEAD.pack_into(self._map, 0, _MAGIC, seats, len(name))

    def begin(self, seat: int, jobs: Sequence[Held], limit_s: float, now: float, form: FormInUse | None = None) -> None:
        """See Journal.begin."""
        packed = _encode((form, jobs))
        while len(packed) > _SEAT_BYTES - _SEAT.size:
            jobs = jobs[: len(jobs) // 2]
            packed = _encode((form, jobs))
        start = _seat_start(seat)
        self._map[start + _SEAT.size : start + _SEAT.size + len(packed)] = packed
        self._times[start // 8] = now
        self._times[start // 8 + 1] = limit_s
        # Last, as the seat is empty without it, whatever else it says.
        self._sizes[(start + _SIZE_AT) // 8] = len(packed)

    def touch(self, seat: int, now: float) -> None:
        """See Journal.touch."""
        self._times[_seat_start(seat) // 8] = now

    def end(self, seat: int) -> None:
        """See Journal.end."""
        self._sizes[(_seat_start(seat) + _SIZE_AT) // 8] = 0

    def retire(self) -> None:
        """See Journal.retire. Forwards that still run may go on writing: nobody will read it."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)


def _own(path: Path, patience_s: float) -> int:
    """The journal's file, locked by this process. Whoever reports a leftover of that name may finish first."""
    give_up_at = time.monotonic() + patience_s
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _locks(fd) and os.fstat(fd).st_nlink > 0:
            return fd
        os.close(fd)
        if time.monotonic() >= give_up_at:
            raise BlockingIOError(errno.EAGAIN, "another process has not let go of it")
        time.sleep(_LOOK_AGAIN_S)


def _seat_start(seat: int) -> int:
    return _HEAD_BYTES + seat * _SEAT_BYTES


def hung(path: Path, now: float) -> str | None:
    """Why a worker that lives must be killed, by its journal: a forward is over its limit; else None.

    What a dead process of the same number left there says nothing about the one that lives.
    """
    try:
        with path.open("rb") as file:
            magic, seats, _ = _HEAD.unpack(file.read(_HEAD.size))
            for seat in range(seats if magic == _MAGIC else 0):
                file.seek(_seat_start(seat))
                since, limit_s, size = _SEAT.unpack(file.read(_SEAT.size))
                if size and now - since > limit_s + MARGIN_S and not _locks(file.fileno()):
                    return f"a forward took longer than its limit of {limit_s:g} s"
    except (OSError, struct.error):
        # Not there yet, no longer, or caught while it was made: the next look will tell.
        return None
    return None


def _locks(fd: int) -> bool:
    """Whether the file could be locked: no living process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> tuple[str, list[Held], set[FormInUse]]:
    """The consumer, the jobs of all its forwards, and the forms that ran them."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        magic, seats, length = _HEAD.unpack_from(head)
        if magic != _MAGIC:
            raise ValueError("not a journal")
        jobs: list[Held] = []
        forms: set[FormInUse] = set()
        for seat in range(seats):
            file.seek(_seat_start(seat))
            _, _, size = _SEAT.unpack(file.read(_SEAT.size))
            if size > _SEAT_BYTES - _SEAT.size:
                raise ValueError("not a journal")
            form, held = _decoder.decode(file.read(size)) if size else (None, [])
            jobs += [Held(slot, Priority(priority), entry, job) for slot, priority, entry, job in held]
            if form is not None:
                forms.add(FormInUse(*form))
    return head[_HEAD.size : _HEAD.size + length].decode(), jobs, forms


def report_crashes(home: Path, broker: WorkerEnd, ttl_ms: int) -> int:
    """Counts one crash for each job that was on the model of a process which is gone; returns how many.

    The forms that ran them are noted in the log of decisions: one that kills its process is left off one day. Looks
    at every journal under `home` that no living process holds. Safe to call by several at once, and again after an
    error: each death counts once. Raises BrokerUnavailable, and then keeps what is not reported yet.
    """
    counted = 0
    for path in sorted(_folder(home).glob(f"*{_SUFFIX}")):
        with _ownerless(path) as is_ownerless:
            if not is_ownerless:
                continue
            counted += _report(path, DecisionLog(home), broker, ttl_ms)
            path.unlink(missing_ok=True)
    return counted


def _report(path: Path, log: DecisionLog, broker: WorkerEnd, ttl_ms: int) -> int:
    try:
        consumer, jobs, forms = _read(path)
    except (OSError, ValueError, struct.error, msgspec.DecodeError):
        logger.warning("a journal cannot be read and is dropped", extra={"journal": path.name})
        return 0
    for slot in sorted({job.slot for job in jobs}):
        broker.suspect(slot, [job for job in jobs if job.slot == slot], consumer, ttl_ms)
    for model, content_hash, form in sorted(forms):
        try:
            log.note_death(model, content_hash, form)
        except (OSError, ValueError) as error:
            logger.warning("a death could not be noted", extra={"model": model, "form": form, "reason": str(error)})
    if jobs:
        logger.warning("a worker died with jobs on its model", extra={"worker": consumer, "jobs": len(jobs)})
    return len(jobs)


@contextmanager
def _ownerless(path: Path) -> Iterator[bool]:
    """Whether the journal's process is gone; while the block runs nobody else finds that, too."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        # Another reporter may have dropped it between our open and our lock.
        yield _locks(fd) and os.fstat(fd).st_nlink > 0
    finally:
        os.close(fd)
