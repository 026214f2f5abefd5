"""A tier of the cache that outlives the process: entries by EntryKey, with a lifetime, as bytes.

tiers.py asks L1 (memory.py) first, then these: L2 on this machine (l2.py), L3 for the fleet (l3.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.safety.cache_entry import EntryKey

__all__ = ["Found", "Put", "Tier", "TierStats"]


class Found(NamedTuple):
    """The value of an entry, and the seconds until it expires."""

    value: bytes
    ttl_s: float


class Put(NamedTuple):
    """An entry to store for `ttl_s` seconds."""

    key: EntryKey
    value: bytes
    ttl_s: float


@dataclass(slots=True)
class TierStats:
    """The counters of one tier since its start. Only `entries` and `nbytes` go down."""

    hits: int = 0
    misses: int = 0
    """Keys that were not found, expired entries and refused ones included."""
    puts: int = 0
    evicted: int = 0
    """Entries that left before they expired, for want of room."""
    expired: int = 0
    refused: int = 0
    """Entries that could not be opened: changed, cut, moved, or sealed by a key that is not here."""
    errors: int = 0
    """Calls that failed: the disk was full, the server did not answer in time."""
    skipped: int = 0
    """Calls that were not made, because the tier was broken shortly before."""
    entries: int = 0
    nbytes: int = 0
    is_size_known: bool = True
    """Whether the tier counts `entries`, `nbytes`, `evicted` and `expired`."""


class Tier(Protocol):
    """One tier; for any thread. No call raises because the tier is broken: it counts that, and finds nothing."""

    @property
    def name(self) -> str:
        """`l2` or `l3`."""

    @property
    def stats(self) -> TierStats:
        """A copy of the counters."""

    def get_many(self, keys: Sequence[EntryKey]) -> list[Found | None]:
        """The live entries under these keys, in order; None for what is not here."""

    def put_many(self, entries: Sequence[Put]) -> int:
        """Store entries, each in place of an earlier one under its key; returns how many were stored."""

    def delete_many(self, keys: Sequence[EntryKey]) -> int:
        """Remove entries; returns how many there were."""

    def forget(self, group: str) -> int:
        """Remove all entries of a group; returns how many there were."""

    def clear(self) -> int:
        """Remove all entries of this cache, and nothing else; returns how many there were."""

    def close(self) -> None:
        """Close files and connections. May be called twice."""
