"""Where a worker finds versions of its models that it was not given at its start: under its models root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from registry.errors import UnknownModel
from registry.package import Package, discover, find, load_package

__all__ = ["Library", "ModelsRoot", "Nothing"]


class Library(Protocol):
    """Packages by model and version label."""

    def package(self, name: str, label: str) -> Package:
        """Raises UnknownModel, InvalidInput and ConfigurationError."""

    def labels(self, name: str) -> list[str]:
        """The versions of a model, in ascending order."""


class ModelsRoot:
    """The packages that lie in `<root>/<name>/<version>` now."""

    def __init__(self, root: Path, trusted_roots: Sequence[Path]) -> None:
        self._root = root
        self._trusted_roots = trusted_roots

    def package(self, name: str, label: str) -> Package:
        """See Library.package."""
        return load_package(find(self._root, name, label).path, self._trusted_roots)

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
