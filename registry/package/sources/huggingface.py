"""A repository of the Hugging Face hub at one commit, from the local cache: `organisation/name@<40 hex digits>`.

    weights in the format of transformers -> HubSource: the folder in the cache; a package names it as its `source`
    a whole package, with a model.yaml    -> HubPackages: a copy in <models root>/<name>/<version>

Only commits are accepted, because branches and tags move. Nothing is downloaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.package import SPEC_FILE
from penstock.registry.package.hub_cache import check_hub, check_revision, find_snapshot
from penstock.registry.package.inspection import inspect_transformers
from penstock.registry.package.manifest import FileTree, hash_files
from penstock.registry.package.sources.base import Fetched
from penstock.registry.package.sources.install import download_folder, install

__all__ = ["HubPackages", "HubSource"]


class HubSource:
    """Snapshots in the hub's local cache. `cache` None: the cache of the hub's own tools."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache

    def fetch(self, reference: str) -> Fetched:
        """The snapshot of `organisation/name@commit`. It must have safetensors and need no code of its own."""
        found = _find(reference, self._cache)
        manifest = hash_files(found.tree)
        inspect_transformers(found.tree.folder, found.tree.label)
        return Fetched(found.tree.folder, manifest)


class HubPackages:
    """Whole packages from the hub's local cache, copied into a models root."""

    def __init__(self, models_root: Path, cache: Path | None = None) -> None:
        self._models_root = models_root
        self._cache = cache

    def fetch(self, reference: str) -> Fetched:
        """The package of `organisation/name@commit`, now in `<models root>/<name>/<version>`."""
        found = _find(reference, self._cache)
        files = list(found.tree.files())
        if SPEC_FILE not in files:
            raise ConfigurationError(
                f"{found.tree.label}: found no {SPEC_FILE}, expected a model package. Weights alone are served by a "
                f"package of your own with source: {{hub: {found.hub}, revision: {found.revision}}}"
            )
        with download_folder(self._models_root) as temporary:
            for path in files:
                copy = temporary / "download" / path
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found.tree.folder / path, copy)
            return install(temporary / "download", self._models_root, temporary, found.tree.label)


class _Found(NamedTuple):
    hub: str
    revision: str
    tree: FileTree


def _find(reference: str, cache: Path | None) -> _Found:
    hub, _, revision = reference.partition("@")
    try:
        check_hub(hub)
        check_revision(revision)
    except ValueError as problem:
        raise ConfigurationError(f"{shown(reference)}: {problem}") from None
    snapshot = find_snapshot(hub, revision, cache)
    return _Found(hub, revision, FileTree(snapshot.folder, f"{hub}@{revision[:12]}", links_within=snapshot.repository))
