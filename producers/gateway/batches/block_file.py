"""Bytes on disk as blocks: a killed writer leaves whole blocks and at most one that is cut, which `open` removes.

    file = (length of the block (uint32 LE)  block)...        block = plain bytes, or sealed ones (safety/sealing.py)

A sealed block is bound to the name of its file and to its place there. It opens in no other file and in no other place.
No reader takes a block of over MOST_PLAIN_BYTES plain bytes, and no writer writes one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from penstock.registry.envelope import BodyKeys
from penstock.registry.errors import PenstockError

__all__ = ["BLOCK_BYTES", "MOST_PLAIN_BYTES", "BlockTooLong", "BlockWriter", "FileBusy", "FileDamaged", "read_blocks"]

BLOCK_BYTES: Final = 256 * 1024
"""Of one block of an upload, and of a journal whose lines are shorter."""
MOST_PLAIN_BYTES: Final = 1024 * 1024 * 1024
"""Of one block. An answer is one line of a block: 2,048 vectors of 4,096 numbers are up to 200 MB of JSON."""
_LENGTH_BYTES: Final = 4
_MOST_BLOCK_BYTES: Final = MOST_PLAIN_BYTES + 64 * 1024
"""With the seal."""


class BlockTooLong(PenstockError):
    """No reader would take the block."""


class FileBusy(PenstockError):
    """Another process writes the file."""


class FileDamaged(PenstockError):
    """A file was changed, cut or exchanged since it was written."""


class BlockWriter:
    """Appends blocks to a file that no other process writes meanwhile. The lock ends with the process.

    The file is made with mode 0600. nbytes: the plain bytes so far. Raises FileBusy and OSError.
    """

    def __init__(self, path: Path, keys: BodyKeys | None) -> None:
        self._name = path.name
        self._keys = keys
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file = open(descriptor, "r+b")  # noqa: SIM115 - open as long as the writer is
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise FileBusy("Another process writes this file") from None
        self.nbytes = 0
        self._count = 0

    def recover(self) -> Iterator[bytes]:
        """The blocks that are there. After the last one, a block that was cut is removed. Call it before `append`."""
        end = 0
        for block in _blocks(self._file, self._name, self._keys):
            self.nbytes += len(block)
            self._count += 1
            end = self._file.tell()
            yield block
        self._file.truncate(end)
        self._file.seek(end)

    def append(self, plain: bytes) -> None:
        """Writes one block. It survives the process, and a power cut after `sync`. Raises BlockTooLong."""
        if len(plain) > MOST_PLAIN_BYTES:
            raise BlockTooLong(f"Bad block of {len(plain)} bytes. Expected at most {MOST_PLAIN_BYTES}")
        block = plain if self._keys is None else self._keys.seal(plain, _bound(self._name, self._count))
        self._file.write(len(block).to_bytes(_LENGTH_BYTES, "little") + block)
        self._file.flush()
        self._count += 1
        self.nbytes += len(plain)

    def sync(self) -> None:
        """Waits until the disk has the blocks."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file and ends the lock."""
        self._file.close()


def read_blocks(path: Path, nbytes: int, keys: BodyKeys | None) -> Iterator[bytes]:
    """The plain blocks of a file that has `nbytes` plain bytes. Raises FileDamaged."""
    left = nbytes
    try:
        with path.open("rb") as file:
            for block in _blocks(file, path.name, keys):
                left -= len(block)
                yield block
    except OSError:
        left = -1
    if left:
        raise FileDamaged("The file was changed, cut or removed on the disk")


def _blocks(file: BinaryIO, name: str, keys: BodyKeys | None) -> Iterator[bytes]:
    """The whole blocks from the beginning of a file."""
    file_bytes = os.fstat(file.fileno()).st_size
    for place in range(1 << 32):
        head = file.read(_LENGTH_BYTES)
        size = int.from_bytes(head, "little")
        if len(head) < _LENGTH_BYTES or size > min(_MOST_BLOCK_BYTES, file_bytes - file.tell()):
            # The memory for the block is taken before its bytes are read: a length that was cut may be any number.
            return
        block = file.read(size)
        if len(block) < size:
            return
        if keys is None:
            yield block
            continue
        try:
            yield keys.open(block, _bound(name, place))
        except PenstockError:
            raise FileDamaged("The file was changed or moved on the disk, or its key is not here") from None


def _bound(name: str, place: int) -> bytes:
    return b"penstock file v1\0%s\0%d" % (name.encode(), place)
