"""Files of keys: only their owner reads them, and a change is whole or not there."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.safety.private_file import locked_folder, read_private, replace, write_new


def test_written_files_are_private(tmp_path: Path):
    """A new file and a replaced one have mode 0600 whatever the umask, and leave no other file."""
    path = tmp_path / "home" / "a.key"
    before = os.umask(0)
    try:
        write_new(path, b"first")
        assert (read_private(path, "The key"), stat.S_IMODE(path.stat().st_mode)) == (b"first", 0o600)
        path.chmod(0o644)
        replace(path, b"second")
    finally:
        os.umask(before)
    assert (read_private(path, "The key"), stat.S_IMODE(path.stat().st_mode)) == (b"second", 0o600)
    assert os.listdir(path.parent) == [path.name]
    with pytest.raises(FileExistsError):
        write_new(path, b"third")
    assert read_private(path, "The key") == b"second"
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_is_too_large_is_refused(tmp_path: Path):
    """A file is read as a whole or not at all: a key that was cut would be another key."""
    path = tmp_path / "a.key"
    write_new(path, bytes(16 * 1024))
    assert len(read_private(path, "The key")) == 16 * 1024
    replace(path, bytes(16 * 1024 + 1))
    with pytest.raises(ConfigurationError, match=r"The key a\.key is too large"):
        read_private(path, "The key")


def test_a_folder_is_locked_for_one(tmp_path: Path):
    """Inside the block no other open file gets the lock; afterwards the next one does."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with locked_folder(tmp_path), pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
