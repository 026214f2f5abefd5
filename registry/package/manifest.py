"""Folder -> Manifest: the SHA-256 of every file, one hash for all of them, and whether anything changed since.

    Package.manifest() -> runtime.load() -> manifest.check_unchanged()

What was hashed is what was loaded, unless `check_unchanged` raises: a file that is written to, replaced, added or
removed in between has another inode, size or change time, and no program can set a change time. A file that changed
within the last moments is waited for before it is hashed, as a second write in the same tick of the file system's
clock would leave the same time.

Links may stay inside the folder only, and what is neither file nor folder is refused before it is opened.
`__pycache__` is left out: a package's modules are executed from the sources that were hashed.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from penstock.registry.errors import ConfigurationError, shown

__all__ = ["MAX_FILES", "FileTree", "Manifest", "hash_files"]

MAX_FILES: Final = 10_000
_MAX_DEPTH: Final = 16
_CLOCK_TICK_NS: Final = 50_000_000
"""More than a tick of any local file system's clock."""
_QUIET_WITHIN_S: Final = 5.0
"""A file that is still written to after so long is refused."""


class _State(NamedTuple):
    """What no write leaves as it was."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> _State:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class FileTree:
    """The files below a folder.

    label: how errors name it. links_within: the folder that links in it may lead to.
    """

    folder: Path
    label: str
    links_within: Path

    def files(self) -> Iterator[str]:
        """The relative path of every file, `/` between its parts. Raises ConfigurationError for anything else."""
        for count, path in enumerate(self._walk(self.folder, 0)):
            if count == MAX_FILES:
                raise ConfigurationError(f"{self.label}: found more than {MAX_FILES} files, expected fewer")
            yield path

    def _walk(self, folder: Path, depth: int) -> Iterator[str]:
        if depth > _MAX_DEPTH:
            raise ConfigurationError(f"{self.label}: found folders deeper than {_MAX_DEPTH}, expected fewer levels")
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise ConfigurationError(f"{self.label}: a folder cannot be read ({error.strerror})") from None
        for entry in entries:
            path = Path(entry.path).relative_to(self.folder).as_posix()
            if not path.isprintable():
                raise ConfigurationError(f"{self.label}: file {shown(path)}: expected a name of printable characters")
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from self._walk(Path(entry.path), depth + 1)
            else:
                self._check_kind(path, entry)
                yield path

    def _check_kind(self, path: str, entry: os.DirEntry[str]) -> None:
        try:
            is_file = entry.is_file()
        except OSError as error:
            # Links that lead in a circle, too, which Path.resolve would not take.
            raise self._unreadable(path, error) from None
        if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(self.links_within.resolve()):
            raise ConfigurationError(f"{self.label}: file {shown(path)}: a link leads out, expected a file inside")
        if not is_file:
            raise ConfigurationError(f"{self.label}: file {shown(path)}: found no regular file, expected one")

    def state(self, path: str) -> _State:
        """The state of one file now. Raises ConfigurationError when it is gone."""
        try:
            return _State.of(os.stat(self.folder / path))
        except OSError as error:
            raise self._unreadable(path, error) from None

    def hash(self, path: str) -> tuple[str, _State]:
        """(SHA-256, state) of one file, which did not change in between. Raises ConfigurationError."""
        give_up = time.monotonic() + _QUIET_WITHIN_S
        try:
            # A FIFO that took the file's place must not block the open.
            with open(os.open(self.folder / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                while time.monotonic() < give_up:
                    state = _state_of_file(file)
                    if pause_s := _until_settled_s(state):
                        time.sleep(pause_s)
                        continue
                    digest = file_digest(file, "sha256").hexdigest()
                    if _State.of(os.fstat(file.fileno())) == state:
                        return digest, state
                    file.seek(0)
        except OSError as error:
            raise self._unreadable(path, error) from None
        raise ConfigurationError(f"{self.label}: file {shown(path)}: is being written to, expected a file at rest")

    def _unreadable(self, path: str, error: OSError) -> ConfigurationError:
        return ConfigurationError(f"{self.label}: file {shown(path)}: cannot be read ({error.strerror})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a package consisted of when it was hashed.

    files, source_files: SHA-256 by relative path; the second are the weights of an installed or hub source.
    """

    files: Mapping[str, str]
    source_files: Mapping[str, str]
    content_hash: str
    _trees: tuple[tuple[FileTree, Mapping[str, _State]], ...]

    def check_unchanged(self) -> None:
        """Raises ConfigurationError, naming the file, if any was written, replaced, added or removed since."""
        for tree, states in self._trees:
            present = set(tree.files())
            for path, state in states.items():
                if path not in present or tree.state(path) != state:
                    raise ConfigurationError(
                        f"{tree.label}: file {shown(path)}: changed since it was hashed, expected the same bytes"
                    )
            if added := sorted(present - states.keys()):
                raise ConfigurationError(
                    f"{tree.label}: file {shown(added[0])}: appeared since the others were hashed, expected none"
                )


def hash_files(package: FileTree, source: FileTree | None = None) -> Manifest:
    """The manifest of a package's folder and, if its weights lie elsewhere, of their folder.

    content_hash is the SHA-256 of the lines that `sha256sum` writes for the files in the order of their paths; the
    lines of the source follow an empty one. Raises ConfigurationError.
    """
    files, states = _hashed(package)
    trees = [(package, states)]
    listing = _listing(files)
    source_files: dict[str, str] = {}
    if source is not None:
        source_files, source_states = _hashed(source)
        trees.append((source, source_states))
        listing += "\n" + _listing(source_files)
    return Manifest(files, source_files, sha256(listing.encode()).hexdigest(), tuple(trees))


def _hashed(tree: FileTree) -> tuple[dict[str, str], dict[str, _State]]:
    hashed = {path: tree.hash(path) for path in sorted(tree.files())}
    return {path: digest for path, (digest, _) in hashed.items()}, {path: state for path, (_, state) in hashed.items()}


def _listing(files: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {path}\n" for path, digest in files.items())


def _state_of_file(file: BinaryIO) -> _State:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a file")
    return _State.of(found)


def _until_settled_s(state: _State) -> float:
    """How long until a further change could not leave the same change time."""
    left_ns = state.changed_ns + _CLOCK_TICK_NS - time.time_ns()
    # More than a tick means that the clock was set back: the next change gets another time anyhow.
    return left_ns / 1e9 if 0 < left_ns <= _CLOCK_TICK_NS else 0.0
