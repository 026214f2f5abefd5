"""Compiled artefacts on disk for the next start. An artefact is used only if this machine's key sealed it.

    store: parts -> seal -> one file, put in place atomically        load: one file -> seal compared -> parts
    alone: of the workers that need one artefact, one compiles it and the others wait

A compiled artefact is machine code that runs in the worker. So a file is read once, its seal (HMAC-SHA256 with a key
outside the folder) is compared over every byte, and the bytes that were read are used. A file that was changed, renamed
over another or written without the key is moved aside, counted and never executed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from penstock.registry.errors import ConfigurationError

__all__ = ["ArtifactStore"]

logger = logging.getLogger("penstock.compilation")

_KEY_BYTES: Final = 32
_SEAL_HEX: Final = 64
_SUFFIX: Final = ".artifact"
_REFUSED: Final = ".refused"
_LOCK: Final = ".lock"
_LOOK_AGAIN_S: Final = 0.2
_MOST_BYTES: Final = 2 << 30
"""Above it, the least recently used artefacts are removed."""


class ArtifactStore:
    """Sealed artefacts in a folder of this user only. Several processes may use it at once."""

    def __init__(self, folder: Path, key_file: Path, most_bytes: int = _MOST_BYTES) -> None:
        """Makes the folder (0700) and the key (0600) where they are missing.

        Raises ConfigurationError for a folder or a key that others could have written to.
        """
        self.refused = 0
        """Changed artefacts that this process has found."""
        self._folder = _private_folder(folder)
        self._key = _private_key(key_file)
        self._most_bytes = most_bytes

    @contextlib.contextmanager
    def alone(self, name: str, gives_up: Callable[[], bool]) -> Iterator[None]:
        """Holds a lock of this name against other processes, so that they find the artefact that one of them makes.

        gives_up: called while another process holds the lock; when it returns True, the body runs without the lock. The
        body also runs without it where no file can be locked.
        """
        path = self._folder / f"{name}{_LOCK}"
        descriptor: int | None = None
        try:
            while descriptor is None and not gives_up():
                descriptor = _locked(path)
                if descriptor is None:
                    time.sleep(_LOOK_AGAIN_S)
        except OSError as error:
            logger.warning("compilations cannot be locked", extra={"reason": error.strerror})
        try:
            yield
        finally:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    path.unlink()
                os.close(descriptor)

    def load(self, name: str) -> dict[str, bytes] | None:
        """The parts that were stored under this name; None where there are none with a valid seal."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        parts = self._opened(name, data)
        if parts is None:
            self._move_aside(path)
            return None
        with contextlib.suppress(OSError):
            # The folder may be read-only, or another worker may just have removed the file.
            os.utime(path)
        return parts

    def store(self, name: str, parts: Mapping[str, bytes]) -> None:
        """Seals the parts and replaces any others of this name. Without room for them, does nothing."""
        data = self._sealed(name, parts)
        try:
            with tempfile.TemporaryDirectory(dir=self._folder) as draft:
                file = Path(draft) / name
                file.touch(0o600)
                file.write_bytes(data)
                os.replace(file, self._path(name))
            self._make_room()
        except OSError as error:
            # The only effect is that the model is compiled again at the next start.
            logger.warning("a compiled model cannot be stored", extra={"reason": error.strerror})

    def discard(self, name: str) -> None:
        """Removes an unchanged artefact that does not work on this machine."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _sealed(self, name: str, parts: Mapping[str, bytes]) -> bytes:
        header = json.dumps({"name": name, "parts": {part: len(data) for part, data in parts.items()}})
        body = b"".join((header.encode(), b"\n", *parts.values()))
        return self._seal(body) + body

    def _opened(self, name: str, data: bytes) -> dict[str, bytes] | None:
        seal, body = data[:_SEAL_HEX], data[_SEAL_HEX:]
        if not hmac.compare_digest(seal, self._seal(body)):
            return None
        # The seal shows that `_sealed` wrote the body, but perhaps under another name.
        line, _, rest = body.partition(b"\n")
        header = json.loads(line)
        if header["name"] != name:
            return None
        parts: dict[str, bytes] = {}
        for part, length in header["parts"].items():
            parts[part], rest = rest[:length], rest[length:]
        return parts

    def _seal(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()

    def _move_aside(self, path: Path) -> None:
        self.refused += 1
        logger.error("a compiled model was changed on disk and is refused", extra={"artifact": path.name})
        try:
            os.replace(path, path.with_suffix(_REFUSED))
        except OSError as error:
            logger.error("a refused artefact cannot be moved aside", extra={"reason": error.strerror})

    def _make_room(self) -> None:
        found = sorted(
            ((path.stat(), path) for path in self._folder.glob(f"*{_SUFFIX}")), key=lambda one: one[0].st_mtime_ns
        )
        excess = sum(state.st_size for state, _ in found) - self._most_bytes
        for state, path in found[:-1]:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= state.st_size


def _locked(path: Path) -> int | None:
    """The descriptor of the file, locked; None while another process holds the lock. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have removed the file between the open and the lock.
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _private_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid != os.geteuid():
            raise ConfigurationError("compilation.cache_dir belongs to another user. Expected a folder of this user")
        if stat.S_IMODE(state.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise ConfigurationError(f"compilation.cache_dir cannot be used ({error.strerror})") from None
    return folder


def _private_key(file: Path) -> bytes:
    """The key in the file, which is made if it is missing."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return _read_key(file)
        except FileNotFoundError:
            _write_key(file)
            return _read_key(file)
    except OSError as error:
        reason = "a link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigurationError(f"The key of compiled models cannot be used ({reason})") from None


def _read_key(file: Path) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        state = os.fstat(opened.fileno())
        if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
            raise ConfigurationError(
                f"The key of compiled models has mode {stat.S_IMODE(state.st_mode):o}. Expected 600 and this user's"
            )
        key = opened.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise ConfigurationError(f"The key of compiled models is not {_KEY_BYTES} bytes long. Expected the whole key")
    return key


def _write_key(file: Path) -> None:
    """Writes the key under another name first. Of several workers that start at once, one links its key."""
    with tempfile.NamedTemporaryFile(dir=file.parent) as draft:
        draft.write(secrets.token_bytes(_KEY_BYTES))
        draft.flush()
        with contextlib.suppress(FileExistsError):
            os.link(draft.name, file)
