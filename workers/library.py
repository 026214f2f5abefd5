"""Where a worker finds versions of its models that it was not given at its start: under its models root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from registry.errors import ConfigurationError, UnknownModel
from registry.package import Package, discover, find, load_package
from registry.settings import LATEST, Settings

__all__ = ["Library", "ModelsRoot", "Nothing"]


class Library(Protocol):
    """Packages by model and version label."""

    def package(self, name: str, label: str) -> Package:
        """Raises UnknownModel, InvalidInput and ConfigurationError."""

    def labels(self, name: str) -> list[str]:
        """The versions of a model, in ascending order."""


class ModelsRoot:
    """The packages that lie in `<root>/<name>/<version>` now."""

    def __init__(self, root: Path, trusted_roots: Sequence[Path], max_length: int | None = None) -> None:
        """max_length: what no input's length may exceed, whatever its package says; None: no such limit."""
        self._root = root
        self._trusted_roots = trusted_roots
        self._max_length = max_length

    @classmethod
    def of(cls, settings: Settings) -> ModelsRoot:
        """The models root of a process with these settings."""
        inference = settings.inference
        return cls(inference.repo_root, settings.trusted_roots, inference.safeguards.max_sequence_length)

    def answering(self, settings: Settings) -> list[Package]:
        """Of every model that a worker is to serve, the version that the settings name, or the highest.

        Raises ConfigurationError for a missing one.
        """
        wanted = settings.inference.model_version
        names = settings.worker.models or sorted({found.name for found in discover(self._root)})
        try:
            return [self._load(name, None if wanted == LATEST else wanted) for name in names]
        except UnknownModel as error:
            raise ConfigurationError(f"{error}. Expected a package under the models root") from None

    def package(self, name: str, label: str) -> Package:
        """See Library.package."""
        return self._load(name, label)

    def _load(self, name: str, label: str | None) -> Package:
        package = load_package(find(self._root, name, label).path, self._trusted_roots)
        if self._max_length is None:
            return package
        return package.limited_to(self._max_length)

    def labels(self, name: str) -> list[str]:
        """See Library.labels."""
        return [found.version for found in discover(self._root) if found.name == name]


class Nothing:
    """No packages but those that the worker was given."""

    def package(self, name: str, label: str) -> Package:
        """Raises UnknownModel."""
        raise UnknownModel(f"Unknown model {f'{name}/{label}'!r:.80}. Expected a version that this worker was given")

    def labels(self, name: str) -> list[str]:
        """None."""
        return []
