"""Look-ups in the Redis of the shared tier, without I/O: workers and clients read the same entries.

    keys -> SharedEntries.commands -> [one round trip] -> answers -> SharedEntries.opened -> values with lifetimes

The end of an entry is part of its value, by the clock of Redis, which every look-up reads. So one MGET is enough: the
question about each entry's lifetime would take as long as all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.errors import PenstockError
from penstock.safety.cache_entry import EntryKey, open_entry, stored_names

if TYPE_CHECKING:
    from penstock.safety.sealing import DataKeys

__all__ = ["Opened", "SharedEntries", "server_ms"]

_MOST_DIGITS: Final = 15


@dataclass(frozen=True, slots=True)
class Opened:
    """What a look-up found. values: in the order of the keys; None for what is not there. lives_ms: how long each of
    them still lives from the server's answer on."""

    values: list[bytes | None]
    lives_ms: list[int]
    refused: int = 0
    """Entries that were changed, moved, or sealed by a key that is not here."""
    server_ms: int | None = None
    """The clock of Redis. None: it refused the look-up."""


class SharedEntries:
    """The entries under one prefix. data_keys: None means that entries are plain."""

    def __init__(self, prefix: str, data_keys: DataKeys | None) -> None:
        self.prefix: Final = prefix
        self._data_keys = data_keys

    def commands(self, keys: Sequence[EntryKey]) -> list[tuple[bytes | str | int, ...]]:
        """The commands of one look-up; at least one key."""
        return [("MGET", *stored_names(self.prefix, keys)), ("TIME",)]

    def opened(self, keys: Sequence[EntryKey], answers: Sequence[Any]) -> Opened:
        """The live entries in the answers to `commands`."""
        stored_values, now_ms = answers[0], server_ms(answers[1])
        values: list[bytes | None] = [None] * len(keys)
        lives_ms = [0] * len(keys)
        if now_ms is None or not isinstance(stored_values, list) or len(stored_values) != len(keys):
            return Opened(values, lives_ms)
        data_keys, refused = self._data_keys, 0
        for place, stored in enumerate(stored_values):
            if stored is None:
                continue
            if not isinstance(stored, bytes):
                refused += 1
                continue
            try:
                value, expires_ms = open_entry(data_keys, keys[place], stored)
            except PenstockError:
                refused += 1
                continue
            if expires_ms > now_ms:
                values[place], lives_ms[place] = value, expires_ms - now_ms
        return Opened(values, lives_ms, refused, now_ms)


def server_ms(answer: Any) -> int | None:
    """The clock of Redis in Unix milliseconds, from the answer to TIME; None when it was refused."""
    if not isinstance(answer, list) or len(answer) != 2 or not all(_is_number(part) for part in answer):
        return None
    seconds, micros = answer
    return int(seconds) * 1000 + int(micros) // 1000


def _is_number(part: Any) -> bool:
    return isinstance(part, bytes) and len(part) < _MOST_DIGITS and part.isdigit()
