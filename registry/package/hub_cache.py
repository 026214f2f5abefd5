"""`organisation/name` at a commit -> its folder in the local cache of the Hugging Face hub. Nothing is downloaded.

    <cache>/models--<organisation>--<name>/snapshots/<commit>/<file> -> ../../blobs/<hash>

The cache is the folder HF_HUB_CACHE, else `hub` in HF_HOME, else ~/.cache/huggingface/hub, as for the hub's own tools.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from penstock.registry.errors import MissingRequirement

__all__ = ["HubSnapshot", "cache_folder", "check_hub", "check_revision", "find_snapshot"]

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?\Z")
_REVISION: Final = re.compile(r"[0-9a-f]{40}\Z")


class HubSnapshot(NamedTuple):
    """The files of one commit. repository: the folder that holds the targets of their links."""

    folder: Path
    repository: Path


def check_hub(name: str) -> None:
    """Raises ValueError unless `name` is a valid name of a repository. The cache writes its `/` as `--`."""
    if not _HUB_NAME.match(name) or "--" in name:
        raise ValueError(f"hub: found {name!r:.80}, expected organisation/name")


def check_revision(revision: str | None) -> None:
    """Raises ValueError unless `revision` is a commit."""
    if revision is None or not _REVISION.match(revision):
        raise ValueError(f"revision: found {revision!r:.80}, expected a commit of 40 hex digits")


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder in which the hub's tools keep their downloads."""
    environ = os.environ if environ is None else environ
    if named := environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def find_snapshot(hub: str, revision: str, cache: Path | None = None) -> HubSnapshot:
    """The snapshot of a repository at a commit. Raises MissingRequirement when it is not in the cache."""
    repository = (cache or cache_folder()) / f"models--{hub.replace('/', '--')}"
    folder = repository / "snapshots" / revision
    if not folder.is_dir():
        raise MissingRequirement(
            f"{hub}@{revision[:12]} is not in the local cache of the hub. Expected a download "
            f"before, as with: hf download {hub} --revision {revision}"
        )
    return HubSnapshot(folder, repository)
