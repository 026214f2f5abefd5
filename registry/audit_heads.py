"""The heads of audit chains: the last entry of each writer, kept apart from its files.

    AuditLogger -- put --> AuditHeads: the registry's database, the broker --> verification of the files

A file that was cut at its end, or replaced by an older copy, is a valid chain. Only its head, which is stored in
another place, tells that entries are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

__all__ = ["AuditHead", "AuditHeads"]


class AuditHead(NamedTuple):
    """The last entry of a chain: its sequence number, from 1 on, and its MAC as 64 hex digits."""

    sequence: int
    mac: str


class AuditHeads(Protocol):
    """A store of heads, by writer. Calls raise PenstockError when it cannot be reached."""

    def put(self, heads: Mapping[str, AuditHead]) -> None:
        """Store newer heads of these writers."""

    def all(self) -> dict[str, AuditHead]:
        """The heads of all writers. A head that another program has overwritten has sequence 0."""
