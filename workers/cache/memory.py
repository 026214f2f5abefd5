"""The cache in this process's memory: least recently used, with a lifetime, bounded in entries and in bytes."""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
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
        self.max_entries: Final = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[EncodedOutputs, float, int]] = OrderedDict()
        """By key: the answer, the time at which it expires, and its memory in bytes."""
        self._ends: list[tuple[float, int, list[bytes]]] = []
        """A heap of the times at which the entries of one call expire. Entries may have left, or been replaced."""
        self._calls = 0
        """Makes each element of the heap comparable."""
        self._awaited = 0
        """Keys in the heap."""
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

    def get_all(self, keys: Sequence[bytes]) -> list[EncodedOutputs | None]:
        """The answers under these keys, in order; None for what is not here, or has expired."""
        found: list[EncodedOutputs | None] = []
        with self._lock:
            entries = [*map(self._entries.get, keys)]
            if not any(entries):
                # Of distinct jobs this is nearly every call.
                return [None] * len(entries)
            now, use = self._clock(), self._entries.move_to_end
            for key, entry in zip(keys, entries, strict=True):
                if entry is None:
                    found.append(None)
                elif now >= entry[1]:
                    found.append(None)
                    # The key may be asked for twice.
                    if key in self._entries:
                        self._remove(key)
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
            now, entries = self._clock(), self._entries
            self._expire(now)
            end, most = now + ttl_s, self._max_bytes // 8
            kept: list[bytes] = []
            for key, answer in answers:
                if key in entries:
                    self._remove(key)
                body = answer.body
                size = _size_of(answer)
                if size > most:
                    continue
                if type(body) is not bytes:
                    # A view would keep the outputs of the whole batch in memory.
                    answer = structs.replace(answer, body=bytes(body))
                entries[key] = answer, end, size
                self._nbytes += size
                kept.append(key)
                self._evict()
            self._note_end(end, kept)

    def put_alike(self, keys: list[bytes], answers: Sequence[EncodedOutputs], ttl_s: float) -> None:
        """As `put_all`, for answers of one size whose bodies are bytes: those of one batch."""
        with self._lock:
            entries, size = self._entries, _size_of(answers[0])
            is_new = len({*keys}) == len(keys) and entries.keys().isdisjoint(keys)
            if is_new and size <= self._max_bytes // 8:
                now = self._clock()
                self._expire(now)
                end = now + ttl_s
                entries.update(zip(keys, zip(answers, repeat(end), repeat(size)), strict=True))
                self._nbytes += size * len(keys)
                self._evict()
                self._note_end(end, keys)
                return
        self.put_all(zip(keys, answers, strict=True), ttl_s)

    def _evict(self) -> None:
        """The least recently used entries leave until the others fit."""
        entries, max_entries, max_bytes = self._entries, self.max_entries, self._max_bytes
        leave, nbytes, before = entries.popitem, self._nbytes, len(entries)
        while nbytes > max_bytes or len(entries) > max_entries:
            nbytes -= leave(False)[1][2]
        self._nbytes = nbytes
        self.evicted += before - len(entries)

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
            self._awaited = self._nbytes = 0
        return count

    def _note_end(self, end: float, keys: list[bytes]) -> None:
        """The entries of one call expire at this time."""
        if keys:
            self._await_end(end, keys)
        ends, here = self._ends, self._entries.keys()
        # Those that expire first have mostly left first as well.
        while ends and here.isdisjoint(ends[0][2]):
            self._awaited -= len(heapq.heappop(ends)[2])
        if self._awaited > 2 * len(self._entries) + _FEW:
            self._forget_removed()

    def _await_end(self, end: float, keys: list[bytes]) -> None:
        self._calls += 1
        self._awaited += len(keys)
        heapq.heappush(self._ends, (end, self._calls, keys))

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, _, keys = heapq.heappop(self._ends)
            self._awaited -= len(keys)
            for key in keys:
                if (found := self._entries.get(key)) is not None and found[1] == end:
                    self._remove(key)

    def _forget_removed(self) -> None:
        """Have the heap hold the entries that are here, and nothing else."""
        by_end: defaultdict[float, list[bytes]] = defaultdict(list)
        for key, (_, end, _) in self._entries.items():
            by_end[end].append(key)
        self._ends, self._awaited = [], 0
        for end, keys in by_end.items():
            self._await_end(end, keys)

    def _remove(self, key: bytes) -> None:
        self._nbytes -= self._entries.pop(key)[2]


def _size_of(answer: EncodedOutputs) -> int:
    return len(answer.body) + _ENTRY_BYTES + _TENSOR_BYTES * len(answer.content)
