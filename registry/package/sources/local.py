"""A package's folder on this machine: `models/<name>/<version>`."""

from __future__ import annotations

from pathlib import Path

from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.package import SPEC_FILE, load_package
from penstock.registry.package.sources.base import Fetched

__all__ = ["LocalSource"]


class LocalSource:
    """Packages in folders. Relative references begin at `root`."""

    def __init__(self, root: Path = Path()) -> None:
        self._root = root

    def fetch(self, reference: str) -> Fetched:
        """The package in the folder that `reference` names."""
        folder = self._root / reference
        if not reference or not folder.is_dir():
            raise ConfigurationError(f"{shown(folder.name)}: no such folder, expected one with a {SPEC_FILE}")
        package = load_package(folder)
        return Fetched(package.folder, package.manifest())
