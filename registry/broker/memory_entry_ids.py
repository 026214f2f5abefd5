"""Ids of entries of the broker in memory: the time of the entry, then a number."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["EntryId", "next_entry_id", "parse_entry_id"]

EntryId: TypeAlias = tuple[int, int]


def parse_entry_id(entry_id: str) -> EntryId:
    """`<ms>-<n>` as numbers; a missing `n` is 0."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)


def next_entry_id(last_id: EntryId, now_ms: float) -> EntryId:
    """An id after `last_id`, also when the clock went back."""
    return (int(now_ms), 0) if int(now_ms) > last_id[0] else (last_id[0], last_id[1] + 1)
