"""The streams of the broker in memory: what is told to clients, and the events of jobs.

MemoryStreams    reply and event streams by key, behind one condition variable
  EntryStream    one of them
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Final, TypeAlias

from penstock.registry.broker.base import Emission, Position, StreamEntry
from penstock.registry.broker.limits import REPLY_CAP, REPLY_TTL_MS
from penstock.registry.broker.memory_entry_ids import EntryId, next_entry_id
from penstock.registry.broker.memory_expiring import Expiring
from penstock.registry.broker.memory_record import StoredRecord
from penstock.registry.queues import events_key, lane_key

__all__ = ["Clock", "EntryStream", "MemoryStreams"]

Clock: TypeAlias = Callable[[], float]
"""Seconds since the epoch, or since the beginning of a simulation."""
_INLINE_BYTES: Final = 4096
"""The largest record that a reply entry carries."""


class EntryStream:
    """Entries of a reply or event stream, in order of their ids. size: see Position."""

    __slots__ = ("entries", "last_id", "size")

    def __init__(self, last_id: EntryId = (0, 0), size: int = 0) -> None:
        self.entries: list[tuple[EntryId, list[bytes]]] = []
        self.last_id = last_id
        self.size = size

    def append(self, entry_id: EntryId, fields: list[bytes], cap: float) -> None:
        """Append an entry, and delete the oldest one beyond `cap`."""
        self.last_id = entry_id
        self.entries.append((entry_id, fields))
        if len(self.entries) > cap:
            del self.entries[0]

    @property
    def position(self) -> Position:
        """How far the events go."""
        return Position(self.last_id[0], self.size)

    def contains(self, index: int, data: bytes) -> bool:
        """Whether the entry at `index`, counted from the end, has this data."""
        return len(self.entries) >= -index and self.entries[index][1][3] == data

    def position_after(self, entry_id: EntryId) -> int:
        """The number of entries up to and including `entry_id`."""
        return bisect_right(self.entries, entry_id, key=itemgetter(0))


class MemoryStreams:
    """Streams on a clock. The caller holds `lock` during every method: each is one step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.streams: Expiring[EntryStream] = Expiring(self.now_ms)

    def now_ms(self) -> float:
        """The clock in milliseconds."""
        return self.clock() * 1000

    def tell(self, slot: str, reply: str, finished: Sequence[tuple[str, StoredRecord]]) -> None:
        """Append one entry for a client's finished jobs. Those of the Celery task endpoint stay until they are read."""
        fields: list[bytes] = []
        for job_id, record in finished:
            encoded = record.encoded()
            fields += (job_id.rpartition(".")[2].encode(), encoded if len(encoded) <= _INLINE_BYTES else b"")
        if reply == lane_key(slot):
            self.append(reply, fields, cap=math.inf, ttl_ms=math.inf)
        else:
            self.append(reply, fields, cap=REPLY_CAP, ttl_ms=REPLY_TTL_MS)

    def append(self, key: str, fields: list[bytes], *, cap: float, ttl_ms: float) -> None:
        """Append an entry with an id of the present time."""
        stream = self.streams.get(key) or EntryStream()
        self._append(key, stream, next_entry_id(stream.last_id, self.now_ms()), fields, cap, ttl_ms)

    def emit(self, emission: Emission, ttl_ms: float, max_bytes: int) -> Position:
        """See WorkerEnd.emit; the consumer holds the job."""
        key, run, sealed = events_key(emission.held.job_id), emission.attempt.encode(), emission.sealed
        after, keep_from = emission.after, emission.keep_from
        history = self.streams.get(key) or EntryStream((after.seq or 1, 0), after.size)
        if after.seq:
            if history.last_id[0] > after.seq:
                # Repeated, or another run has begun.
                return history.position if history.contains(-1, sealed) else Position()
        else:
            if history.contains(-2, run):
                return history.position
            if history.size + len(sealed) > max_bytes:
                keep_from = history.last_id[0] + 1
            again = "resumed" if emission.resumes else "reset"
            self._append_event(key, history, again if history.entries else "started", run, 1, ttl_ms)
        history.size += len(sealed)
        self._append_event(key, history, "events", sealed, emission.events, ttl_ms)
        del history.entries[: history.position_after((keep_from, -1))]
        return history.position

    def _append_event(self, key: str, history: EntryStream, kind: str, data: bytes, count: int, ttl_ms: float) -> None:
        """Append an entry of `count` events. Its id has the number of the last one."""
        fields = [b"t", kind.encode(), b"d", data]
        self._append(key, history, (history.last_id[0] + count, 0), fields, math.inf, ttl_ms)

    def _append(
        self, key: str, stream: EntryStream, entry_id: EntryId, fields: list[bytes], cap: float, ttl_ms: float
    ) -> None:
        stream.append(entry_id, fields, cap)
        self.streams.put(key, stream, ttl_ms)
        self.changed.notify_all()

    def entries_after(self, cursors: Mapping[str, EntryId], count: int) -> list[StreamEntry]:
        """Up to `count` entries of each stream."""
        found = []
        for key, cursor in cursors.items():
            stream = self.streams.get(key)
            if stream is not None:
                first = stream.position_after(cursor)
                for (milliseconds, number), fields in stream.entries[first : first + count]:
                    found.append(StreamEntry(key, f"{milliseconds}-{number}", fields))
        return found
