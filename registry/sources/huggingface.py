"""A repository of the Hugging Face hub at one commit, from the local cache: `organisation/name@<40 hex digits>`.

Branches and tags move, so only commits are taken; nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

from registry.errors import ConfigurationError, shown
from registry.hub_cache import check_hub, check_revision, find_snapshot
from registry.inspection import inspect_transformers
from registry.manifest import FileTree, hash_files
from registry.sources.base import Fetched

__all__ = ["HubSource"]


class HubSource:
    """Snapshots in the hub's local cache; `cache` None: where the hub's own tools keep it."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache

    def fetch(self, reference: str) -> Fetched:
        """The snapshot of `organisation/name@commit`, which must hold safetensors and ask for no code."""
        hub, _, revision = reference.partition("@")
        try:
            check_hub(hub)
            check_revision(revision)
        except ValueError as problem:
            raise ConfigurationError(f"{shown(reference)}: {problem}") from None
        snapshot = find_snapshot(hub, revision, self._cache)
        label = f"{hub}@{revision[:12]}"
        manifest = hash_files(FileTree(snapshot.folder, label, links_within=snapshot.repository))
        inspect_transformers(snapshot.folder, label)
        return Fetched(snapshot.folder, manifest)
