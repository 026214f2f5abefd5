"""Folder -> Manifest: the SHA-256 of every file, one hash of all of them, and a check for later changes.

    Package.manifest() -> runtime.load() -> manifest.check_unchanged()

Unless `check_unchanged` raises, the loaded bytes are the hashed bytes: a file that was written, replaced, added or
removed in between has another inode, size or change time, and no program can set a change time. A second write in the
same tick of the file system's clock would leave the same change time: a file that changed a moment ago is hashed after
a pause.

Links must stay inside the folder. Anything but files and folders is refused before it is opened. `__pycache__` is
ignored: a package's modules are executed from the hashed sources.
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
"""Longer than a tick of the clock of any local file system."""
_QUIET_WITHIN_S: Final = 5.0
"""A file that is still being written after this time is refused."""


class _FileState(NamedTuple):
    """Attributes of a file, of which every write changes at least one."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> _FileState:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class FileTree:
    """The files below a folder.

    label: names the folder in messages. links_within: links must lead into this folder.
    """

    folder: Path
    label: str
    links_within: Path

    def files(self) -> Iterator[str]:
        """The relative path of every file, with `/`. Raises ConfigurationError for anything but files and folders."""
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
            # This includes links that lead in a circle, which Path.resolve refuses.
            raise self._unreadable(path, error) from None
        if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(self.links_within.resolve()):
            raise ConfigurationError(f"{self.label}: file {shown(path)}: a link leads out, expected a file inside")
        if not is_file:
            raise ConfigurationError(f"{self.label}: file {shown(path)}: found no regular file, expected one")

    def state(self, path: str) -> _FileState:
        """The present state of a file. Raises ConfigurationError when it is gone."""
        try:
            return _FileState.of(os.stat(self.folder / path))
        except OSError as error:
            raise self._unreadable(path, error) from None

    def hash(self, path: str) -> tuple[str, _FileState]:
        """(SHA-256, state) of a file that did not change while it was hashed. Raises ConfigurationError."""
        give_up = time.monotonic() + _QUIET_WITHIN_S
        try:
            # If a FIFO has replaced the file, the open must not block.
            with open(os.open(self.folder / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                while time.monotonic() < give_up:
                    state = _state_of_file(file)
                    if pause_s := _until_settled_s(state):
                        time.sleep(pause_s)
                        continue
                    digest = file_digest(file, "sha256").hexdigest()
                    if _FileState.of(os.fstat(file.fileno())) == state:
                        return digest, state
                    file.seek(0)
        except OSError as error:
            raise self._unreadable(path, error) from None
        raise ConfigurationError(f"{self.label}: file {shown(path)}: is being written to, expected a file at rest")

    def _unreadable(self, path: str, error: OSError) -> ConfigurationError:
        return ConfigurationError(f"{self.label}: file {shown(path)}: cannot be read ({error.strerror})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a package when they were hashed.

    files, source_files: SHA-256 by relative path. The second are the weights of an installed or hub source.
    """

    files: Mapping[str, str]
    source_files: Mapping[str, str]
    content_hash: str
    _trees: tuple[tuple[FileTree, Mapping[str, _FileState]], ...]

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(state.size for _, states in self._trees for state in states.values())

    def check_unchanged(self) -> None:
        """Raises ConfigurationError with the file's name if one was written, replaced, added or removed since."""
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


def hash_files(package: FileTree, sources: Mapping[str, FileTree] | None = None) -> Manifest:
    """The manifest of a package's folder and of those of weights that are elsewhere.

    sources: these, by a prefix for the paths of their files. content_hash is the SHA-256 of the lines that `sha256sum`
    writes for the files in the order of their paths. The lines of each source follow an empty line. Raises
    ConfigurationError.
    """
    files, states = _hashed(package)
    trees = [(package, states)]
    listing = _listing(files)
    source_files: dict[str, str] = {}
    for prefix, source in (sources or {}).items():
        found, source_states = _hashed(source)
        trees.append((source, source_states))
        prefixed = {f"{prefix}{path}": digest for path, digest in found.items()}
        source_files |= prefixed
        listing += "\n" + _listing(prefixed)
    return Manifest(files, source_files, sha256(listing.encode()).hexdigest(), tuple(trees))


def _hashed(tree: FileTree) -> tuple[dict[str, str], dict[str, _FileState]]:
    hashed = {path: tree.hash(path) for path in sorted(tree.files())}
    return {path: digest for path, (digest, _) in hashed.items()}, {path: state for path, (_, state) in hashed.items()}


def _listing(files: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {path}\n" for path, digest in files.items())


def _state_of_file(file: BinaryIO) -> _FileState:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a file")
    return _FileState.of(found)


def _until_settled_s(state: _FileState) -> float:
    """The time until another change would have another change time."""
    left_ns = state.changed_ns + _CLOCK_TICK_NS - time.time_ns()
    # More than a tick: the clock was set back, so that the next change has another time.
    return left_ns / 1e9 if 0 < left_ns <= _CLOCK_TICK_NS else 0.0
