"""Pending jobs -> micro-batches. Pure: no clock, no I/O; `now` is an argument.

    jobs -- add --> sub-queues, one per key; in each a band per priority, in order of arrival
                      |                                                          ^
                      next: full, budget reached, oldest waited, device idle     |
                      |                                                          |
                      '--> batch -- put_back, when a more urgent job came -------'

A batch never mixes two keys. It is led by the oldest job of the most urgent band; a less urgent job comes in only
when the more urgent ones of its sub-queue all did. The exception keeps any job from starving: a share of every batch is
for jobs that have waited longer than `ageing_s`, and when the oldest of those found no place (another key, no
room) for a few batches, it leads one. One thread owns a Batcher; there are no locks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from penstock.registry.errors import ConfigurationError
from penstock.registry.queues import Priority
from penstock.workers.batching.buckets import BatchLoad, Room, most_efficient_run, padded_tokens, padding_ratio

__all__ = ["Batch", "BatchKey", "BatchLimits", "Batcher", "Pending", "Reason"]

T = TypeVar("T")

Reason = Literal["full", "budget", "wait", "idle", "priority"]
"""Why a batch was formed. `priority`: another sub-queue was due, and this one holds a more urgent or an aged job."""

_BANDS: Final = len(Priority)
_AGED_SHARE: Final = 8
"""One row in so many is kept for aged jobs, and never less than one job."""
_AGED_TURN: Final = 3
"""After so many batches without it, the oldest aged job leads the next."""

_order = attrgetter("order")
_length = attrgetter("length")


class BatchKey(NamedTuple):
    """Jobs share a forward only when their keys are equal.

    `shape` holds the properties that the signature leaves open: dtypes, shapes without the batch axis, generation
    parameters.
    """

    model: str
    version: str
    endpoint: str
    shape: tuple[Hashable, ...] = ()


class Pending(msgspec.Struct, Generic[T], eq=False):
    """A claimed job that waits in memory; two are equal only when they are the same object."""

    key: BatchKey
    priority: int
    """0 is the most urgent; see registry/queues.py."""
    rows: int
    length: int
    """Tokens of its longest row, as the runtime will pad it; 1 where rows have no length."""
    nbytes: int
    arrived: float
    """Seconds on a monotonic clock; jobs are added in this order."""
    job: T
    order: int = -1
    """Its place among all jobs that were added. The batcher sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """When a batch is cut; times in seconds, 0 tokens or bytes means no such limit.

    A single job beyond a limit goes alone. Raises ConfigurationError for limits that no batch can keep.
    """

    max_rows: int
    max_wait_s: float
    max_tokens: int = 0
    """Padded: rows of the batch * its longest length."""
    max_bytes: int = 0
    sort_window: int = 1
    """In batches: among so many rows of a band, oldest first, similar lengths are sought; 1 keeps their order."""
    ageing_s: float
    overhead_tokens: int = 64
    """The fixed cost of a forward, in tokens; weighed against padding when lengths are compared. About 32 for MiniLM on
    one CPU thread; hundreds or thousands on a GPU, which small batches leave idle."""

    def __post_init__(self) -> None:
        for name, least in (("max_rows", 1), ("sort_window", 1), ("overhead_tokens", 1), ("max_wait_s", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigurationError(f"{name} is {value}. Expected at least {least}")


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Jobs for one forward."""

    key: BatchKey
    items: list[Pending[T]]
    rows: int
    tokens: int
    """Padded."""
    reason: Reason
    priority: int
    """The leader's priority; 0 for an aged leader. Only a more urgent job may recall the batch."""
    passed_over: int = 0
    """For how many batches an aged job had found no place before this one; `put_back` restores it."""

    @property
    def padding_ratio(self) -> float:
        """The share of `tokens` that is padding."""
        return padding_ratio(self.tokens, sum(item.rows * item.length for item in self.items))


class Batcher(Generic[T]):
    """The pending jobs of one served model, and the decision which of them run together next."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._room = Room(limits.max_rows, limits.max_tokens or sys.maxsize, limits.max_bytes or sys.maxsize)
        self._fitting_rows = self._steered_rows = limits.max_rows
        self._wait_s = limits.max_wait_s
        self._sub_queues: dict[BatchKey, _SubQueue[T]] = {}
        self._jobs = 0
        self._added = 0
        self._passed_over = 0

    def __len__(self) -> int:
        """Pending jobs."""
        return self._jobs

    def narrow(self, max_rows: int, max_tokens: int) -> None:
        """From now on limit batches to this size, where it is smaller than `limits`. 0 tokens: no limit."""
        self._fitting_rows = max_rows
        tokens = min(self.limits.max_tokens or sys.maxsize, max_tokens or sys.maxsize)
        self._room = self._room._replace(rows=self._most_rows(), tokens=tokens)

    def steer(self, max_rows: int, max_wait_s: float) -> None:
        """Cut batches at so many rows, and after such a wait, from now on, where that is less than `limits`."""
        self._steered_rows = max_rows
        self._room = self._room._replace(rows=self._most_rows())
        self._wait_s = min(max_wait_s, self.limits.max_wait_s)

    def add(self, pending: Pending[T]) -> None:
        """Take in one job, which arrived after those taken in before."""
        self.extend((pending,))

    def extend(self, many: Iterable[Pending[T]]) -> None:
        """Take in jobs in their order of arrival."""
        order = self._added
        queue = None
        for item in many:
            item.order = order
            order += 1
            # The jobs of one claim mostly share one key object: `is` avoids hashing it.
            if queue is None or item.key is not queue.key:
                queue = self._sub_queue(item.key)
            queue.bands[item.priority].append(item)
            queue.rows += item.rows
            queue.nbytes += item.nbytes
            if item.length > queue.longest:
                queue.longest = item.length
        self._jobs += order - self._added
        self._added = order

    def next(self, now: float, *, device_idle: bool) -> Batch[T] | None:
        """The batch that should run next, or None while it pays to wait for more jobs.

        One is due when a sub-queue has `max_rows` rows or has reached the token or byte budget, when its oldest job has
        waited its time, or when the device has nothing else to do. Call it as late as possible: a batch that
        is not formed yet takes in what arrives meanwhile.
        """
        if not self._jobs or not (device_idle or any(self._due(queue, now) for queue in self._sub_queues.values())):
            return None
        queue, leader = self._most_urgent()
        priority, passed_over = leader.priority, self._passed_over
        aged = self._oldest_aged(leader, now)
        if aged is not None and passed_over >= _AGED_TURN:
            queue, leader, priority = self._sub_queues[aged.key], aged, Priority.CRITICAL
        reason: Reason = self._due(queue, now) or ("idle" if device_idle else "priority")
        draft = self._draft(queue, leader, now)
        self._passed_over = 0 if aged is None or aged in draft.items else passed_over + 1
        tokens = padded_tokens(draft.rows, draft.longest)
        return Batch(queue.key, draft.items, draft.rows, tokens, reason, priority, passed_over)

    def next_flush_at(self) -> float | None:
        """When the oldest job's wait runs out, on the clock of `arrived`; None without jobs."""
        if not self._jobs:
            return None
        return min(queue.oldest().arrived for queue in self._sub_queues.values()) + self._wait_s

    def most_urgent(self) -> int | None:
        """The priority of the most urgent pending job; None without jobs."""
        return self._most_urgent()[1].priority if self._jobs else None

    def pending(self) -> list[Pending[T]]:
        """The pending jobs, one sub-queue after another, most urgent first in each."""
        return [item for queue in list(self._sub_queues.values()) for band in queue.bands for item in band]

    def put_back(self, batch: Batch[T]) -> None:
        """Dissolve a batch that has not started: its jobs take their old places."""
        queue = self._sub_queue(batch.key)
        for item in batch.items:
            queue.bands[item.priority].append(item)
        for band in queue.bands:
            band.sort(key=_order)
        queue.recount()
        self._jobs += len(batch.items)
        self._passed_over = batch.passed_over

    def discard(self, is_unwanted: Callable[[Pending[T]], bool]) -> list[Pending[T]]:
        """Remove and return the jobs that must not run: cancelled, expired, or with a lost lease."""
        if not self._jobs:
            return []
        discarded: list[Pending[T]] = []
        for queue in list(self._sub_queues.values()):
            unwanted = {item for band in queue.bands for item in band if is_unwanted(item)}
            if unwanted:
                for band in queue.bands:
                    band[:] = [item for item in band if item not in unwanted]
                discarded += unwanted
                self._settle(queue)
        self._jobs -= len(discarded)
        return sorted(discarded, key=_order)

    def _most_rows(self) -> int:
        return min(self.limits.max_rows, self._fitting_rows, self._steered_rows)

    def _sub_queue(self, key: BatchKey) -> _SubQueue[T]:
        queue = self._sub_queues.get(key)
        if queue is None:
            queue = self._sub_queues[key] = _SubQueue(key)
        return queue

    def _settle(self, queue: _SubQueue[T]) -> None:
        """Update the totals. An empty sub-queue is removed, or a model with many shapes would keep them all."""
        if any(queue.bands):
            queue.recount()
        else:
            del self._sub_queues[queue.key]

    def _due(self, queue: _SubQueue[T], now: float) -> Reason | None:
        """Why this sub-queue should be flushed even when the device is busy."""
        if queue.rows >= self._room.rows:
            return "full"
        if queue.nbytes >= self._room.nbytes or padded_tokens(queue.rows, queue.longest) >= self._room.tokens:
            return "budget"
        # The same sum as in next_flush_at, so that at that very moment a batch is due.
        if queue.oldest().arrived + self._wait_s <= now:
            return "wait"
        return None

    def _most_urgent(self) -> tuple[_SubQueue[T], Pending[T]]:
        """The most urgent job, the oldest among equals, and its sub-queue."""
        queue, *others = self._sub_queues.values()
        leader = queue.most_urgent()
        for other in others:
            rival = other.most_urgent()
            if (rival.priority, rival.order) < (leader.priority, leader.order):
                queue, leader = other, rival
        return queue, leader

    def _oldest_aged(self, leader: Pending[T], now: float) -> Pending[T] | None:
        """The oldest job, in any sub-queue, that is less urgent than the leader and has waited too long."""
        since = now - self.limits.ageing_s
        aged = [item for queue in self._sub_queues.values() for item in queue.aged(leader.priority, since)]
        return min(aged, key=_order, default=None)

    def _draft(self, queue: _SubQueue[T], leader: Pending[T], now: float) -> _Draft[T]:
        """Take out of the sub-queue: the leader, the share of the aged, then band after band while they fit whole."""
        draft = _Draft(leader, self._room)
        queue.bands[leader.priority].remove(leader)
        self._take_aged(draft, queue, now - self.limits.ageing_s)
        for band in queue.bands:
            if band:
                self._take_most(draft, band)
                if band:
                    break
        self._deduct(queue, draft)
        return draft

    def _take_aged(self, draft: _Draft[T], queue: _SubQueue[T], since: float) -> None:
        leader = draft.items[0]
        share = leader.rows + max(1, self._room.rows // _AGED_SHARE)
        while draft.rows < share:
            aged = min(queue.aged(leader.priority, since), key=_order, default=None)
            if aged is None or not draft.take_prefix(queue.bands[aged.priority], at_most=1):
                return

    def _take_most(self, draft: _Draft[T], band: list[Pending[T]]) -> None:
        """Move jobs from the band: in order of arrival, or those of similar length where lengths are compared."""
        if self.limits.sort_window > 1 and draft.rows < self._room.rows:
            window = self._window(band)
            if any(item.length != draft.longest for item in window):
                self._take_similar(draft, band, window)
                return
        draft.take_prefix(band)

    def _window(self, band: list[Pending[T]]) -> list[Pending[T]]:
        """The oldest jobs of the band, up to `sort_window` batches of rows."""
        rows = self.limits.sort_window * self._room.rows
        window = band[:rows]
        for at, item in enumerate(window):
            rows -= item.rows
            if rows < 0:
                return window[:at]
        return window

    def _take_similar(self, draft: _Draft[T], band: list[Pending[T]], window: list[Pending[T]]) -> None:
        """Move those jobs of the window that pad the batch least, in proportion; older ones first among equals."""
        longest, most = draft.longest, self._room.rows - draft.rows
        shorter = sorted((item for item in window if item.length < longest), key=_length, reverse=True)[:most]
        longer = sorted((item for item in window if item.length >= longest), key=_length)[:most]
        i, j = most_efficient_run(draft.load(), shorter, longer, self._room, self.limits.overhead_tokens)
        taken = shorter[:i] + longer[:j]
        chosen = set(taken)
        band[: len(window)] = [item for item in window if item not in chosen]
        draft.take(taken)

    def _deduct(self, queue: _SubQueue[T], draft: _Draft[T]) -> None:
        """Update the totals of a sub-queue from which a batch was taken."""
        queue.rows -= draft.rows
        queue.nbytes -= draft.nbytes
        if not any(queue.bands):
            del self._sub_queues[queue.key]
        elif self._room.tokens < sys.maxsize and draft.longest == queue.longest:
            queue.recount()
        self._jobs -= len(draft.items)


class _SubQueue(Generic[T]):
    """The pending jobs of one key: a band per priority, each in order of arrival, and their sums."""

    __slots__ = ("bands", "key", "longest", "nbytes", "rows")

    def __init__(self, key: BatchKey) -> None:
        self.key = key
        self.bands: tuple[list[Pending[T]], ...] = tuple([[] for _ in range(_BANDS)])
        self.rows = self.nbytes = self.longest = 0

    def most_urgent(self) -> Pending[T]:
        return next(band[0] for band in self.bands if band)

    def oldest(self) -> Pending[T]:
        return min((band[0] for band in self.bands if band), key=_order)

    def aged(self, priority: int, since: float) -> list[Pending[T]]:
        """The oldest job of each band less urgent than `priority`, if it has waited since `since` or longer."""
        return [band[0] for band in self.bands[priority + 1 :] if band and band[0].arrived <= since]

    def recount(self) -> None:
        pending = [item for band in self.bands for item in band]
        self.rows = sum(item.rows for item in pending)
        self.nbytes = sum(item.nbytes for item in pending)
        self.longest = max(item.length for item in pending)


class _Draft(Generic[T]):
    """A batch that is being formed. Its leader may exceed the room; with every other job the batch stays within it."""

    __slots__ = ("items", "longest", "nbytes", "room", "rows")

    def __init__(self, leader: Pending[T], room: Room) -> None:
        self.items = [leader]
        self.rows, self.longest, self.nbytes = leader.rows, leader.length, leader.nbytes
        self.room = room

    def load(self) -> BatchLoad:
        return BatchLoad(self.rows, self.longest, self.nbytes, sum(item.rows * item.length for item in self.items))

    def take(self, items: list[Pending[T]]) -> None:
        """Add jobs that are known to fit."""
        self.items += items
        self.rows += sum(item.rows for item in items)
        self.nbytes += sum(item.nbytes for item in items)
        self.longest = max([self.longest, *(item.length for item in items)])

    def take_prefix(self, band: list[Pending[T]], at_most: int = sys.maxsize) -> int:
        """Move jobs from the head of the band up to the first that does not fit; returns how many."""
        max_rows, max_tokens, max_bytes = self.room
        rows, longest, nbytes = self.rows, self.longest, self.nbytes
        taken = 0
        for item in band[: min(at_most, max_rows)]:
            rows += item.rows
            nbytes += item.nbytes
            if item.length > longest:
                longest = item.length
            if rows > max_rows or nbytes > max_bytes or rows * longest > max_tokens:
                break
            self.rows, self.longest, self.nbytes = rows, longest, nbytes
            taken += 1
        self.items += band[:taken]
        del band[:taken]
        return taken
