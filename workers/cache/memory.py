"""The tier in this process's memory: least recently used, with a lifetime, bounded in entries and in bytes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from workers.results import Packed

__all__ = ["L1Cache"]

_ENTRY_BYTES: Final = 1024
"""What an entry takes besides its outputs: the key, the description of its tensors, and the places of both."""


class L1Cache:
    """Answers by the digest of what was asked. For any thread.

    max_entries, max_bytes: what was not asked for longest leaves first; an answer of more than an eighth of all bytes
    is not kept. clock: monotonic seconds.

    Attributes:
        evicted: how many have left for want of room.
    """

    def __init__(self, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.evicted = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[Packed, float]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """What the entries take, in bytes."""
        return self._nbytes

    def get(self, key: bytes) -> Packed | None:
        """The answer that is kept under `key`, if its time is not over."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            if self._clock() >= found[1]:
                self._remove(key)
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: bytes, answer: Packed, ttl_s: float) -> None:
        """Keeps an answer for `ttl_s` seconds, in the place of what was kept under `key`."""
        size = _size_of(answer)
        with self._lock:
            if key in self._entries:
                self._remove(key)
            if size > self._max_bytes // 8:
                return
            self._entries[key] = answer, self._clock() + ttl_s
            self._nbytes += size
            while len(self._entries) > self._max_entries or self._nbytes > self._max_bytes:
                self._remove(next(iter(self._entries)))
                self.evicted += 1

    def forget(self, content_hash: str) -> int:
        """Drops every answer of this content; returns how many there were."""
        with self._lock:
            old = [key for key, (answer, _) in self._entries.items() if answer.content_hash == content_hash]
            for key in old:
                self._remove(key)
        return len(old)

    def _remove(self, key: bytes) -> None:
        answer, _ = self._entries.pop(key)
        self._nbytes -= _size_of(answer)


def _size_of(answer: Packed) -> int:
    return len(answer.body) + _ENTRY_BYTES
