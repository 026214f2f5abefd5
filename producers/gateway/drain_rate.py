"""How long the jobs that wait now will take, for Retry-After: the depth of the queue / the rate at which it drains.

broker: jobs in the queues, jobs committed so far -> at most once a second for each model -> DrainRate -> seconds

The figures are those of the whole fleet: whichever worker commits a job, and whichever program submits one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from penstock.registry.broker.base import Backlog
from penstock.registry.errors import PenstockError

__all__ = ["DrainRate", "Queues"]

_READ_EVERY_S: Final = 1.0
_LONGEST_S: Final = 30.0
"""Between two readings: what happened to the queue in a longer time is unknown."""
_WEIGHT: Final = 0.5
"""Of the newest rate in the mean."""


@dataclass(slots=True)
class DrainRate:
    """The rate of one queue, from readings of it. Pure: `now` is an argument, in seconds.

    >>> rate = DrainRate()
    >>> [rate.note(Backlog(waiting, done), now) for now, waiting, done in [(0, 90, 0), (2, 70, 20), (3, 65, 30)]]
    [None, 7.0, 6.5]
    """

    jobs_per_s: float | None = None
    """None until the queue has drained between two readings."""
    _last: Backlog | None = None
    _at: float = 0.0

    def note(self, found: Backlog, now: float) -> float | None:
        """A reading. Returns how many seconds its jobs take; None while that is unknown, or where nothing waits."""
        last, elapsed = self._last, now - self._at
        # A queue that was empty in between drained as slowly as jobs came.
        if last is not None and _waits(last) and _waits(found) and 0 < elapsed <= _LONGEST_S:
            # Below 0: the broker has lost its data.
            rate = max(0, found.committed - last.committed) / elapsed
            mean = rate if self.jobs_per_s is None else self.jobs_per_s
            self.jobs_per_s = mean + _WEIGHT * (rate - mean)
        self._last, self._at = found, now
        if self.jobs_per_s is None or not _waits(found):
            return None
        return found.jobs / self.jobs_per_s if self.jobs_per_s else float("inf")


def _waits(found: Backlog) -> bool:
    """Whether a job waits besides the one that was just submitted."""
    return found.jobs > 1


@dataclass(slots=True)
class _Watched:
    rate: DrainRate = field(default_factory=DrainRate)
    wait_s: float | None = None
    read_at: float = float("-inf")


class Queues:
    """The queues of one process's models. read: AsyncRedisStreams.backlog."""

    def __init__(self, read: Callable[[str], Awaitable[Backlog]]) -> None:
        self._read = read
        self._watched: dict[str, _Watched] = {}

    async def wait_s(self, model: str) -> float | None:
        """How long the model's jobs take from now on; None while that is unknown, or where nothing waits."""
        watched = self._watched.setdefault(model, _Watched())
        now = asyncio.get_running_loop().time()
        if now - watched.read_at >= _READ_EVERY_S:
            # First: other requests do not read meanwhile.
            watched.read_at = now
            # Without an answer the last one stands.
            with suppress(PenstockError):
                watched.wait_s = watched.rate.note(await self._read(model), now)
        return watched.wait_s
