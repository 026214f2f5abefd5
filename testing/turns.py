"""The threads of a worker in memory: each takes the drain's turns and runs batches, whichever is next.

    ring --> a thread wakes --> turns: claim, dispatch --> the batch that it dispatched --> turns: commit --> reply

A worker process has one thread for the turns and others for forwards, so that a job is handed over four times. Here it
is handed over twice: from the client, and back to it. One thread takes turns at a time. There is one thread more than
forwards that may run, so that one is left for the turns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from math import inf
from queue import Empty
from typing import TYPE_CHECKING, Final

from penstock.registry.broker.base import Claim, Delivery
from penstock.workers.batch_run import BatchRun
from penstock.workers.claims import Claimer, WakeUp
from penstock.workers.drain import Drain
from penstock.workers.executor import Executor
from penstock.workers.runtime.base import DeviceLost

if TYPE_CHECKING:
    from typing import Any

__all__ = ["NotifiedClaimer", "SharedDrain", "SharedExecutor", "SharedWakeUp", "Turns"]

_SHORTEST_S: Final = 0.001
_IDLE_S: Final = 0.25
"""How long a thread sleeps that has nothing left to do but to end."""
_LOOK_S: Final = 1.0
"""How long a thread sleeps at most: nobody wakes it when the client is dropped."""


class Turns:
    """The turns of one drain, shared by the threads that `serve`."""

    def __init__(self, drain: SharedDrain, executor: SharedExecutor, claimer: NotifiedClaimer) -> None:
        self._drain = drain
        self._executor = executor
        self._claimer = claimer
        self._sleeping = threading.Condition()
        self._baton = threading.Lock()
        """Held by the thread that takes turns."""
        self._serving: set[int] = set()
        """Threads that look for a turn before they sleep; those in a forward are not among them."""
        self._is_due = True
        """Whether a turn must follow. Set before the baton is asked for, checked after it was given back."""
        self._next_at = 0.0
        """When the next turn is due by the clock, in monotonic seconds."""
        self._asleep: dict[int, float] = {}
        """When each sleeping thread wakes by itself."""
        self.is_over = False
        """Whether the drain takes no more turns: it has given everything back."""
        self.is_abandoned = False
        """Whether all threads are to end by themselves. The garbage collector sets it, which may take no lock."""

    def published(self, model: str) -> None:
        """Jobs of a model came: a turn must claim them. For any thread."""
        self._claimer.news.append(model)
        self.ring()

    def ring(self) -> None:
        """A turn must follow. For any thread."""
        self._is_due = True
        if threading.get_ident() not in self._serving:
            self._wake()

    def _wake(self) -> None:
        with self._sleeping:
            self._sleeping.notify()

    def wake_all(self) -> None:
        """Have every thread look whether it should end."""
        with self._sleeping:
            self._sleeping.notify_all()

    def serve(self, *, until_over: bool) -> None:
        """Take turns and run batches; ends with the drain, or with the executor."""
        me = threading.get_ident()
        self._serving.add(me)
        try:
            while not self._has_ended(until_over):
                self._take_turns()
                if (run := self._executor.begin_next(me)) is None:
                    self._sleep(me, until_over)
                elif not self._forward(me, run):
                    return
        finally:
            self._serving.discard(me)

    def _has_ended(self, until_over: bool) -> bool:
        if self.is_abandoned and not self._executor.is_stopping:
            self._drain.ask_to_stop(0.0)
            self._drain.leases.stop(0.0)
            self._drain.parts.events.stop()
            self._executor.stop()
        return self.is_over if until_over else self._executor.is_stopping

    def _forward(self, me: int, run: BatchRun) -> bool:
        """One forward; returns whether the device can run others."""
        self._serving.discard(me)
        with self._sleeping:
            wakes_at = min(self._asleep.values(), default=0.0)
        if self._is_due or self._next_at < wakes_at or self._executor.has_startable:
            # For a turn that is due while this thread is busy, or for another batch.
            self._wake()
        try:
            self._executor.run(run)
        except DeviceLost as error:
            self._executor.device_lost = str(error)
            self._wake()
            return False
        self._serving.add(me)
        self._executor.finish(me, run)
        return True

    def _take_turns(self) -> None:
        while (self._is_due or time.monotonic() >= self._next_at) and self._baton.acquire(blocking=False):
            try:
                self._is_due = False
                self._turn()
            finally:
                self._baton.release()

    def _turn(self) -> None:
        if self.is_over:
            self._next_at = time.monotonic() + _IDLE_S
            return
        if self._drain.step(0.0) is None:
            self.is_over = True
            self.wake_all()
            return
        self._next_at = time.monotonic() + self._drain.sleep_s()

    def _sleep(self, me: int, until_over: bool) -> None:
        with self._sleeping:
            # The thread that has the baton takes the turn that is due.
            is_wanted = self._is_due and not self._baton.locked()
            if not is_wanted and not self._has_ended(until_over):
                self._asleep[me] = self._next_at
                self._sleeping.wait(max(_SHORTEST_S, min(self._next_at - time.monotonic(), _LOOK_S)))
                del self._asleep[me]


class SharedWakeUp(WakeUp):
    """Has a turn follow, in place of waking a thread that sleeps inside of one."""

    turns: Turns | None = None

    def ring(self) -> None:
        """See WakeUp.ring."""
        if self.turns is not None:
            self.turns.ring()


class NotifiedClaimer(Claimer):
    """A claimer that is told of new jobs: it claims in the turn that follows, and leaves no claim with the broker."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.news: Final[deque[str]] = deque()
        """Models that may have new jobs. Any thread appends."""

    def wanted(self) -> list[Claim]:
        """What to claim from the queues that are not known to be empty."""
        while self.news:
            self._empty.discard(self.news.popleft())
            self.is_armed = False
        if self.is_armed:
            return []
        return self.claims_for(model for name, model in self._models.items() if name not in self._empty)

    def arm(self, *, may_be_narrow: bool = True) -> None:
        """Nothing is asked for before the next news, once all queues were seen empty."""
        self.is_armed = self.is_armed or self._is_quiet(narrowly=False)

    def wait(self, timeout_s: float) -> list[Delivery]:
        """Nothing comes by itself, and threads sleep between two turns."""
        return []

    def next_wakeup(self) -> float:
        """Never: nothing is overdue."""
        return inf


class SharedDrain(Drain):
    """A drain whose own thread is one of those that take its turns."""

    turns: Turns

    def _run(self) -> None:
        self.turns.serve(until_over=True)


class SharedExecutor(Executor):
    """An executor whose model threads take turns, too."""

    turns: Turns

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_stopping = False
        self._beginning: Final = threading.Lock()

    @property
    def has_startable(self) -> bool:
        """Whether a batch waits and a forward may begin."""
        return bool(self._ready) and len(self.running()) < self.threads

    def begin_next(self, seat: int) -> BatchRun | None:
        """Begin the next batch, if one waits and a forward may begin."""
        with self._beginning:
            if not self.has_startable:
                return None
            with suppress(Empty):
                self._tokens.get_nowait()
            return self.begin(seat)

    def stop(self) -> None:
        """See Executor.stop."""
        self.is_stopping = True
        super().stop()
        self.turns.wake_all()

    def _serve(self) -> None:
        self.turns.serve(until_over=False)
