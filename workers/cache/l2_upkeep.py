"""Upkeep of the cache on disk: what is in it, whether every entry opens, and new seals after a change of keys.

Each reads or writes a few entries at a time, so that workers go on, and the write-ahead log stays short. An interrupted
`rekey` leaves entries of both keys; the next one seals the rest.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from penstock.workers.cache.l2_file import L2File, Row, evict
from penstock.workers.cache.l2_rows import FORMAT, ID_BYTES, PLAIN_ID, Opened, Rows, times_of

__all__ = ["Contents", "GroupContents", "Progress", "Rekeyed", "Upkeep", "Verified"]

Progress = Callable[[int, int], None]
"""Called with the entries looked at so far, and all. What it raises ends the work between two transactions."""

_COUNTED: Final = 4096
_READ: Final = 128
_RESEALED: Final = 64
_CLEARED: Final = 2048
_BEFORE_ALL: Final = -(1 << 63)
_END: Final = "SELECT max(id) FROM (SELECT id FROM entries WHERE id > ? ORDER BY id LIMIT ?)"
_ALL: Final = "id, bound, front, data"
_COUNT: Final = f"""
    SELECT CAST(grp AS INTEGER), CAST(substr(front, 1, {ID_BYTES}) AS BLOB), count(*),
    sum(length(front) + length(data)), sum(expires <= ?), min(CAST(stored AS INTEGER)), max(CAST(stored AS INTEGER))
    FROM entries WHERE id > ? AND id <= ? GROUP BY 1, 2"""  # noqa: S608  only a number is put in


@dataclass(slots=True)
class GroupContents:
    """The entries of one group. Times: milliseconds since 1970. nbytes: of the values as they are stored."""

    entries: int = 0
    nbytes: int = 0
    expired: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None


@dataclass(slots=True)
class Contents:
    """What is in the cache. file_bytes: of the file with its write-ahead log."""

    is_sealed: bool
    file_bytes: int
    groups: dict[str, GroupContents] = field(default_factory=dict)
    """By group; for the cache of a worker, the content hash of a version."""
    keys: dict[str, int] = field(default_factory=dict)
    """Entries by the id of the key that sealed them; `plain` without a key."""

    @property
    def entries(self) -> int:
        """All entries."""
        return sum(group.entries for group in self.groups.values())


@dataclass(slots=True)
class Verified:
    """How many entries opened, or did not. Expired entries are counted apart if they open."""

    good: int = 0
    expired: int = 0
    changed: int = 0
    """The key is here, but the entry was changed, cut or moved."""
    other_key: int = 0
    """Sealed by a key that is not here."""

    @property
    def unopenable(self) -> int:
        """Entries that do not open here."""
        return self.changed + self.other_key


@dataclass(slots=True)
class Rekeyed:
    """How many entries have a new seal, had the first key's already, or do not open here and stay as they are."""

    resealed: int = 0
    current: int = 0
    unopenable: int = 0


