"""The cache in this process's memory: least recently used, with a lifetime, bounded in entries and in bytes."""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from msgspec import structs

from penstock.workers.results import EncodedOutputs

__all__ = ["L1Cache"]

_ENTRY_BYTES: Final = 1024
"""The memory of an entry besides its outputs: the key, and its places in the order of use and in the heap."""
_TENSOR_BYTES: Final = 256
"""The memory of the description of an output."""
_FEW: Final = 64


class L1Cache:
    """Answers by their key; see key_of. For any thread.

    max_entries, max_bytes: beyond these, expired entries leave first, then the least recently used ones. An answer
    larger than an eighth of max_bytes is not cached. clock: monotonic seconds.

    Attributes:
        evicted: the number of entries that left before they expired.
    """

    name: Final = "l1"

    def __init__(self, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.evicted = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[EncodedOutputs, float, int]] = OrderedDict()
        """By key: the answer, the time at which it expires, and its memory in bytes."""
        self._ends: list[tuple[float, bytes]] = []
        """A heap of the times at which entries expire; it may also hold removed and replaced entries."""
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """The memory of all entries, in bytes."""
        return self._nbytes

    def get(self, key: bytes) -> EncodedOutputs | None:
        """The answer under `key`, if it has not expired."""
        return self.get_all([key])[0]

    def get_all(self, keys: Iterable[bytes]) -> list[EncodedOutputs | None]:
        """The answers under these keys, in order; None for what is not here, or has expired."""
        found: list[EncodedOutputs | None] = []
        with self._lock:
            now, entry_of, use = self._clock(), self._entries.get, self._entries.move_to_end
            for key in keys:
                entry = entry_of(key)
                if entry is None:
                    found.append(None)
                elif now >= entry[1]:
                    self._remove(key)
                    found.append(None)
                else:
                    use(key)
                    found.append(entry[0])
        return found

    def put(self, key: bytes, answer: EncodedOutputs, ttl_s: float) -> None:
        """Cache an answer for `ttl_s` seconds; it replaces an earlier answer under `key`."""
        self.put_all([(key, answer)], ttl_s)

    def put_all(self, answers: Iterable[tuple[bytes, EncodedOutputs]], ttl_s: float) -> None:
        """Cache answers under their keys for `ttl_s` seconds, one after another; see `put`."""
        with self._lock:
            now, entries, ends = self._clock(), self._entries, self._ends
            self._expire(now)
            end, most = now + ttl_s, self._max_bytes // 8
            for key, answer in answers:
                if key in entries:
                    self._remove(key)
                size = _size_of(answer)
                if size > most:
                    continue
                if isinstance(answer.body, memoryview):
                    # A view would keep the outputs of the whole batch in memory.
                    answer = structs.replace(answer, body=bytes(answer.body))
                entries[key] = answer, end, size
                self._nbytes += size
                heapq.heappush(ends, (end, key))
                while len(entries) > self._max_entries or self._nbytes > self._max_bytes:
                    self._nbytes -= entries.popitem(last=False)[1][2]
                    self.evicted += 1
            if len(self._ends) > 2 * len(entries) + _FEW:
                self._ends = [(entry[1], key) for key, entry in entries.items()]
                heapq.heapify(self._ends)

    def expire(self) -> None:
        """Remove expired entries, also those that no job asks for."""
        with self._lock:
            self._expire(self._clock())

    def forget(self, content_hash: str) -> int:
        """Remove every answer of this content; returns their number."""
        with self._lock:
            old = [key for key, (answer, _, _) in self._entries.items() if answer.content_hash == content_hash]
            for key in old:
                self._remove(key)
        return len(old)

    def clear(self) -> int:
        """Remove every answer; returns their number."""
        with self._lock:
            count = len(self._entries)
            self._entries.clear()
            self._ends.clear()
            self._nbytes = 0
        return count

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, key = heapq.heappop(self._ends)
            if (found := self._entries.get(key)) is not None and found[1] == end:
                self._remove(key)

    def _remove(self, key: bytes) -> None:
        self._nbytes -= self._entries.pop(key)[2]


def _size_of(answer: EncodedOutputs) -> int:
    return len(answer.body) + _ENTRY_BYTES + _TENSOR_BYTES * len(answer.content)
