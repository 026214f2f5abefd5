"""The protocol of every source of model files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.registry.package.manifest import Manifest

__all__ = ["Fetched", "ModelSource"]


class Fetched(NamedTuple):
    """Files on this machine, and their hashes at the time of inspection."""

    folder: Path
    manifest: Manifest


class ModelSource(Protocol):
    """A source of model files."""

    def fetch(self, reference: str) -> Fetched:
        """The files of `reference`, hashed and inspected.

        Raises ConfigurationError in one line: there are no files, or they may not be served.
        """
