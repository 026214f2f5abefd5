"""The traffic of the asyncio client: publications gathered into calls, replies and events for awaiting tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from itertools import chain
from math import inf
from typing import Final, TypeAlias

from penstock.producers.gathering import EndedJobs
from penstock.producers.job_state import JobState
from penstock.producers.replies import ALL_ENTRIES, RECORDS_AT_ONCE, SILENCE_S, ReplyRouter, Sink, new_client_id
from penstock.producers.submission import chunks, log_accepted, logger
from penstock.producers.unusable import closed
from penstock.registry.broker.base import Limits, Publication, Receipt, State, StreamEntry
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import events_key

__all__ = ["AsyncEndedJobs", "AsyncReplyReader", "SubmitCoalescer", "Subscription"]

_SILENCE_MS: Final = int(SILENCE_S * 1000)


class SubmitCoalescer:
    """Joins the publications of one slot into calls. One call is out at a time; the next one takes all that waits."""

    def __init__(self, slot: str, broker: AsyncRedisStreams, limits: Limits) -> None:
        self._slot = slot
        self._broker = broker
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._jobs: list[Publication] = []
        self._answers: list[asyncio.Future[Receipt]] = []
        """The future of each receipt."""
        self._left: dict[asyncio.Future[Receipt], Callable[[Receipt], object]] = {}
        """Who is told of a job whose submitter was cancelled."""
        self._all_told: asyncio.Future[None] | None = None
        self._chunks: deque[tuple[Sequence[Publication], list[asyncio.Future[Receipt]]]] = deque()
        self._is_sending = False
        self._task: asyncio.Task[None] | None = None

    def send(self, publication: Publication) -> asyncio.Future[Receipt]:
        """The broker's answer. A caller that is cancelled does not stop the call for the others."""
        # Made directly: the loop's own method is Python code, and this is half of all futures of a client.
        answer: asyncio.Future[Receipt] = asyncio.Future(loop=self._loop)
        self._jobs.append(publication)
        self._answers.append(answer)
        if not self._is_sending:
            self._is_sending = True
            # At the end of this turn of the loop, with all jobs that the turn submits.
            self._loop.call_soon(self._send_next)
        return answer

    def leave(self, answer: asyncio.Future[Receipt], on_receipt: Callable[[Receipt], object]) -> None:
        """The caller was cancelled, and `on_receipt` gets the broker's answer. A call that fails has none."""
        if answer.cancelled():
            self._left[answer] = on_receipt
        elif answer.exception() is None:
            # It came in the same turn as the cancellation.
            on_receipt(answer.result())

    async def told(self) -> None:
        """Returns once the broker has answered, or not, for all jobs whose submitters were cancelled."""
        if self._left:
            self._all_told = self._loop.create_future()
            await self._all_told

    def _tell_left(self, answer: asyncio.Future[Receipt], receipt: Receipt | None) -> None:
        """Its caller was cancelled. receipt: None where the call has failed."""
        on_receipt = self._left.pop(answer, None)
        if on_receipt is not None and receipt is not None:
            on_receipt(receipt)
        if self._all_told is not None and not self._left and not self._all_told.done():
            self._all_told.set_result(None)

    def _send_next(self) -> None:
        """Sends the next chunk, without a task if the connection is up. Ends when nothing is left."""
        if not self._chunks:
            gathered, answers, self._jobs, self._answers = self._jobs, self._answers, [], []
            start = 0
            for chunk in chunks(gathered):
                self._chunks.append((chunk, answers[start : start + len(chunk)]))
                start += len(chunk)
        if not self._chunks:
            self._is_sending = False
            return
        jobs, waiting = self._chunks.popleft()

        def receive(receipts: list[Receipt] | None) -> None:
            if receipts is None:
                self._task = self._loop.create_task(self._send_with_retries(jobs, waiting), context=Context())
            else:
                self._answer(waiting, receipts)
                self._send_next()

        if not self._broker.publish_now(self._slot, jobs, self._limits, receive):
            receive(None)

    async def _send_with_retries(self, jobs: Sequence[Publication], waiting: Sequence[asyncio.Future[Receipt]]) -> None:
        """Connects, repeats, and fails at last. The broker accepts a job id once, so that a repeated call is safe."""
        try:
            receipts = await self._broker.publish(self._slot, jobs, self._limits)
        except Exception as error:  # every error belongs to the tasks that await an answer
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
                else:
                    self._loop.call_soon(self._tell_left, answer, None)
        else:
            self._answer(waiting, receipts)
        self._send_next()

    def _answer(self, waiting: Sequence[asyncio.Future[Receipt]], receipts: Sequence[Receipt]) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            log_accepted(receipts, self._slot)
        for answer, receipt in zip(waiting, receipts, strict=True):
            if not answer.done():
                answer.set_result(receipt)
            else:
                # In the next turn: a caller that was cancelled in this one has not called `leave` yet.
                self._loop.call_soon(self._tell_left, answer, receipt)


