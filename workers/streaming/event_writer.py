"""Writes the events of all streaming jobs of a worker: those that wait travel together.

    model threads -- add --> outboxes, one per job -- one call for all of them --> broker

A write begins at once, on the model thread, for the first event of a job, for an event that comes 5 ms or more after
the last write began, and when 64 KiB of a job wait. Every other event waits for at most the rest of the 5 ms and the
write that is under way; then the thread `events` writes it. One write at a time is under way. Events that are added
inside of `together` are one write at its end.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Final, TypeVar

from penstock.registry.broker.base import Emission, Position, WorkerEnd
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.event_body import EventPart
from penstock.workers.job import ClaimedJob
from penstock.workers.streaming.outbox import ENVELOPE_BYTES, Outbox

__all__ = ["EventWriter"]

Answer = TypeVar("Answer")

_APART_S: Final = 0.005
"""Between the beginnings of two writes, unless one is urgent."""
_MOST_WAITING_BYTES: Final = 4 * ENVELOPE_BYTES
"""Of one job. Beyond it the model thread waits."""
_WRITE_BYTES: Final = 1 << 20
_WRITE_JOBS: Final = 256
"""One write takes no further job when it has so many bytes or jobs."""
_RETRY_S: Final = 0.2
_LOOK_S: Final = 0.2
_JOIN_S: Final = 1.0


class EventWriter:
    """The outboxes of one worker. For any thread.

    ttl_ms: how long events live. max_bytes: of the events of one job. may_wait: whether a job may go on waiting for the
    broker; it is lost otherwise. clock: monotonic seconds.
    """

    def __init__(
        self,
        broker: WorkerEnd,
        consumer: str,
        *,
        ttl_ms: int,
        max_bytes: int,
        may_wait: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._consumer = consumer
        self._ttl_ms = ttl_ms
        self._max_bytes = max_bytes
        self._may_wait = may_wait
        self._clock = clock
        self._name = secrets.token_hex(6)
        self._runs = itertools.count(1)
        self._lock = threading.Lock()
        self._due = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._outboxes: dict[Outbox, None] = {}
        """Those with events that wait, in order."""
        self._is_writing = False
        self._is_urgent = False
        self._held = 0
        """Threads that add events which shall travel together."""
        self._next_at = -inf
        """When the next write may begin, unless it is urgent."""
        self._retry_at = -inf
        """When it may begin in any case: the broker did not answer."""
        self._thread: threading.Thread | None = None
        self._wakes_at = -inf
        """When the thread wakes by itself; before any time while it is awake."""
        self._is_stopping = False

    def name_run(self) -> str:
        """The name of a run of a job. Not the consumer's name: one worker may run a job several times."""
        return f"{self._name}.{next(self._runs):x}"

    def add(self, outbox: Outbox, part: EventPart, touch: Callable[[], None]) -> None:
        """Have an event written. Waits while too much of its job waits, and calls `touch` meanwhile.

        Raises the error with which the broker refused earlier events of the job.
        """
        with self._lock:
            outbox.add(part)
            self._outboxes.setdefault(outbox)
            self._is_urgent |= outbox.is_new or outbox.waiting_bytes >= ENVELOPE_BYTES
            if not self._is_writing and self._clock() >= self._due_at():
                self._write()
            if outbox.waiting_bytes > _MOST_WAITING_BYTES or outbox.error is not None:
                self._await(lambda: outbox.waiting_bytes <= _MOST_WAITING_BYTES, outbox, touch)
            self._wake()

    @contextmanager
    def together(self) -> Iterator[None]:
        """The events of many jobs that are added inside of it are written at its end, by one call.

        Each call takes the lock of Python from the models. A thread that must wait for its events writes them earlier.
        """
        with self._lock:
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                if self._outboxes and not (self._held or self._is_writing) and self._clock() >= self._retry_at:
                    self._write()
                self._wake()

    def flush(self, outbox: Outbox, touch: Callable[[], None]) -> None:
        """Wait until the broker has all events of the job. Errors as for `add`."""
        with self._lock:
            self._await(lambda: outbox.is_empty, outbox, touch)

    def ask(self, read: Callable[[], Answer], job: ClaimedJob, touch: Callable[[], None]) -> Answer | None:
        """The answer of the broker, for which a job waits while it is away. None: the job was lost meanwhile."""
        while not job.is_lost:
            touch()
            try:
                return read()
            except BrokerUnavailable:
                if not self._may_wait():
                    job.is_lost = True
                with self._lock:
                    self._done.wait(_RETRY_S)
        return None

    def write_now(self, outboxes: Iterable[Outbox]) -> None:
        """Write the events of jobs that do not run, on this thread. Outboxes that are empty are left out.

        If the broker refuses the events of one job, its outbox has the error. Raises BrokerUnavailable: a later call
        with the same outboxes writes what is left, and no event twice.
        """
        left = deque(outbox for outbox in outboxes if not outbox.is_empty)
        while left:
            part: list[Outbox] = []
            size = 0
            while left and size < _WRITE_BYTES and len(part) < _WRITE_JOBS:
                outbox = left.popleft()
                size += outbox.begin()
                part.append(outbox)
            for outbox, outcome in zip(part, self._sent(part), strict=True):
                if isinstance(outcome, BrokerUnavailable):
                    raise outcome
                if isinstance(outcome, Position):
                    outbox.written(outcome)
                else:
                    outbox.fail(outcome)

    def discard(self, outbox: Outbox) -> None:
        """Write no further event of the job."""
        with self._lock:
            while self._is_writing:
                self._done.wait()
            self._outboxes.pop(outbox, None)
            outbox.drop()

    def stop(self) -> None:
        """End the thread."""
        with self._lock:
            self._is_stopping = True
            self._due.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _await(self, is_done: Callable[[], bool], outbox: Outbox, touch: Callable[[], None]) -> None:
        while not (is_done() or outbox.job.is_lost):
            touch()
            if self._is_writing or self._clock() < self._retry_at:
                self._done.wait(_LOOK_S)
            else:
                self._write()
        if outbox.error is not None:
            raise outbox.error

    def _due_at(self) -> float:
        if not self._outboxes or self._held:
            return inf
        return self._retry_at if self._is_urgent else max(self._next_at, self._retry_at)

    def _wake(self) -> None:
        """The thread must look again when something is due before it wakes. The end of a write asks again."""
        if not self._outboxes or self._is_writing or self._is_stopping:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="events", daemon=True)
            self._thread.start()
        elif self._due_at() < self._wakes_at:
            self._due.notify()

    def _serve(self) -> None:
        with self._lock:
            while not self._is_stopping:
                left = inf if self._is_writing else self._due_at() - self._clock()
                if left <= 0:
                    self._write()
                    continue
                self._wakes_at = self._clock() + left
                self._due.wait(None if left == inf else left)
                self._wakes_at = -inf

    def _write(self) -> None:
        """One write. The caller holds the lock before and after it."""
        outboxes = self._taken()
        self._is_writing = True
        self._is_urgent = bool(self._outboxes)
        self._next_at = self._clock() + _APART_S
        self._lock.release()
        try:
            outcomes = self._sent(outboxes)
        finally:
            self._lock.acquire()
            self._is_writing = False
        for outbox, outcome in zip(outboxes, outcomes, strict=True):
            self._settle(outbox, outcome)
        self._done.notify_all()
        self._wake()

    def _taken(self) -> list[Outbox]:
        taken: list[Outbox] = []
        size = 0
        while self._outboxes and size < _WRITE_BYTES and len(taken) < _WRITE_JOBS:
            outbox = next(iter(self._outboxes))
            del self._outboxes[outbox]
            if outbox.job.is_lost:
                outbox.drop()
            else:
                size += outbox.begin()
                taken.append(outbox)
        return taken

    def _sent(self, outboxes: Sequence[Outbox]) -> list[Position | Exception]:
        """The broker's answer for each of them, without the lock. BrokerUnavailable: they must be sent again."""
        try:
            return [*self._emit([outbox.emission() for outbox in outboxes])]
        except BrokerUnavailable as error:
            return [error for _ in outboxes]
        except Exception as error:  # whatever the broker holds in place of one job's events, the others are written
            if len(outboxes) == 1:
                return [error]
            return [outcome for outbox in outboxes for outcome in self._sent([outbox])]

    def _emit(self, emissions: Sequence[Emission]) -> Sequence[Position]:
        if not emissions:
            return ()
        return self._broker.emit(self._consumer, emissions, self._ttl_ms, max_bytes=self._max_bytes)

    def _settle(self, outbox: Outbox, outcome: Position | Exception) -> None:
        if isinstance(outcome, Position):
            outbox.written(outcome)
        elif not isinstance(outcome, BrokerUnavailable):
            outbox.fail(outcome)
        elif self._may_wait():
            self._retry_at = self._clock() + _RETRY_S
        else:
            outbox.lose()
        if not outbox.is_empty:
            self._outboxes.setdefault(outbox)
            self._is_urgent |= outbox.waiting_bytes >= ENVELOPE_BYTES
