"""The seam: what every source of model files does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.registry.package.manifest import Manifest

__all__ = ["Fetched", "Source"]


class Fetched(NamedTuple):
    """Files on this machine, and what they were when they were inspected."""

    folder: Path
    manifest: Manifest


class Source(Protocol):
    """A place that model files come from."""

    def fetch(self, reference: str) -> Fetched:
        """The files of `reference`, hashed and inspected.

        Raises ConfigurationError in one line: nothing is there, or it is not what may be served.
        """
