"""The cache in this process's memory: least recently used, with a lifetime, bounded in entries and in bytes."""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

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

    def __init__(self, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.evicted = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[EncodedOutputs, float]] = OrderedDict()
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
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            if self._clock() >= found[1]:
                self._remove(key)
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: bytes, answer: EncodedOutputs, ttl_s: float) -> None:
        """Cache an answer for `ttl_s` seconds; it replaces an earlier answer under `key`."""
        size = _size_of(answer)
        with self._lock:
            now = self._clock()
            self._expire(now)
            if key in self._entries:
                self._remove(key)
            if size > self._max_bytes // 8:
                return
            self._entries[key] = answer, now + ttl_s
            self._nbytes += size
            heapq.heappush(self._ends, (now + ttl_s, key))
            while len(self._entries) > self._max_entries or self._nbytes > self._max_bytes:
                self._remove(next(iter(self._entries)))
                self.evicted += 1
            if len(self._ends) > 2 * len(self._entries) + _FEW:
                self._ends = [(end, key) for key, (_, end) in self._entries.items()]
                heapq.heapify(self._ends)

    def expire(self) -> None:
        """Remove expired entries, also those that no job asks for."""
        with self._lock:
            self._expire(self._clock())

    def forget(self, content_hash: str) -> int:
        """Remove every answer of this content; returns their number."""
        with self._lock:
            old = [key for key, (answer, _) in self._entries.items() if answer.content_hash == content_hash]
            for key in old:
                self._remove(key)
        return len(old)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, key = heapq.heappop(self._ends)
            if (found := self._entries.get(key)) is not None and found[1] == end:
                self._remove(key)

    def _remove(self, key: bytes) -> None:
        answer, _ = self._entries.pop(key)
        self._nbytes -= _size_of(answer)


def _size_of(answer: EncodedOutputs) -> int:
    return len(answer.body) + _ENTRY_BYTES + _TENSOR_BYTES * len(answer.content)
