"""The form of the audit log on disk: one chain of MACs for each writer process, over one or more files.

    <writer>.000000.jsonl   {"sequence":1,...,"details":{...},"mac":"<64 hex digits>"}
                            {"sequence":2,...                 "mac": over the MAC before and the bytes before ,"mac"}
    <writer>.000001.jsonl   {"sequence":3,...                 the chain goes on over the files

The first entry of a chain is bound to the writer's name, so that the files of two writers cannot be exchanged.
A chain ends with its process, and after a failure of the disk; its writer then begins another one.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from penstock.registry.audit_heads import AuditHead
from penstock.registry.errors import InvalidInput

__all__ = [
    "AuditEntry",
    "ChainFile",
    "ChainKey",
    "ChainWriter",
    "ReadLine",
    "chain_files",
    "foreign_files",
    "read_lines",
]

_FILE_MODE: Final = 0o600
_MAX_LINE_BYTES: Final = 64 << 10
_FILE: Final = re.compile(r"(?P<writer>[\w.@-]{1,100}-\d{8}T\d{6}Z-[0-9a-f]{8})\.(?P<number>\d{6})\.jsonl", re.ASCII)
_END: Final = re.compile(rb',"mac":"([0-9a-f]{64})"\}\Z')


class AuditEntry(msgspec.Struct, frozen=True):
    """One entry. time: unix seconds. sequence: from 1 on, of its writer."""

    sequence: int
    time: float
    operation: str
    model_id: str | int
    optimization_name: str
    result: str
    details: dict[str, Any]
    writer: str = ""


class _Body(msgspec.Struct):
    sequence: int
    time: float
    operation: str
    model_id: str | int
    optimization_name: str
    result: str
    details: dict[str, Any]


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Body).decode


class ChainKey:
    """One key of the audit log, as the MACs of chains need it."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"penstock audit chain v1", "sha256")

    def first(self, writer: str) -> bytes:
        """The MAC before the first entry of a writer."""
        return hmac.digest(self._key, b"writer " + writer.encode(), "sha256")

    def next(self, before: bytes, body: bytes) -> bytes:
        """The MAC of an entry after the one with the MAC `before` (32 bytes)."""
        return hmac.digest(self._key, before + body, "sha256")


class ReadLine(NamedTuple):
    """One line of a file. entry: None for bytes that are no entry. body: the bytes that its MAC covers."""

    number: int
    entry: AuditEntry | None
    body: bytes
    mac: bytes
    is_torn: bool
    """Whether it lacks its end of line, as after a kill -9 while it was written."""


class ChainFile(NamedTuple):
    """One file of a chain."""

    writer: str
    number: int
    path: Path


def chain_files(folders: Iterable[Path]) -> dict[str, list[ChainFile]]:
    """The files of every writer in these folders, in order. A missing folder has none. Raises OSError."""
    found: dict[str, list[ChainFile]] = {}
    for path in _jsonl_files(folders):
        if match := _FILE.fullmatch(path.name):
            file = ChainFile(match["writer"], int(match["number"]), path)
            found.setdefault(file.writer, []).append(file)
    return {writer: sorted(found[writer], key=lambda file: file.number) for writer in sorted(found)}


def foreign_files(folders: Iterable[Path]) -> list[str]:
    """The names of files that are no part of a chain, such as logs of earlier releases."""
    return sorted(path.name for path in _jsonl_files(folders) if not _FILE.fullmatch(path.name))


def read_lines(file: ChainFile) -> Iterator[ReadLine]:
    """The lines of a file. Raises OSError."""
    *lines, rest = file.path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        end = _END.search(line)
        if end is None:
            yield ReadLine(number, None, line, b"", is_torn=False)
            continue
        body = line[: end.start()]
        yield ReadLine(number, _entry_of(body, file.writer), body, bytes.fromhex(end[1].decode()), is_torn=False)
    if rest:
        yield ReadLine(len(lines) + 1, None, rest, b"", is_torn=True)


def _jsonl_files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        with suppress(FileNotFoundError):
            yield from sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")


def _entry_of(body: bytes, writer: str) -> AuditEntry | None:
    try:
        read = _decode(body + b"}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return AuditEntry(
        read.sequence,
        read.time,
        read.operation,
        read.model_id,
        read.optimization_name,
        read.result,
        read.details,
        writer,
    )