class Upkeep:
    """Works on an L2File beside its workers. rows: as values are stored there.

    clock: seconds since 1970. Each method raises sqlite3.Error or OSError if the file cannot be used, or is damaged.
    """

    def __init__(self, file: L2File, rows: Rows, *, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._rows = rows
        self._clock = clock

    @property
    def entries(self) -> int:
        """All entries, expired ones included."""
        return int(self._file.read("SELECT count(*) FROM entries")[0][0])

    @property
    def nbytes(self) -> int:
        """The bytes of the file with its write-ahead log."""
        return self._file.nbytes

    @property
    def is_sealed(self) -> bool:
        """Whether the values are encrypted."""
        return self._file.is_sealed

    def inspect(self) -> Contents:
        """The entries by group and by key. Needs no key, and opens no value."""
        names = {row[0]: _text(row[1]) for row in self._file.read("SELECT grp, name FROM groups")}
        contents = Contents(self._file.is_sealed, self._file.nbytes)
        now, last = int(self._clock() * 1000), _BEFORE_ALL
        while (end := self._file.read(_END, (last, _COUNTED))[0][0]) is not None and end > last:
            for row in self._file.read(_COUNT, (now, last, end)):
                _add(contents, names.get(row[0], f"{row[0] & (1 << 64) - 1:016x}"), row)
            last = end
        return contents

    def verify(self, progress: Progress | None = None) -> Verified:
        """Opens every entry. Changes nothing."""
        verified, now = Verified(), int(self._clock() * 1000)
        for rows in self._walk(f"SELECT {_ALL}", _READ, progress):
            for row in rows:
                front = row[2]
                if (opened := self._open(row)) is not None:
                    if now < opened.expires:
                        verified.good += 1
                    else:
                        verified.expired += 1
                elif isinstance(front, bytes) and not self._rows.is_ours(front):
                    verified.other_key += 1
                else:
                    verified.changed += 1
        return verified

    def rekey(self, progress: Progress | None = None) -> Rekeyed:
        """Seals entries of older keys with the first key. An entry that does not open stays as it is."""
        rekeyed = Rekeyed()
        for rows in self._walk(f"SELECT id, CAST(substr(front, 1, {ID_BYTES}) AS BLOB)", _COUNTED // 4, progress):
            older = [number for number, key_id in rows if not self._rows.is_current(key_id)]
            rekeyed.current += len(rows) - len(older)
            for begin in range(0, len(older), _RESEALED):
                some = older[begin : begin + _RESEALED]
                resealed = self._file.write(partial(self._reseal, some))
                rekeyed.resealed += resealed
                rekeyed.unopenable += len(some) - resealed
        return rekeyed

    def clear(self, progress: Progress | None = None) -> int:
        """Removes all entries, and gives the disk back; returns how many there were."""
        total, removed = self.entries, 0
        while some := self._file.write(partial(evict, count=_CLEARED)):
            removed += some
            if progress is not None:
                progress(removed, max(removed, total))
        self._file.compact()
        return removed

    def _reseal(self, numbers: list[int], cursor: sqlite3.Cursor) -> int:
        resealed = []
        for number in numbers:
            row = cursor.execute(f"SELECT {_ALL} FROM entries WHERE id = ?", (number,)).fetchone()  # noqa: S608  columns
            if row is not None and (opened := self._open(row)) is not None:
                times = times_of(opened.stored, opened.expires)
                resealed.append((*self._rows.seal(opened.value, FORMAT + row[1], times), number))
        cursor.executemany("UPDATE entries SET front = ?, data = ? WHERE id = ?", resealed)
        return len(resealed)

    def _open(self, row: Row) -> Opened | None:
        _, bound, front, data = row
        return self._rows.open(front, data, FORMAT + bound) if isinstance(bound, bytes) else None

    def _walk(self, select: str, count: int, progress: Progress | None) -> Iterator[list[Row]]:
        """All entries in the order of their ids, some at a time."""
        ((total,),) = self._file.read("SELECT count(*) FROM entries")
        done, last = 0, _BEFORE_ALL
        if progress is not None:
            progress(0, total)
        while rows := self._file.read(f"{select} FROM entries WHERE id > ? ORDER BY id LIMIT ?", (last, count)):
            if rows[-1][0] <= last:
                raise sqlite3.DatabaseError("the order of the entries is damaged")
            yield rows
            done, last = done + len(rows), rows[-1][0]
            if progress is not None:
                # Workers may have added entries meanwhile.
                progress(done, max(done, total))


def _add(contents: Contents, group: str, row: Row) -> None:
    _, key_id, entries, nbytes, expired, oldest, newest = row
    found = contents.groups.setdefault(group, GroupContents())
    found.entries += entries
    found.nbytes += nbytes or 0
    found.expired += expired or 0
    found.oldest_ms = oldest if found.oldest_ms is None else min(found.oldest_ms, oldest)
    found.newest_ms = newest if found.newest_ms is None else max(found.newest_ms, newest)
    key = "plain" if key_id == PLAIN_ID else (key_id or b"").hex()
    contents.keys[key] = contents.keys.get(key, 0) + entries


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
