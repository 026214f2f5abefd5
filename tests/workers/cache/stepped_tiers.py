"""A tier in memory that can be slow or broken, and the shared tiers without threads: the test is the threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty

from penstock.safety.cache_entry import EntryKey
from penstock.workers.cache.tier import Found, Put, TierStats
from penstock.workers.cache.tiers import SharedTiers

__all__ = ["DictTier", "SteppedTiers"]


class DictTier:
    """A Tier in a dict. clock: seconds.

    Attributes:
        entries: by key, the value and the time at which it expires.
        asked: the keys of each look-up.
        fault: raised by each call, although no tier may raise.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self.entries: dict[EntryKey, tuple[bytes, float]] = {}
        self.asked: list[list[EntryKey]] = []
        self.fault: Exception | None = None
        self.is_closed = False
        self._stats = TierStats()

    @property
    def name(self) -> str:
        return self._name

    @property
    def stats(self) -> TierStats:
        return self._stats

    def get_many(self, keys: Sequence[EntryKey]) -> list[Found | None]:
        self._fail()
        self.asked.append(list(keys))
        now = self._clock()
        held = [self.entries.get(key) for key in keys]
        return [Found(each[0], each[1] - now) if each is not None and each[1] > now else None for each in held]

    def put_many(self, entries: Sequence[Put]) -> int:
        self._fail()
        for key, value, ttl_s in entries:
            self.entries[key] = value, self._clock() + ttl_s
        return len(entries)

    def delete_many(self, keys: Sequence[EntryKey]) -> int:
        return sum(self.entries.pop(key, None) is not None for key in keys)

    def forget(self, group: str) -> int:
        return self.delete_many([key for key in self.entries if key.group == group])

    def clear(self) -> int:
        return self.delete_many(list(self.entries))

    def close(self) -> None:
        self.is_closed = True

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault


class SteppedTiers(SharedTiers):
    """Reads and writes happen when the test says so."""

    def _start(self) -> None:
        pass

    def read(self) -> None:
        """The thread of the reads answers what was asked."""
        try:
            while (question := self._questions.get_nowait()) is not None:
                self.answer(question)
        except Empty:
            pass

    def write(self) -> None:
        """The thread of the writes writes what was kept."""
        try:
            while (write := self._writes.get_nowait()) is not None:
                self.perform(write)
        except Empty:
            pass