class ChainWriter:
    """Appends the entries of this process. For one thread at a time.

    max_file_bytes: the first sync beyond this size ends a file. clock: unix seconds.

    Attributes:
        writer: the name of the chain; empty until its first entry.
        syncs: how often entries were synced.
    """

    def __init__(
        self, folder: Path, name: str, key: ChainKey, *, max_file_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.writer = ""
        self.syncs = 0
        self._folder = folder
        self._name = re.sub(r"[^\w@-]", "-", name, flags=re.ASCII)[:60] or "program"
        self._key = key
        self._max_file_bytes = max_file_bytes
        self._clock = clock
        self._has_begun = False
        self._unsynced = 0
        self._has_lost = False
        """Whether entries were given up that no `sync` has reported yet."""
        self._descriptor: int | None = None
        self._number = self._size = self._sequence = 0
        self._mac = b""

    @property
    def head(self) -> AuditHead:
        """The last entry that was appended. After a `sync` it is on disk."""
        return AuditHead(self._sequence, self._mac.hex())

    def append(
        self, operation: str, model_id: str | int, optimization_name: str, result: str, details: Mapping[str, Any]
    ) -> AuditEntry:
        """Writes one entry. It is on disk after the next `sync`.

        Raises OSError, and InvalidInput for an entry of more than 64 KiB; then nothing was written.
        """
        self._begin_chain()
        now = self._clock()
        fields = (self._sequence + 1, now, operation, model_id, optimization_name, result, dict(details))
        body = _encode(_Body(*fields))[:-1]
        mac = self._key.next(self._mac, body)
        line = b'%b,"mac":"%b"}\n' % (body, mac.hex().encode())
        if len(line) > _MAX_LINE_BYTES:
            raise InvalidInput(f"An audit entry of {len(line)} bytes is too large. Expected at most {_MAX_LINE_BYTES}")
        self._write(line)
        self._size, self._sequence, self._mac = self._size + len(line), self._sequence + 1, mac
        self._unsynced += 1
        return AuditEntry(*fields, self.writer)

    def sync(self) -> None:
        """Brings every entry to the disk.

        Raises OSError: the entries since the last sync are given up, and the next entry begins another chain.
        """
        if self._has_lost:
            self._has_lost = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._descriptor is None or not self._unsynced:
            return
        try:
            os.fsync(self._descriptor)
        except OSError:
            # After a failed fsync the kernel may drop the pages and report success the next time.
            self._unsynced = 0
            self.abandon()
            raise
        self.syncs += 1
        self._unsynced = 0
        if self._size >= self._max_file_bytes:
            self.close()
            self._number += 1

    def close(self) -> None:
        """Closes the file. A later entry opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self._size = None, 0

    def abandon(self) -> None:
        """Ends this chain where it is; the next entry begins another one. The next sync reports unsynced entries."""
        with suppress(OSError):
            self.close()
        self._has_begun, self._has_lost = False, self._has_lost or self._unsynced > 0
        self._unsynced = self._number = self._size = self._sequence = 0

    def leave_to_parent(self) -> None:
        """In a fork: the chain and its unsynced entries are the parent's."""
        self._unsynced = 0
        self.abandon()

    def _begin_chain(self) -> None:
        if self._has_begun:
            return
        began = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y%m%dT%H%M%SZ")
        self.writer = f"{self._name}-{began}-{secrets.token_hex(4)}"
        self._mac = self._key.first(self.writer)
        self._has_begun = True

    def _write(self, line: bytes) -> None:
        descriptor = self._open()
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            try:
                os.ftruncate(descriptor, self._size)
            except OSError:
                # The rest of the line stays. Only the last line of a chain may be incomplete.
                self.abandon()
            raise

    def _open(self) -> int:
        if self._descriptor is None:
            path = self._folder / f"{self.writer}.{self._number:06d}.jsonl"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, _FILE_MODE)
            self._size = os.fstat(self._descriptor).st_size
            _sync_folder(self._folder)
        return self._descriptor


def _sync_folder(folder: Path) -> None:
    # Otherwise a power cut may take the file away with its entries.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
