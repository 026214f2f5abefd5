"""Committed batches -> the most rows of the next batch, and the longest wait of a job in it. Pure, like the batcher: no
clock, no I/O; `now` is an argument.

The size of a batch changes the time of a job, from its acceptance to its commit, as follows:

    time = rest of the running forward + rows ahead of it / rows per second + its own forward
           smaller batches: shorter      never shorter, often longer          shorter

A backlog is therefore no reason for smaller batches: fewer of its rows are done per second, and the p95 of its jobs
rises. A batch that was not full is no reason either: it held every pending job. Large batches delay only the jobs whose
batch was filled up with less urgent ones, so that no job of their own priority was left behind: jobs *ahead*. Their p95
is held to the target. For them the rows fall, as long as most of the rows per second remain.

A forward costs a fixed time and a time per row, fitted to the forwards seen. From that line come the rows that should
meet the target, and the fewest rows that are efficient. A p95 of more than a few full forwards has another cause. While
the p95 is a little below the target, nothing changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil, inf
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

from penstock.workers.batching.batcher import Batch

__all__ = ["LatencyController"]

T = TypeVar("T")

_GOAL: Final = 0.75
"""The part of the target that rows are chosen for."""
_KEPT_UP_TO: Final = 0.9
"""The part of the target up to which the rows stay: the next jobs will not be exactly like those before."""
_KEPT: Final = 0.8
"""Urgent jobs on time are worth a fifth of the rows per second at the most."""
_FORWARDS_OF_A_WAIT: Final = 4
"""A job ahead waits for the running forward, for one that was ready, and for its own. A p95 beyond this many full
forwards has another cause than the size of batches."""
_FILLED: Final = 0.25
"""Less urgent rows beyond this part of a batch filled it up; fewer may be there because they aged."""
_ENOUGH: Final = 20
"""Fewer jobs have no p95."""
_REMEMBERED: Final = 512
_PERIOD_S: Final = 0.25
_GONE_S: Final = 2.0
"""After this time without a job ahead, rows are no longer limited for such jobs."""
_STEP: Final = 8
"""Rows grow by this part of `max_rows` at a time: one eighth."""
_KEEP: Final = 0.98
"""The factor by which each forward reduces the weight of those before it in the line."""
_LEAST_SPREAD: Final = 0.05
"""Forwards whose rows differ by less, relative to their mean, do not separate fixed time from time per row."""
_DEPTH_SHARE: Final = 0.25
"""Weight of the newest batch in the depth."""

_INSTANT_S: Final = 1e-9
"""Below the resolution of any clock: keeps divisors above 0."""

_priority = attrgetter("priority")


class LatencyController:
    """Steers one model's batches towards `target_s`, the p95 of its jobs; never beyond `max_rows` and `max_wait_s`.

    Attributes:
        rows: the most rows of the next batch.
        wait_s: how long a job may wait for more jobs while the device is busy. It gets shorter the more jobs wait, but
            not shorter than a forward: a batch that is formed long before the device is free misses later jobs.
    """

    def __init__(self, target_s: float, max_rows: int, max_wait_s: float) -> None:
        self.rows = max_rows
        self.wait_s = max_wait_s
        self._target_s = target_s
        self._max_rows = max_rows
        self._max_wait_s = max_wait_s
        self._estimator = _CostEstimator()
        self._cost = _LinearCost(0.0, 0.0)
        self._depth = 0.0
        self._ahead_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._ahead_seen_at = -inf
        self._decide_at = -inf

    def observe(self, batch: Batch[T], compute_s: float, totals_s: Sequence[float], waiting: int, now: float) -> None:
        """Takes in one batch that was committed.

        compute_s: its forward. totals_s: from acceptance to commit, for the jobs of `batch.items` in their order.
        waiting: jobs of the model that wait in memory. now: seconds on a monotonic clock.
        """
        self._estimator.add(batch.rows, compute_s)
        self._depth += (waiting - self._depth) * _DEPTH_SHARE
        if ahead := _ahead(batch, totals_s):
            self._ahead_s.extend(ahead)
            self._ahead_seen_at = now
        if now >= self._decide_at:
            self._decide_at = now + _PERIOD_S
            self._cost = self._estimator.estimate()
            self._choose_rows(now)
        self.wait_s = self._fitting_wait()

    def _choose_rows(self, now: float) -> None:
        least = self._cost.least_rows(_KEPT, self._max_rows)
        grown = self.rows + max(1, self._max_rows // _STEP)
        rows = max(least, min(self._wanted_rows(now), grown))
        if rows != self.rows:
            # The times so far belong to the old size.
            self.rows = rows
            self._ahead_s.clear()

    def _wanted_rows(self, now: float) -> int:
        if now - self._ahead_seen_at > _GONE_S:
            return self._max_rows
        if len(self._ahead_s) < _ENOUGH:
            return self.rows
        p95_s = sorted(self._ahead_s)[ceil(0.95 * len(self._ahead_s)) - 1]
        if p95_s > _FORWARDS_OF_A_WAIT * self._cost.seconds(self._max_rows):
            return self._max_rows
        # The time of a job ahead is a number of forwards: it goes up and down with one forward.
        forward_s = self._cost.seconds(self.rows) * _GOAL * self._target_s / max(p95_s, _INSTANT_S)
        fitting = self._cost.rows_within(forward_s, self._max_rows)
        return fitting if p95_s > _KEPT_UP_TO * self._target_s else max(fitting, self.rows)

    def _fitting_wait(self) -> float:
        """The target less two forwards while no job waits; one forward when a full batch waits; linear in between."""
        forward_s = self._cost.seconds(self.rows)
        shortest = min(self._max_wait_s, forward_s)
        longest = min(self._max_wait_s, max(forward_s, self._target_s - 2 * forward_s))
        return longest - (longest - shortest) * min(1.0, self._depth / self.rows)


def _ahead(batch: Batch[T], totals_s: Sequence[float]) -> list[float]:
    """The times of the jobs whose batch was filled up with less urgent ones."""
    priorities = list(map(_priority, batch.items))
    least = max(priorities)
    if min(priorities) == least:
        return []
    filling = sum(item.rows for item in batch.items if item.priority == least)
    if filling <= batch.rows * _FILLED:
        return []
    return [total_s for priority, total_s in zip(priorities, totals_s, strict=True) if priority < least]


class _LinearCost(NamedTuple):
    """Seconds of a forward: fixed_s + per_row_s * rows."""

    fixed_s: float
    per_row_s: float

    def seconds(self, rows: int) -> float:
        return self.fixed_s + self.per_row_s * rows

    def rows_within(self, seconds: float, most: int) -> int:
        """The most rows of a forward that takes at most `seconds`: between one and `most`."""
        if self.seconds(most) <= seconds:
            return most
        return max(1, int((seconds - self.fixed_s) / self.per_row_s))

    def least_rows(self, share: float, most: int) -> int:
        """The fewest rows that reach this share of the rows per second of a forward with `most` rows.

        Solves rows / seconds(rows) >= share * most / seconds(most).
        """
        fewest = share * most * self.fixed_s / (self.fixed_s + self.per_row_s * most * (1 - share))
        return min(most, max(1, ceil(fewest)))


class _CostEstimator:
    """Estimates seconds by rows: the least-squares line, in which newer forwards weigh more."""

    __slots__ = ("_products", "_rows", "_seconds", "_squares", "_weight")

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self._weight = self._weight * _KEEP + 1
        self._rows = self._rows * _KEEP + rows
        self._seconds = self._seconds * _KEEP + seconds
        self._squares = self._squares * _KEEP + rows * rows
        self._products = self._products * _KEEP + rows * seconds

    def estimate(self) -> _LinearCost:
        """The line goes through the origin when all forwards had similar rows, or the fitted fixed time is negative."""
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        proportional = _LinearCost(0.0, max(self._products / self._squares, _INSTANT_S))
        variance = self._squares / self._weight - rows * rows
        if variance <= (_LEAST_SPREAD * rows) ** 2:
            return proportional
        per_row_s = max((self._products / self._weight - rows * seconds) / variance, _INSTANT_S)
        fixed_s = seconds - per_row_s * rows
        return _LinearCost(fixed_s, per_row_s) if fixed_s > 0 else proportional
