"""Where a worker finds versions of its models: under its models root.

start -- initial_packages --> the version of each model that is active until another version is promoted
a job or an operator names a version -- package --> its package, or an error that says why there is none
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from penstock.registry.errors import ConfigurationError, InvalidInput, UnknownModel
from penstock.registry.package import SPEC_FILE, Package, PackageRef, discover, find, load_package
from penstock.registry.queues import parse_name
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import LATEST

__all__ = ["ModelRepository", "DiskRepository", "EmptyRepository"]

logger = logging.getLogger("penstock.server")

_REMEMBERED_S: Final = 2.0
"""While its model.yaml is unchanged, a broken package is read again only after this time: many jobs may name it."""
_MOST_REMEMBERED: Final = 1000


class ModelRepository(Protocol):
    """Packages by model and version label."""

    def package(self, name: str, label: str) -> Package:
        """Raises UnknownModel, InvalidInput and ConfigurationError."""

    def labels(self, name: str) -> list[str]:
        """The versions of a model, in ascending order."""


class _State(NamedTuple):
    """Differs after a file was written or replaced."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path) -> _State:
        found = file.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _Broken(NamedTuple):
    """Why the package with this model.yaml could not be read, and the time of the next try."""

    state: _State
    problem: str
    until: float


class DiskRepository:
    """The packages that lie in `<root>/<name>/<version>` now."""

    def __init__(
        self,
        root: Path,
        trusted_roots: Sequence[Path],
        max_length: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_length: the longest input of any model, even if its package allows more; None: no such limit.

        clock: monotonic seconds.
        """
        self._root = root
        self._trusted_roots = trusted_roots
        self._max_length = max_length
        self._clock = clock
        self._broken: dict[str, _Broken] = {}

    @classmethod
    def of(cls, settings: Settings) -> DiskRepository:
        """The models root of a process with these settings."""
        inference = settings.inference
        return cls(inference.repo_root, settings.trusted_roots, inference.safeguards.max_sequence_length)

    def initial_packages(self, settings: Settings) -> list[Package]:
        """For every model that a worker serves, the version that the settings name, or the highest valid one.

        The search for the highest version passes over drafts and unfinished copies. A model without a valid version is
        left out if the settings do not name it. Raises ConfigurationError if a model or version that the settings name
        is not valid, and if no model is left.
        """
        lying = {name: list(versions) for name, versions in groupby(discover(self._root), key=attrgetter("name"))}
        named, version = settings.worker.models, settings.inference.model_version
        try:
            if version != LATEST:
                return [self._read(find(self._root, name, version).path) for name in named or lying]
            if named:
                return [self._highest(lying.get(name) or [find(self._root, name)]) for name in named]
        except UnknownModel as error:
            raise ConfigurationError(f"{error}. Expected a package under the models root") from None
        except InvalidInput as error:
            raise ConfigurationError(f"Under the models root: {error}") from None
        return self._valid(list(lying.values()))

    def package(self, name: str, label: str) -> Package:
        """See ModelRepository.package. A miss reads the state of one file, whatever the number of packages."""
        reference = f"{parse_name('model', name)}/{parse_name('version', label)}"
        folder, now = self._root / name / label, self._clock()
        state = _state_of_spec(folder, reference)
        broken = self._broken.get(reference)
        if broken is not None and broken.state == state and now < broken.until:
            raise ConfigurationError(broken.problem)
        try:
            return self._read(folder)
        except ConfigurationError as error:
            if len(self._broken) >= _MOST_REMEMBERED:
                self._broken.clear()
            self._broken[reference] = _Broken(state, str(error), now + _REMEMBERED_S)
            raise

    def labels(self, name: str) -> list[str]:
        """See ModelRepository.labels; none while the models root cannot be read."""
        try:
            return [found.version for found in discover(self._root, parse_name("model", name))]
        except ConfigurationError as error:
            logger.error("versions not found: %s", error, extra={"model": name})
            return []

    def _valid(self, models: Sequence[Sequence[PackageRef]]) -> list[Package]:
        """The highest valid version of each model that has one. Raises ConfigurationError if no model has one."""
        packages: list[Package] = []
        problems: list[ConfigurationError] = []
        for versions in models:
            try:
                packages.append(self._highest(versions))
            except ConfigurationError as error:
                logger.error("model not served: %s", error, extra={"model": versions[0].name})
                problems.append(error)
        if problems and not packages:
            raise problems[0]
        return packages

    def _highest(self, versions: Sequence[PackageRef]) -> Package:
        """The last valid version. If none is valid, raises the ConfigurationError of the last version."""
        problems: list[ConfigurationError] = []
        for found in reversed(versions):
            try:
                return self._read(found.path)
            except ConfigurationError as error:
                logger.error("version skipped: %s", error, extra={"model": found.name, "version": found.version})
                problems.append(error)
        raise problems[0]

    def _read(self, folder: Path) -> Package:
        package = load_package(folder, self._trusted_roots)
        return package if self._max_length is None else package.limited_to(self._max_length)


def _state_of_spec(folder: Path, reference: str) -> _State:
    """Raises UnknownModel, ConfigurationError."""
    try:
        return _State.of(folder / SPEC_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise UnknownModel(f"Unknown model {reference!r}. Expected a version under the models root") from None
    except OSError as error:
        raise ConfigurationError(f"{reference}/{SPEC_FILE}: cannot be read ({error.strerror})") from None


class EmptyRepository:
    """For a worker without a models root: it serves only the packages that it was started with."""

    def package(self, name: str, label: str) -> Package:
        """Raises UnknownModel."""
        raise UnknownModel(f"Unknown model {f'{name}/{label}'!r:.80}. Expected a package of this worker")

    def labels(self, name: str) -> list[str]:
        """None."""
        return []
