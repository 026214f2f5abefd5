"""The queues of the broker in memory: waiting jobs, leases, and the counts of a slot.

MemorySlot       one model: four queues, dead letters, jobs in flight, the rate of commits
  MemoryQueue    one priority: waiting jobs and leases
    Lease        a claimed job
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from penstock.registry.broker.base import DeadLetter, Depth
from penstock.registry.broker.memory_entry_ids import EntryId, next_entry_id, parse_entry_id
from penstock.registry.queues import Priority

__all__ = ["BANDS", "NO_OWNER", "Lease", "MemoryQueue", "MemorySlot", "owner_for"]

BANDS: Final = tuple(Priority)
"""The priorities, the most urgent first. To iterate over the class takes longer than a step of the broker."""
NO_OWNER: Final = ""
"""The owner of a job that was released."""
_OWNER_BY_VERSION: Final = "version "
_RATE_AFTER_MS: Final = 500
_RATE_UNTIL_MS: Final = 30_000
"""The rate of commits is measured over spans between these two."""


def owner_for(version: str) -> str:
    """The owner of jobs that were released for workers that have this version."""
    return _OWNER_BY_VERSION + version


@dataclass(slots=True)
class Lease:
    """A claimed job: its consumer, the time of the claim or the last renewal, and the number of claims."""

    sealed: bytes
    owner: str
    since_ms: float
    deliveries: int = 1
    asked_ms: float = -math.inf
    """When a client last asked to end the overdue job under this lapsed lease."""
    counted_ms: float = 0.0
    """The time that these calls count; see `may_be_held`."""

    @property
    def is_released(self) -> bool:
        """Whether no consumer holds the job."""
        return self.owner == NO_OWNER or self.owner.startswith(_OWNER_BY_VERSION)

    def may_be_held(self, now_ms: float, lease_ms: int) -> bool:
        """Whether a living worker may hold the job, asked for by a client that would end it.

        A living worker renews its lease, except while the broker is paused. The broker is paused between two calls
        only: a call counts the time since the call before, and a quarter of a lease at most. The worker is dead when a
        whole lease is counted without a renewal.
        """
        if now_ms - self.since_ms < lease_ms:
            return True
        # The first call since the last renewal counts nothing: the broker may have been paused since then.
        is_first = not self.since_ms < self.asked_ms <= now_ms
        counted_ms = min(now_ms - self.asked_ms, math.ceil(lease_ms / 4))
        self.counted_ms = 0.0 if is_first else self.counted_ms + counted_ms
        self.asked_ms = now_ms
        return self.counted_ms < lease_ms


def _oldest_first(entry_ids: list[bytes]) -> list[bytes]:
    if len(entry_ids) > 1:
        entry_ids.sort(key=lambda entry_id: parse_entry_id(entry_id.decode()))
    return entry_ids


class MemoryQueue:
    """The jobs of one slot and priority: those that wait for their first claim, and those under a lease."""

    __slots__ = ("accepted_first_ms", "last_id", "leases", "waiting")

    def __init__(self) -> None:
        # An OrderedDict: a plain dict is slow to find its first key after many were removed at the front.
        self.waiting: OrderedDict[bytes, bytes] = OrderedDict()
        self.leases: dict[bytes, Lease] = {}
        self.accepted_first_ms: dict[bytes, int] = {}
        """The first acceptance of replayed dead letters that keep their deadline."""
        self.last_id: EntryId = (0, 0)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.leases)

    def add(self, sealed: bytes, now_ms: float) -> bytes:
        """Append an entry, and return its id."""
        self.last_id = next_entry_id(self.last_id, now_ms)
        entry_id = b"%d-%d" % self.last_id
        self.waiting[entry_id] = sealed
        return entry_id

    def take(self, consumer: str, count: int, now_ms: float, nbytes: float) -> list[tuple[bytes, bytes]]:
        """Lease the first `count` waiting jobs to the consumer, and no further one when they have reached `nbytes`.

        Returns (entry id, sealed) of each.
        """
        taken: list[tuple[bytes, bytes]] = []
        while self.waiting and len(taken) < count and nbytes > 0:
            taken.append(self.waiting.popitem(last=False))
            nbytes -= len(taken[-1][1])
        for entry_id, sealed in taken:
            self.leases[entry_id] = Lease(sealed, consumer, now_ms)
        return taken

    def lapsed(self, before_ms: float) -> list[bytes]:
        """Ids of jobs that were claimed or renewed at or before `before_ms`, oldest job first."""
        return _oldest_first([entry_id for entry_id, lease in self.leases.items() if lease.since_ms <= before_ms])

    def leased_to(self, owners: Collection[str]) -> list[bytes]:
        """Ids of jobs that one of these consumers holds, oldest job first."""
        return _oldest_first([entry_id for entry_id, lease in self.leases.items() if lease.owner in owners])

    def remove(self, entry_id: bytes) -> None:
        """Delete the entry."""
        self.waiting.pop(entry_id, None)
        self.leases.pop(entry_id, None)
        self.accepted_first_ms.pop(entry_id, None)

    def has(self, entry_id: bytes) -> bool:
        """Whether the entry is in this queue, waiting or under a lease."""
        return entry_id in self.waiting or entry_id in self.leases

    def head_ms(self) -> int | None:
        """When the oldest waiting job was accepted; None without one."""
        return parse_entry_id(next(iter(self.waiting)).decode())[0] if self.waiting else None

    def depth(self, slot: str, priority: Priority, now_ms: float) -> Depth:
        """The depth of the queue, as `depths` returns it."""
        head_ms, leased = self.head_ms(), len(self.leases)
        oldest_s = 0.0 if head_ms is None else max(0.0, now_ms - head_ms) / 1000
        return Depth(slot, priority, len(self.waiting) + leased, leased, oldest_s)


class MemorySlot:
    """The four queues of a slot, its dead letters, the jobs in flight of each tenant, and the rate of commits."""

    __slots__ = ("_mark", "_mark_ms", "_rate", "committed", "dead_letters", "in_flight", "last_dead_id", "queues")

    def __init__(self) -> None:
        self.queues = tuple(MemoryQueue() for _ in BANDS)
        self.dead_letters: dict[str, DeadLetter] = {}
        self.last_dead_id: EntryId = (0, 0)
        self.in_flight: defaultdict[str, int] = defaultdict(int)
        self.committed = 0
        self._mark = 0
        self._mark_ms: float | None = None
        self._rate = 0.0

    @property
    def has_waiting(self) -> bool:
        """Whether any queue has a job that waits for its first claim."""
        critical, high, normal, low = self.queues
        return bool(critical.waiting or high.waiting or normal.waiting or low.waiting)

    @property
    def has_leases(self) -> bool:
        """Whether any queue has a job under a lease."""
        critical, high, normal, low = self.queues
        return bool(critical.leases or high.leases or normal.leases or low.leases)

    def leave(self, tenant: str) -> None:
        """Count one job of the tenant less in flight."""
        self.in_flight[tenant] -= 1
        if self.in_flight[tenant] <= 0:
            del self.in_flight[tenant]

    def retry_after_s(self, jobs: int, now_ms: float) -> float:
        """The time until `jobs` more are committed, at the recent rate; 1 s while there is no rate."""
        elapsed_ms = -1.0 if self._mark_ms is None else now_ms - self._mark_ms
        if not 0 <= elapsed_ms <= _RATE_UNTIL_MS:
            self._mark, self._mark_ms = self.committed, now_ms
        elif elapsed_ms >= _RATE_AFTER_MS:
            self._rate = (self.committed - self._mark) / elapsed_ms
            self._mark, self._mark_ms = self.committed, now_ms
        if self._rate <= 0:
            return 1.0
        return max(10, min(30_000, math.ceil(jobs / self._rate))) / 1000
