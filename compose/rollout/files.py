"""Packages and exports on this machine; compose/rollout/remote.py has them on the machine of a worker."""

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
    """The packages and exports of one machine."""

    def package(self, path: Path) -> Registrable:
        """The package in a folder. Raises ConfigurationError."""

    def export(self, version: RegisteredVersion, path: Path, *, is_int8: bool = False) -> ExportedFile:
        """Write a version as an ONNX file, after its outputs matched the model's; the file is complete or absent.

        Raises InvalidInput for a model of another kind or a path that cannot be written, and ConfigurationError when a
        package is missing or the model has no such graph.
        """


class LocalFiles:
    """The files of this machine."""

    def package(self, path: Path) -> Registrable:
        """See Files.package."""
        return load_package(path)

    def export(self, version: RegisteredVersion, path: Path, *, is_int8: bool = False) -> ExportedFile:
        """See Files.export."""
        from penstock.workers.runtime.exporter import export_package

        package = load_package(Path(version.source))
        differences = export_package(package, version.content_hash, path, is_int8=is_int8)
        return ExportedFile(os.fspath(path), path.stat().st_size, differences)
