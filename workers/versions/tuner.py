"""The seam between the drain and what makes loaded models faster: workers/levels/optimizer.py."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from penstock.workers.runtime.base import Runtime
from penstock.workers.versions.version import Observer

__all__ = ["Tuner", "NullTuner"]


class Tuner(Protocol):
    """Watches loaded versions and changes the form in which they answer."""

    def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Observer | None:
        """A version was loaded; batches of it have at most `max_rows` rows. Returns what is to hear of them."""

    def detach(self, key: Hashable) -> None:
        """The version is about to be unloaded."""

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Model -> an entry for each attached version, as plain data."""


class NullTuner:
    """Every model as its author built it."""

    def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Observer | None:
        """Nobody listens."""
        return None

    def detach(self, key: Hashable) -> None:
        """There was nothing."""

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Nothing."""
        return {}
