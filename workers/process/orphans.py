"""The record in a device's lock file, and the end of processes that a dead worker left behind.

    lock taken -> write_record: this worker, its supervisor
    lock held  -> end_orphans: the recorded worker lives, and so does its supervisor -> nothing: the device is in use
                               one of them is gone -> each process that has the lock file open is an orphan: it ends

A process is known by its id and its start time, so that another process with the same id is never taken for it. An
orphan has the lock file open, which no other program does. Linux only; elsewhere a held lock is never questioned.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["ProcessId", "end_orphans", "identify", "write_record"]

_PROC: Final = Path("/proc")
_BY_THEMSELVES_S: Final = 1.0
"""Children end with their parent; a large process takes a moment to free its memory."""
_TERM_S: Final = 3.0
"""From SIGTERM to SIGKILL."""
_KILL_S: Final = 5.0
_LOOK_AGAIN_S: Final = 0.02
_RECORD_BYTES: Final = 4096
_START_TIME: Final = 19
"""The place of the start time in /proc/PID/stat behind the name, which may contain spaces."""

logger = logging.getLogger("penstock.server")


class ProcessId(NamedTuple):
    """started: clock ticks from the boot of this machine to the start of the process."""

    pid: int
    started: int


class _Record(NamedTuple):
    worker: ProcessId
    supervisor: ProcessId | None


def identify(pid: int) -> ProcessId | None:
    """The process with this id; None when there is none, or only its exit status is left."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[_START_TIME]))


def write_record(lock: int, supervisor: int | None) -> None:
    """Write into the locked file that this process is the worker, and which process supervises it."""
    if sys.platform != "linux":
        return
    known = (identify(os.getpid()), None if supervisor is None else identify(supervisor))
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps([_machine(), *known]).encode(), 0)


def end_orphans(lock_file: Path) -> bool:
    """Whether orphans held the lock, which are gone now. False: a worker holds it, or the file does not tell.

    Only one process at a time may call this, and none may take the lock meanwhile.
    """
    record = _read_record(lock_file) if sys.platform == "linux" else None
    if record is None or _is_in_use(record):
        return False
    give_up_at = time.monotonic() + _BY_THEMSELVES_S
    while orphans := list(_holders(lock_file)):
        if time.monotonic() >= give_up_at:
            return _end(orphans, record, lock_file)
        time.sleep(_LOOK_AGAIN_S)
    return True


def _is_in_use(record: _Record) -> bool:
    """Whether the worker lives, and the supervisor that it had, if any."""
    return all(each is None or identify(each.pid) == each for each in record)


def _end(orphans: Sequence[ProcessId], record: _Record, lock_file: Path) -> bool:
    are_gone = all([_end_one(orphan) for orphan in orphans])
    event = "orphans of a dead worker ended" if are_gone else "orphans of a dead worker do not end"
    facts = {"pids": [orphan.pid for orphan in orphans], "left_by": record.worker.pid, "device": lock_file.stem}
    logger.warning(event, extra=facts)
    return are_gone


def _end_one(orphan: ProcessId) -> bool:
    """SIGTERM, then SIGKILL; returns whether it has gone."""
    try:
        process = os.pidfd_open(orphan.pid)
    except OSError:
        return True
    try:
        if identify(orphan.pid) != orphan:
            return True
        for number, patience_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            if _has_ended(process, patience_s):
                return True
        return False
    except PermissionError:
        return False
    finally:
        os.close(process)


def _has_ended(process: int, patience_s: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))


def _holders(file: Path) -> Iterator[ProcessId]:
    """The other processes of this user that have the file open."""
    about = file.stat()
    for folder in _PROC.iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        holder = identify(int(folder.name))
        if holder is not None and _has_open(folder / "fd", (about.st_dev, about.st_ino)):
            yield holder


def _has_open(descriptors: Path, file: tuple[int, int]) -> bool:
    # Processes of other users cannot be read. A process or a descriptor may go at any time.
    with suppress(OSError):
        for descriptor in descriptors.iterdir():
            with suppress(FileNotFoundError):
                about = descriptor.stat()
                if (about.st_dev, about.st_ino) == file:
                    return True
    return False


def _read_record(lock_file: Path) -> _Record | None:
    """The record; None without one, and for one of another machine, boot or container."""
    try:
        with lock_file.open("rb") as file:
            machine, worker, supervisor = json.loads(file.read(_RECORD_BYTES))
        if machine != _machine():
            return None
        return _Record(ProcessId(*map(int, worker)), ProcessId(*map(int, supervisor)) if supervisor else None)
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> str:
    """Process ids mean something within one boot and one namespace."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