class Subscription(deque[StreamEntry]):
    """The entries that one subscriber has not seen yet."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived = asyncio.Event()

    def append(self, entry: StreamEntry) -> None:
        super().append(entry)
        self._arrived.set()

    async def next(self, timeout_s: float) -> list[StreamEntry]:
        """Waits for the first entry and returns all that have come. Empty after a silence of `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        self._arrived.clear()
        entries = list(self)
        self.clear()
        return entries


class AsyncEndedJobs(EndedJobs):
    """The ended jobs of one `as_completed`, for a task that waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived = asyncio.Event()
        self._replies: dict[asyncio.Future[None], str] = {}
        self._error: BaseException | None = None

    def expect(self, job_id: str, reply: asyncio.Future[None]) -> None:
        """The job has ended when `reply` is done."""
        self._replies[reply] = job_id
        reply.add_done_callback(self._replied)

    def append(self, entry: StreamEntry) -> None:
        super().append(entry)
        self._arrived.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether a job has ended. Waits for the first one, or for `timeout_s`. Raises the error of a lost reply."""
        if not self:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            self._arrived.clear()
        if self._error is not None:
            raise self._error
        return bool(self)

    def stop(self) -> None:
        """Awaits no reply any more."""
        replies, self._replies = self._replies, {}
        for reply in replies:
            reply.cancel()

    def _replied(self, reply: asyncio.Future[None]) -> None:
        if reply.cancelled():
            return
        # Asked in any case: asyncio complains of an error that nobody saw.
        error = reply.exception()
        if error is not None:
            self._error = error
        elif (job_id := self._replies.pop(reply, None)) is not None:
            self.note(job_id)
        self._arrived.set()


_Waiter: TypeAlias = tuple[asyncio.Future[None], float, float]
"""A future that waits for one job: since when, and until when, on the loop's clock. It is that of time.monotonic()."""


class AsyncReplyReader:
    """One task that reads all replies and subscriptions of a client. It runs while one of them is awaited."""

    def __init__(self, broker: AsyncRedisStreams) -> None:
        self._broker = broker
        # Weak: a client that is dropped without `aclose` goes at once, not when the garbage collector comes.
        wake_waiters = weakref.WeakMethod(self._wake_waiters)
        self._router: ReplyRouter[JobState] = ReplyRouter(
            new_client_id(), lambda jobs: (wake := wake_waiters()) and wake(jobs)
        )
        self._reader: asyncio.Task[None] | None = None
        self._waker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: dict[JobState, list[_Waiter]] = {}
        self._reading: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._is_closing = False
        self._alarm: asyncio.TimerHandle | None = None
        self._wakes_at = inf

    def address(self, slot: str) -> str:
        """The reply stream for jobs of a slot."""
        key = self._addresses.get(slot)
        if key is None:
            key = self._addresses[slot] = self._router.address(slot)
            self._wake_if_behind()
        return key

    def expect_all(self, jobs: Iterable[JobState]) -> None:
        """Routes the reply about each job to it, while the caller keeps a reference to it."""
        self._router.expect_all(jobs)

    def reply_to(self, job: JobState, until: float = inf) -> asyncio.Future[None]:
        """Done when the reply about the job has come. It may raise BrokerUnavailable, or TimeoutError at `until`.

        until: on the clock of the loop. One timer serves all waiting futures. One timer for each would take a tenth of
        a client's time per job.
        """
        if self._is_closing:
            raise closed()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        waiting = self._waiters.get(job)
        if waiting is None:
            self._waiters[job] = [(waiter, time.monotonic(), until)]
        else:
            waiting.append((waiter, waiting[0][1], until))
        if until < self._wakes_at:
            self._wake_at(until)
        if self._reader is None:
            self.listen()
        return waiter

    def _wake_at(self, until: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._wakes_at = until
        self._alarm = None if self._loop is None or until == inf else self._loop.call_at(until, self._give_up)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _give_up(self) -> None:
        """Ends the futures whose time is up, and sets the timer for the next one."""
        now, earliest = self._now(), inf
        for waiter, _, until in chain.from_iterable(self._waiters.values()):
            if waiter.done():
                continue
            if until <= now:
                waiter.set_exception(TimeoutError())
            else:
                earliest = min(earliest, until)
        self._wake_at(earliest)

    def _wake_waiters(self, jobs: Iterable[JobState]) -> None:
        take = self._waiters.pop
        for job in jobs:
            for waiter, _, _ in take(job, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def listen(self) -> None:
        """Starts the reading task unless it runs."""
        if self._reader is None:
            # It reads for all callers: it is no part of what the first one does, nor of its span.
            self._reader = asyncio.create_task(self._read(), context=Context())

    def subscribe(self, job_id: str, after: int) -> Subscription:
        """The queue to which the job's events after `after` will be added."""
        subscription = Subscription()
        self.attach(job_id, after, subscription)
        return subscription

    def attach(self, job_id: str, after: int, sink: Sink) -> None:
        """Adds the job's events after `after` to `sink`."""
        if self._is_closing:
            raise closed()
        self._router.subscribe(job_id, after, sink)
        self.listen()
        self._wake_if_behind()

    def unsubscribe(self, job_id: str, sink: Sink) -> None:
        """Ends a subscription."""
        self._router.unsubscribe(job_id, sink)

    async def read_now(self, job_id: str, after: int) -> list[StreamEntry]:
        """The entries of the job's event stream after a sequence number, without waiting."""
        return await self._broker.read({events_key(job_id): f"{after}-0"}, 0, ALL_ENTRIES)

    async def _read(self) -> None:
        try:
            await self._read_while_awaited()
        finally:
            self._reader = None

    async def _read_while_awaited(self) -> None:
        while not self._is_closing and self._router.is_awaited:
            try:
                if not await self._read_on(self._now() + SILENCE_S):
                    self._reading = self._router.cursors()
                    self._deliver(await self._broker.read(self._reading, _SILENCE_MS))
                await self._check_records()
            except BrokerUnavailable as error:
                self._fail(error)
            except Exception as error:  # every error belongs to the tasks that wait
                self._fail(error)
                raise
            finally:
                self._reading = {}

    async def _read_on(self, until: float) -> bool:
        """Reads without a pause and hands out each entry at once, until about `until`.

        False when this cannot go on: the connection must be opened, or an error calls for a read with retries.
        """
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def receive(entries: list[StreamEntry] | None) -> None:
            if entries is None:
                end(goes_on=False)
                return
            self._deliver(entries)
            if self._now() >= until or self._is_closing or not self._router.is_awaited:
                end(goes_on=True)
            else:
                ask()

        def ask() -> None:
            self._reading = self._router.cursors()
            if not self._broker.read_now(self._reading, _SILENCE_MS, receive):
                end(goes_on=False)

        def end(*, goes_on: bool) -> None:
            if not ended.done():
                ended.set_result(goes_on)

        ask()
        return await ended

    def _deliver(self, entries: list[StreamEntry]) -> None:
        for key, last in self._router.deliver(entries):
            self._broker.trim(key, last)

    async def _check_records(self) -> None:
        """Reads the records of jobs without a reply for a second: the streams are hints, the records decide."""
        self._router.sweep()
        now = self._now()
        for job, waiting in list(self._waiters.items()):
            if all(waiter.done() for waiter, _, _ in waiting):
                del self._waiters[job]
        silent = [
            job for job, waiting in self._waiters.items() if job.awaits_reply and now - waiting[0][1] >= SILENCE_S
        ]
        if await self._read_records(silent):
            # One reply was lost: others may be lost, too.
            await self._read_records(self._router.expected())

    async def _read_records(self, jobs: Sequence[JobState]) -> bool:
        """Whether any of these jobs has ended."""
        has_ended = False
        for start in range(0, len(jobs), RECORDS_AT_ONCE):
            part = jobs[start : start + RECORDS_AT_ONCE]
            records = await self._broker.job_records([job.id for job in part])
            for job, record in zip(part, records, strict=True):
                if job.awaits_reply and (record is None or record.state is not State.QUEUED):
                    has_ended = True
                    self._router.settle(job, record)
        return has_ended

    def _fail(self, error: Exception) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter, _, _ in chain.from_iterable(waiters.values()):
            if not waiter.done():
                waiter.set_exception(error)

    def _wake_if_behind(self) -> None:
        key = self._router.wake_key(self._reading) if self._reading else None
        if key is not None and (self._waker is None or self._waker.done()):
            self._waker = asyncio.create_task(self._nudge(key), context=Context())

    async def _nudge(self, key: str) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self._broker.nudge(key)

    def abandon(self) -> None:
        """After a fork, or after the event loop was closed: no reply comes here. Records and events tell the ends."""
        self._is_closing = True
        for job in self._router.expected():
            job.awaits_reply = False

    async def aclose(self) -> None:
        """Wakes the reading task and waits for its end, so that entries that it has read still arrive."""
        self._is_closing = True
        self._wake_at(inf)
        if self._waker is not None:
            await self._waker
        if (reader := self._reader) is not None:
            if key := next(iter(self._reading), None):
                await self._nudge(key)
            await asyncio.wait([reader], timeout=2 * SILENCE_S)
        self._fail(closed())
