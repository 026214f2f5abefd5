"""The cache on this machine's disk: SQLite, values encrypted with AES-256-GCM, shared by the workers of one user.

    L2Cache (this file)   what is asked and stored, its lifetime, pauses after errors, counters
    l2_rows.py            a value to a row and back: names, sealing
    l2_file.py            the file: connections, transactions, its bound, damage
    l2_upkeep.py          inspect, verify, rekey

Entries leave when their time is over, and those stored first when room is needed. A use does not delay that: it would
cost a write for each read. Lifetimes are of the wall clock, because they outlive the process. An entry that was stored
in the future is not served: the clock was set back, and the age of the entry is unknown.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from penstock.registry.backoff import backoff_delay_s
from penstock.registry.errors import ConfigurationError
from penstock.safety.cache_entry import EntryKey
from penstock.workers.cache.l2_file import MIN_BYTES, L2File, Row, count_removed, evict, is_damage
from penstock.workers.cache.l2_rows import FORMAT, Name, group_number, name_of, rows_for, times_of, unpack_front
from penstock.workers.cache.l2_upkeep import Contents, Rekeyed, Upkeep, Verified
from penstock.workers.cache.tier import Found, Put, TierStats

if TYPE_CHECKING:
    from penstock.safety.sealing import DataKeys

__all__ = ["L2Cache", "L2CacheConfig"]

logger = logging.getLogger("penstock.cache")

T = TypeVar("T")
_ROW_BYTES: Final = 144
"""A row besides its value, with its places in the two indices."""
_BATCH_BYTES: Final = 1 << 20
"""Rows of one transaction: other processes wait for it."""
_BATCH_ROWS: Final = 512
_SWEPT: Final = 128
"""Expired entries that one transaction removes."""
_EVICTED: Final = 64
"""Entries that make room at a time."""
_REMOVED: Final = 2048
"""Entries that one transaction removes when many are."""
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_LONGEST_TTL_S: Final = 10 * 365 * 86_400.0
_TOLERANCE_MS: Final = 5_000
"""By how much a clock may be set back before entries that were just stored are no longer served."""
_SELECT_ONE: Final = "SELECT front, data FROM entries WHERE name = ?"
_MOST_NAMES: Final = 256
"""Names in one query."""
_SWEEP: Final = "DELETE FROM entries WHERE id IN (SELECT id FROM entries WHERE expires <= ? ORDER BY expires LIMIT ?)"
_INSERT: Final = "INSERT INTO entries (stored, expires, grp, name, bound, front, data) VALUES (?, ?, ?, ?, ?, ?, ?)"
_NO_ROW: Final = (None, None)


class _Batch(NamedTuple):
    """The entries of one transaction, sealed."""

    names: list[int]
    """Of all entries, those that are not storable included."""
    rows: list[Row]
    groups: dict[int, str]
    """The names of groups that this process has not written yet."""
    storable: int
    nbytes: int


class _Stored(NamedTuple):
    """How many entries left when a batch was stored."""

    expired: int
    evicted: int


@dataclass(frozen=True, slots=True)
class L2CacheConfig:
    """Where the cache on disk is, and its bounds.

    ttl_seconds: the lifetime of entries for which none is given. encryption_key: 32 bytes, or several keys; None:
    values are stored plain. max_bytes: of the file with its write-ahead log, at least 4 MiB. read_wait_ms,
    write_wait_ms: how long a call waits for a lock that another process holds on the file.
    """

    db_path: Path | str = "~/.penstock/inference_cache/cache.db"
    ttl_seconds: float = 86_400.0
    encryption_key: bytes | DataKeys | None = field(default=None, repr=False)
    max_bytes: int = 1 << 30
    read_wait_ms: float = 20.0
    write_wait_ms: float = 100.0


class L2Cache:
    """A tier on this machine's disk; see Tier. For any thread, and for several processes on one file.

    clock: seconds since 1970. monotonic: seconds for pauses after errors: reading and writing pause apart, so that a
    full disk still gives answers.

    Raises ConfigurationError for a key of another length, a bound below 4 MiB, a lifetime that is not positive, and a
    place where others could read or replace the file. A file that cannot be used now is no such error; see Tier.
    """

    name: Final = "l2"

    def __init__(
        self,
        config: L2CacheConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or L2CacheConfig()
        if config.max_bytes < MIN_BYTES:
            raise ConfigurationError(f"The cache on disk has {config.max_bytes} bytes. Expected at least {MIN_BYTES}")
        if not config.ttl_seconds > 0:
            raise ConfigurationError(f"ttl_seconds is {config.ttl_seconds}. Expected more than 0")
        self._rows = rows_for(config.encryption_key)
        self._ttl_s = config.ttl_seconds
        self._clock = clock
        self._file = L2File(
            Path(config.db_path).expanduser().absolute(),
            max_bytes=config.max_bytes,
            is_sealed=config.encryption_key is not None,
            read_wait_s=config.read_wait_ms / 1000,
            write_wait_s=config.write_wait_ms / 1000,
            clock=monotonic,
        )
        self._reading = _Pause(monotonic)
        self._writing = _Pause(monotonic)
        self._stats = TierStats()
        self._counting = threading.Lock()
        self._groups: set[int] = set()
        """The groups whose names this process has written."""
        self._read("SELECT 1")

    def get(self, key: EntryKey | str) -> bytes | None:
        """The value of a live entry; None if there is none."""
        number, bound = name_of(_entry_key(key))
        rows = self._read(_SELECT_ONE, (number,))
        opened = None
        if rows:
            front, data = rows[0]
            opened = self._rows.open(front, data, bound)
            if opened is None:
                self._refuse(number, front, data)
            elif not opened[1] - _TOLERANCE_MS <= self._clock() * 1000 < opened[2]:
                opened = None
        stats = self._stats
        with self._counting:
            if opened is None:
                stats.misses += 1
                return None
            stats.hits += 1
        return opened[0]

    def put(self, key: EntryKey | str, value: bytes, ttl_seconds: float | None = None) -> bool:
        """Store an entry in place of an earlier one; returns whether it was stored."""
        ttl_s = self._ttl_s if ttl_seconds is None else ttl_seconds
        return self.put_many([Put(_entry_key(key), value, ttl_s)]) == 1

    def delete(self, key: EntryKey | str) -> bool:
        """Remove an entry; returns whether there was one."""
        return self.delete_many([_entry_key(key)]) == 1

    @property
    def stats(self) -> TierStats:
        """A copy of the counters; the sizes are of the file, to which other processes write, too."""
        with self._counting:
            stats = replace(self._stats)
        if not self._reading.lasts():
            rows = self._read("SELECT entries FROM totals LIMIT 1")
            stats.entries = rows[0][0] if rows and isinstance(rows[0][0], int) else 0
            stats.nbytes = self._file.nbytes
        return stats

    def get_many(self, keys: Sequence[EntryKey]) -> list[Found | None]:
        """See Tier."""
        named = [*map(name_of, keys)]
        names = [number for number, _ in named]
        rows: list[Row] = []
        for begin in range(0, len(names), _MOST_NAMES):
            some = names[begin : begin + _MOST_NAMES]
            size = _size_for(len(some))
            found = self._read(_SELECTS[size], some + [None] * (size - len(some)))
            # Only a damaged file has two rows of one name: then it is unknown which row belongs to which key.
            rows += found[: len(some)] if len(found) == size else [_NO_ROW] * len(some)
        return self._opened(rows, named)

    def put_many(self, entries: Sequence[Put]) -> int:
        """See Tier. An entry without a lifetime, or one that is too large, only removes the earlier one."""
        stored = 0
        now = int(self._clock() * 1000)
        for some in self._batches(entries):
            # Sealed before the transaction: other processes wait for that.
            batch = self._sealed(some, now)
            done = self._write(partial(self._store, batch, now), nbytes=batch.nbytes)
            if done is None:
                break
            self._groups |= batch.groups.keys()
            stored += batch.storable
            with self._counting:
                self._stats.puts += batch.storable
                self._stats.expired += done.expired
                self._stats.evicted += done.evicted
        return stored

    def delete_many(self, keys: Sequence[EntryKey]) -> int:
        """See Tier."""
        removed = 0
        names = [name_of(key)[0] for key in keys]
        for begin in range(0, len(names), _MOST_NAMES):
            removed += self._write(partial(_remove_names, names[begin : begin + _MOST_NAMES])) or 0
        return removed

    def forget(self, group: str) -> int:
        """See Tier. Takes seconds for a large group; other calls go on meanwhile."""
        number, removed = group_number(group), 0
        rows = self._read("SELECT id FROM entries INDEXED BY by_name WHERE grp = ?", (number,))
        ids = sorted(row[0] for row in rows)
        for begin in range(0, len(ids), _REMOVED):
            # The group again: another process may have used the id of a removed entry.
            which = [(each, number) for each in ids[begin : begin + _REMOVED]]
            removed += self._write(partial(_remove_ids, which)) or 0
        if removed:
            self._attempt(self._writing, self._file.compact)
        return removed

    def clear(self) -> int:
        """See Tier. Takes seconds for a large file; other calls go on meanwhile."""
        removed = 0
        while some := self._write(partial(evict, count=_REMOVED)):
            removed += some
        self._attempt(self._writing, self._file.compact)
        return removed

    def close(self) -> None:
        """See Tier."""
        self._file.close()

    def inspect(self) -> Contents:
        """Entries by group and key, without values; see Upkeep."""
        return self._upkeep.inspect()

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Verified:
        """Opens every entry; see Upkeep."""
        return self._upkeep.verify(progress)

    def rekey(self, progress: Callable[[int, int], None] | None = None) -> Rekeyed:
        """Seals entries of older keys with the first key; see Upkeep."""
        return self._upkeep.rekey(progress)

    @property
    def _upkeep(self) -> Upkeep:
        return Upkeep(self._file, self._rows, clock=self._clock)

    def _opened(self, rows: Sequence[Row], named: Sequence[Name]) -> list[Found | None]:
        """The live entries in these rows. A row that cannot be opened although its key is here is removed."""
        decrypt_by_id, unopenable = self._rows.decrypt_by_id, self._rows.unopenable
        now = int(self._clock() * 1000)
        found: list[Found | None] = []
        for (front, data), (number, bound) in zip(rows, named, strict=True):
            live = None
            if data is not None:
                # As Rows.open, without two calls more: this is the way of each look-up.
                try:
                    key_id, nonce, stored, expires = unpack_front(front)
                    value = decrypt_by_id[key_id](nonce, data, bound + front)
                except unopenable:
                    self._refuse(number, front, data)
                else:
                    if stored - _TOLERANCE_MS <= now < expires:
                        live = Found(value, (expires - (now if now > stored else stored)) / 1000)
            found.append(live)
        misses = found.count(None)
        with self._counting:
            self._stats.hits += len(found) - misses
            self._stats.misses += misses
        return found

    def _refuse(self, name: int, front: object, data: object) -> None:
        with self._counting:
            self._stats.refused += 1
        # One that another key sealed stays: another worker may have that key.
        if not isinstance(front, bytes) or self._rows.is_ours(front):
            self._write(partial(_remove_row, name, front, data), waits=False)

    def _is_storable(self, entry: Put) -> bool:
        return entry.ttl_s > 0 and len(entry.value) + _ROW_BYTES <= self._file.max_value_bytes

    def _batches(self, entries: Sequence[Put]) -> Iterator[list[Put]]:
        """Entries of one transaction each."""
        batch: list[Put] = []
        nbytes, most = 0, min(_BATCH_BYTES, self._file.max_value_bytes)
        for entry in entries:
            size = len(entry.value) + _ROW_BYTES
            if batch and (nbytes + size > most or len(batch) == _BATCH_ROWS):
                yield batch
                batch, nbytes = [], 0
            batch.append(entry)
            nbytes += size
        if batch:
            yield batch

    def _sealed(self, entries: Sequence[Put], now: int) -> _Batch:
        seal, rows, storable, groups, nbytes = self._rows.seal, dict[int, Row | None](), 0, dict[int, str](), 0
        for entry in entries:
            name, bound = name_of(entry.key)
            if not self._is_storable(entry):
                rows[name] = None
                continue
            expires = now + int(min(entry.ttl_s, _LONGEST_TTL_S) * 1000)
            group = group_number(entry.key.group)
            front, data = seal(entry.value, bound, times_of(now, expires))
            rows[name] = (now, expires, group, name, bound[len(FORMAT) :], front, data)
            storable += 1
            nbytes += len(data) + _ROW_BYTES
            if group not in self._groups:
                groups[group] = entry.key.group
        return _Batch([*rows], [row for row in rows.values() if row is not None], groups, storable, nbytes)

    def _store(self, batch: _Batch, now: int, cursor: sqlite3.Cursor) -> _Stored:
        """Replaces and adds the entries of a batch; expired entries leave, and the oldest ones where room is needed."""
        expired = _sweep(cursor, now)
        _remove_names(batch.names, cursor)
        evicted = 0
        while self._file.pages_to_free(cursor, batch.nbytes) > 0 and (some := evict(cursor, _EVICTED)):
            evicted += some
        if batch.groups:
            cursor.executemany("INSERT OR REPLACE INTO groups VALUES (?, ?)", batch.groups.items())
        cursor.executemany(_INSERT, batch.rows)
        cursor.execute("UPDATE totals SET entries = entries + ?", (len(batch.rows),))
        self._file.trim(cursor)
        return _Stored(expired, evicted)

    def _read(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        # As `_attempt`, without a call more: this is on the way of each look-up.
        if self._reading.lasts():
            self._skip()
            return []
        try:
            rows = self._file.read(sql, parameters)
        except (sqlite3.Error, OSError) as error:
            self._fail(self._reading, error)
            return []
        self._reading.end()
        return rows

    def _write(self, work: Callable[[sqlite3.Cursor], T], *, nbytes: int = 0, waits: bool = True) -> T | None:
        return self._attempt(self._writing, partial(self._file.write, work, nbytes=nbytes, waits=waits))

    def _attempt(self, pause: _Pause, call: Callable[[], T]) -> T | None:
        """What the call returns; None if it fails, or if an earlier failure is not long ago."""
        if pause.lasts():
            self._skip()
            return None
        try:
            done = call()
        except (sqlite3.Error, OSError) as error:
            self._fail(pause, error)
            return None
        pause.end()
        return done

    def _skip(self) -> None:
        with self._counting:
            self._stats.skipped += 1

    def _fail(self, pause: _Pause, error: sqlite3.Error | OSError) -> None:
        pause_s = pause.begin()
        with self._counting:
            self._stats.errors += 1
        reason = error.strerror if isinstance(error, OSError) else str(error)
        logger.warning("the cache on disk failed and is skipped", extra={"reason": reason, "pause_s": pause_s})
        if is_damage(error):
            try:
                self._file.begin_anew(error)
            except (sqlite3.Error, OSError) as problem:
                logger.warning("the damaged cache on disk stays for now", extra={"reason": str(problem)})


class _Pause:
    """A tier that failed is left alone for a while, longer after each failure in a row."""

    __slots__ = ("_clock", "_failures", "_until")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    def lasts(self) -> bool:
        """Whether the tier is to be left alone."""
        return self._failures > 0 and self._clock() < self._until

    def begin(self) -> float:
        """Begin a pause after a failure; returns its seconds."""
        self._failures += 1
        pause_s = backoff_delay_s(self._failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter=1.0)
        self._until = self._clock() + pause_s
        return pause_s

    def end(self) -> None:
        """A call succeeded."""
        self._failures = 0


def _entry_key(key: EntryKey | str) -> EntryKey:
    return EntryKey("", key.encode()) if isinstance(key, str) else key


_SIZES: Final = (2, 4, 8, 16, 32, 64, 128, _MOST_NAMES)
"""Few sizes of lists of names, the rest filled with NULL: SQLite prepares each statement once."""
# One row for each name, in their order, of NULLs where there is no entry. A list behind IN costs a sorted copy.
_SELECTS: Final = {
    size: f"WITH asked (n) AS (VALUES {','.join(['(?)'] * size)})"  # noqa: S608  only question marks are put in
    " SELECT front, data FROM asked LEFT JOIN entries ON name = n"
    for size in _SIZES
}
_DELETES: Final = {size: f"DELETE FROM entries WHERE name IN ({','.join('?' * size)})" for size in _SIZES}  # noqa: S608


def _size_for(count: int) -> int:
    return next(size for size in _SIZES if size >= count)


def _sweep(cursor: sqlite3.Cursor, now: int) -> int:
    cursor.execute(_SWEEP, (now, _SWEPT))
    return count_removed(cursor)


def _remove_names(names: list[int], cursor: sqlite3.Cursor) -> int:
    removed = 0
    for begin in range(0, len(names), _MOST_NAMES):
        some = names[begin : begin + _MOST_NAMES]
        size = _size_for(len(some))
        cursor.execute(_DELETES[size], some + [None] * (size - len(some)))
        removed += count_removed(cursor)
    return removed


def _remove_ids(which: list[tuple[int, int]], cursor: sqlite3.Cursor) -> int:
    cursor.executemany("DELETE FROM entries WHERE id = ? AND grp = ?", which)
    return count_removed(cursor)


def _remove_row(name: int, front: object, data: object, cursor: sqlite3.Cursor) -> int:
    cursor.execute(
        "DELETE FROM entries WHERE name = ? AND CAST(front AS BLOB) IS CAST(? AS BLOB)"
        " AND CAST(data AS BLOB) IS CAST(? AS BLOB)",
        (name, front, data),
    )
    return count_removed(cursor)
