"""The clock and what happens next. Time passes only here, by stepping from one event to the next.

    after(delay, action) --> heap --> run: pop the earliest, set the clock, act
                                 elapse(delay): the same, from inside an action that takes its time

`elapse` is how one thread waits, in a call or at a checkpoint, while all others go on: it runs what is due until
then on top of the waiting one. A thread that waits on top of another keeps that one waiting too, which only makes
its wait longer: every such schedule could have happened.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

__all__ = ["EPOCH_S", "Schedule"]

EPOCH_S: Final = 1_700_000_000.0
"""What the broker's clock says in the beginning."""

Action = Callable[[], None]


class Schedule:
    """One schedule's time, its random numbers and its trace. `now` is in seconds since the beginning."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.skew_s = 0.0
        """How far the broker's clock has jumped."""
        self.down_until = 0.0
        """The broker answers no call before."""
        self.disturbed_at = -1e9
        """When something last happened that touches every worker's leases."""
        self.is_over = False
        """Whether it is only looked at any more: calls are answered, whatever the plan says."""
        self.awaited = 0
        """Things yet to come that it does not end without."""
        self.steps = 0
        self.injected: Counter[str] = Counter()
        self.violations: list[str] = []
        self.trace: list[str] = []
        self._random = rng.random
        self._heap: list[tuple[float, float, int, Action]] = []
        self._pushed = 0

    def broker_clock(self) -> float:
        """Seconds since the epoch, as the broker has it."""
        return EPOCH_S + self.now + self.skew_s

    def after(self, delay: float, action: Action) -> None:
        """`action` happens in `delay` seconds; of several at one time, any may come first."""
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + delay, self._random(), self._pushed, action))

    def run(self, is_over: Callable[[], bool], until: float) -> bool:
        """Lets everything happen until nothing is awaited and it `is_over`. False when `until` comes first."""
        heap, pop = self._heap, heapq.heappop
        while self.awaited or not is_over():
            if not heap or heap[0][0] > until:
                return False
            # As in `_step`: a call for each step would take a fiftieth of the time.
            due, _, _, action = pop(heap)
            if due > self.now:
                self.now = due
            self.steps += 1
            action()
        return True

    def elapse(self, delay: float) -> float:
        """Lets `delay` seconds pass for the caller while all others go on; returns how many more it became."""
        until = self.now + delay
        heap = self._heap
        while heap and heap[0][0] <= until:
            self._step()
        self.now = max(self.now, until)
        return self.now - until

    def close(self) -> None:
        """Nothing happens any more."""
        self._heap.clear()

    def _step(self) -> None:
        at, _, _, action = heapq.heappop(self._heap)
        if at > self.now:
            self.now = at
        self.steps += 1
        action()

    def inject(self, kind: str, who: str = "") -> None:
        """A fault strikes: it is counted and noted."""
        self.injected[kind] += 1
        self.note(f"! {kind} {who}")

    def note(self, text: str) -> None:
        """One line of the trace."""
        self.trace.append(f"{self.now:.6f} {text}")

    def violate(self, what: str) -> None:
        """A promise was broken."""
        self.violations.append(what)
        self.note(f"VIOLATION {what}")

    def digest(self) -> str:
        """The trace in one word: equal for equal schedules."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=8).hexdigest()
