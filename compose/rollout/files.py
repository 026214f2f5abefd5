"""Packages and exports where this process runs, or, through compose/rollout/remote.py, where a worker does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from penstock.registry.catalog import Registrable
from penstock.registry.catalog.tables import RegisteredVersion
from penstock.registry.operator_rpc import ExportedFile
from penstock.registry.package import load_package

__all__ = ["Files", "LocalFiles"]


class Files(Protocol):
    """The machine whose folders are meant."""

    def package(self, path: Path) -> Registrable:
        """The package in a folder. Raises ConfigurationError."""

    def export(self, version: RegisteredVersion, path: Path, *, is_int8: bool = False) -> ExportedFile:
        """Writes a version as ONNX, as a whole or not at all, once its answers matched the model's.

        Raises InvalidInput for a model of another kind or a path that cannot be written, and ConfigurationError when a
        package is missing or the model has no such graph.
        """


class LocalFiles:
    """This machine's."""

    def package(self, path: Path) -> Registrable:
        """See Files.package."""
        return load_package(path)

    def export(self, version: RegisteredVersion, path: Path, *, is_int8: bool = False) -> ExportedFile:
        """See Files.export."""
        from penstock.workers.runtime.exporter import export_package

        package = load_package(Path(version.source))
        differences = export_package(package, version.content_hash, path, is_int8=is_int8)
        return ExportedFile(os.fspath(path), path.stat().st_size, differences)
