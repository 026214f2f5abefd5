"""A model package, `models/<name>/<version>/model.yaml` and its files -> `Package` with its checked `ModelSpec`."""

from __future__ import annotations

from penstock.registry.package.loading import Package, PackageRef, discover, find, load_package, read_spec
from penstock.registry.package.spec import FORMATS, SPEC_FILE, ModelSpec

__all__ = [
    "FORMATS",
    "ModelSpec",
    "Package",
    "PackageRef",
    "SPEC_FILE",
    "discover",
    "find",
    "load_package",
    "read_spec",
]
