"""Files of keys: regular files that only their owner can read, written in one atomic step.

write_new, replace -> file (mode 0600) -> read_private
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.registry.errors import ConfigurationError

__all__ = ["locked_folder", "read_private", "replace", "write_new"]

_MAX_BYTES: Final = 16 * 1024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def read_private(path: Path, what: str) -> bytes:
    """The bytes of a small file. what: its content, for the error.

    Raises OSError; ConfigurationError for other things than files, and for files that other users can open.
    """
    # If the file is a FIFO, O_NONBLOCK keeps the open from blocking.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) or mode & _OTHERS:
            raise ConfigurationError(
                f"{what} {path.name} has mode {stat.filemode(mode)}. Expected a file that only its owner can read "
                "(mode 0600)"
            )
        with open(descriptor, "rb", closefd=False) as file:
            text = file.read(_MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > _MAX_BYTES:
        raise ConfigurationError(f"{what} {path.name} is too large. Expected at most {_MAX_BYTES} bytes")
    return text


def write_new(path: Path, text: bytes) -> None:
    """Writes a file that does not exist. Raises OSError, and FileExistsError."""
    # A link, not a rename: it fails if another process has written a file meanwhile.
    _write(path, text, os.link)


def replace(path: Path, text: bytes) -> None:
    """Writes a file in the place of another one: a reader finds the old bytes or the new ones. Raises OSError."""
    _write(path, text, os.replace)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Inside the block, other processes wait here for the same folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: bytes, place: Callable[[Path, Path], None]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        place(partial, path)
        _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    # Otherwise a power cut may take the file away after data were sealed with its key.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
