"""A worker as far as the batcher and the controller can tell: one model thread, one batch ready ahead, simulated time.

arrivals -> queue -- claim, most urgent first --> Batcher --> ready --> model thread --> committed -- observe --> steer
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from penstock.registry.queues import Priority
from penstock.workers.batching import Batch, Batcher, BatchKey, BatchLimits, Pending
from penstock.workers.batching.controller import LatencyController

__all__ = ["Done", "Plant", "poisson"]

_KEY: Final = BatchKey("m", "1", "infer")
_BATCHES_HELD: Final = 2


class Done(NamedTuple):
    """A committed job; times in seconds."""

    priority: int
    accepted: float
    total_s: float
    batch_rows: int


def poisson(rate: float, start: float, end: float, seed: int) -> Iterator[float]:
    """When jobs arrive that know nothing of each other."""
    chance = random.Random(seed)
    now = start + chance.expovariate(rate)
    while now < end:
        yield now
        now += chance.expovariate(rate)


@dataclass(slots=True, eq=False)
class Plant:
    """A forward of n rows takes fixed_s + per_row_s * n, give or take `noise` of it."""

    fixed_s: float
    per_row_s: float
    max_rows: int
    controller: LatencyController | None
    has_backlog: bool = False
    """Whether jobs of low priority wait in any number, all the time."""
    max_wait_s: float = 0.05
    noise: float = 0.05
    seed: int = 0
    done: list[Done] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """When the controller had changed its rows, and to what."""

    def run(self, arrivals: Iterable[tuple[float, int]], until: float) -> Plant:
        """Serves jobs of (time, priority), in order of time, up to a moment."""
        chance = random.Random(self.seed)
        batcher = Batcher[float](BatchLimits(max_rows=self.max_rows, max_wait_s=self.max_wait_s, ageing_s=2.0))
        queue: dict[int, deque[float]] = {priority: deque() for priority in Priority}
        to_come = deque(arrivals)
        ready: Batch[float] | None = None
        running: tuple[Batch[float], float] | None = None
        now = ends = 0.0
        held = 0
        while now < until:
            if running is not None and now >= ends:
                batch, began = running
                running = None
                held -= len(batch.items)
                self._commit(batch, now - began, now, batcher)
            while to_come and to_come[0][0] <= now:
                accepted, priority = to_come.popleft()
                queue[priority].append(accepted)
            for pending in self._claim(queue, self.max_rows * _BATCHES_HELD - held, now):
                batcher.add(pending)
                held += 1
            most_urgent = batcher.most_urgent()
            if ready is not None and most_urgent is not None and most_urgent < ready.priority:
                batcher.put_back(ready)
                ready = None
            if running is None:
                first, ready = ready or batcher.next(now, device_idle=True), None
                if first is not None:
                    running, ends = (first, now), now + self._forward_s(first.rows, chance)
            if running is not None and ready is None:
                ready = batcher.next(now, device_idle=False)
            now = self._next_event(now, running and ends, to_come, None if ready else batcher.next_flush_at())
        return self

    def _next_event(
        self, now: float, ends: float | None, to_come: deque[tuple[float, int]], flush_at: float | None
    ) -> float:
        moments = [inf if ends is None else ends, to_come[0][0] if to_come else inf]
        if ends is not None and flush_at is not None and flush_at > now:
            moments.append(flush_at)
        return min(moments)

    def _claim(self, queue: dict[int, deque[float]], room: int, now: float) -> Iterator[Pending[float]]:
        for priority, waiting in queue.items():
            while room > 0 and waiting:
                room -= 1
                yield self._pending(priority, waiting.popleft(), now)
        if self.has_backlog:
            for _ in range(room):
                yield self._pending(Priority.LOW, now, now)

    def _pending(self, priority: int, accepted: float, now: float) -> Pending[float]:
        return Pending(_KEY, priority, 1, 1, 0, now, accepted)

    def _forward_s(self, rows: int, chance: random.Random) -> float:
        return (self.fixed_s + self.per_row_s * rows) * chance.uniform(1 - self.noise, 1 + self.noise)

    def _commit(self, batch: Batch[float], compute_s: float, now: float, batcher: Batcher[float]) -> None:
        totals_s = [now - item.job for item in batch.items]
        self.done += [
            Done(item.priority, item.job, total_s, batch.rows)
            for item, total_s in zip(batch.items, totals_s, strict=True)
        ]
        if self.controller is not None:
            before = self.controller.rows
            self.controller.observe(batch, compute_s, totals_s, len(batcher), now)
            batcher.steer(self.controller.rows, self.controller.wait_s)
            if self.controller.rows != before:
                self.sizes.append((now, self.controller.rows))

    def p95_s(self, priority: int, start: float, end: float = inf) -> float:
        """Of the jobs of one priority accepted in a period."""
        totals_s = sorted(job.total_s for job in self.done if job.priority == priority and start <= job.accepted < end)
        return totals_s[int(0.95 * len(totals_s))]

    def rows_per_s(self, start: float, end: float) -> float:
        """Rows that were accepted, and done, in a period."""
        return sum(start <= job.accepted < end for job in self.done) / (end - start)
