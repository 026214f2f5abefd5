"""The asyncio client's traffic: publications gathered into calls, replies and events handed to those who await them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import Final, NamedTuple, Protocol

from penstock.producers.connection import new_client_id
from penstock.producers.publish import parcels
from penstock.producers.replies import RECORDS_AT_ONCE, SILENCE_S, Postbox
from penstock.registry.broker.base import JobRecord, Limits, Publication, Receipt, State, StreamEntry
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import events_key

__all__ = ["AsyncInbox", "Awaited", "Outbox", "Subscription"]

_ALL: Final = 1_000_000
_SILENCE_MS: Final = int(SILENCE_S * 1000)


class Awaited(Protocol):
    """A job of this client, as far as its replies are concerned."""

    id: str
    is_ours: bool
    """Whether a reply is still to come."""

    def receive(self, job_record: JobRecord | None) -> None:
        """The reply has come, or None: ask the record."""


class Outbox:
    """Publications of one slot on their way: one call is out at a time, and takes along what gathered meanwhile."""

    def __init__(self, slot: str, broker: AsyncRedisStreams, limits: Limits) -> None:
        self._slot = slot
        self._broker = broker
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._gathered: list[_Gathered] = []
        self._parcels: deque[list[_Gathered]] = deque()
        self._is_sending = False
        self._task: asyncio.Task[None] | None = None

    def send(self, publication: Publication) -> asyncio.Future[Receipt]:
        """The broker's answer. A caller that is cancelled meanwhile does not stop the call for the others."""
        # Made directly: the loop's own method is Python, and this is half of all futures of a client.
        answer: asyncio.Future[Receipt] = asyncio.Future(loop=self._loop)
        self._gathered.append(_Gathered(publication, answer))
        if not self._is_sending:
            self._is_sending = True
            # At the end of this turn of the loop, with all that it submits.
            self._loop.call_soon(self._send_next)
        return answer

    def _send_next(self) -> None:
        """Sends the next parcel, without a task if the connection is up; ends when nothing is left."""
        if not self._parcels:
            gathered, self._gathered = self._gathered, []
            rest = iter(gathered)
            for parcel in parcels([each.publication for each in gathered]):
                self._parcels.append([next(rest) for _ in parcel])
        if not self._parcels:
            self._is_sending = False
            return
        waiting = self._parcels.popleft()
        jobs = [each.publication for each in waiting]

        def receive(receipts: list[Receipt] | None) -> None:
            if receipts is None:
                self._task = self._loop.create_task(self._send_patiently(waiting))
            else:
                _tell(waiting, receipts)
                self._send_next()

        if not self._broker.publish_now(self._slot, jobs, self._limits, receive):
            receive(None)

    async def _send_patiently(self, parcel: Sequence[_Gathered]) -> None:
        """Connects, repeats, and at last fails: publishing goes by job id, so that asking twice accepts once."""
        try:
            receipts = await self._broker.publish(self._slot, [each.publication for each in parcel], self._limits)
        except Exception as error:  # whatever it is, it belongs to those who wait for the answer
            for each in parcel:
                if not each.answer.done():
                    each.answer.set_exception(error)
        else:
            _tell(parcel, receipts)
        self._send_next()


class _Gathered(NamedTuple):
    """A publication, and who waits for its receipt."""

    publication: Publication
    answer: asyncio.Future[Receipt]


def _tell(parcel: Sequence[_Gathered], receipts: Sequence[Receipt]) -> None:
    for (_, answer), receipt in zip(parcel, receipts, strict=True):
        if not answer.done():
            answer.set_result(receipt)


class Subscription(deque[StreamEntry]):
    """The entries of one subscriber that it has not seen yet."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived = asyncio.Event()

    def append(self, entry: StreamEntry) -> None:
        super().append(entry)
        self._arrived.set()

    async def next(self, timeout_s: float) -> list[StreamEntry]:
        """What has come, waiting for the first of it; empty after a silence."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        self._arrived.clear()
        entries = list(self)
        self.clear()
        return entries


class _Waiting(NamedTuple):
    """Those who wait for one job, and since when."""

    since: float
    waiters: list[tuple[asyncio.Future[None], float]]
    """Each with the time, on the loop's clock, until which it will wait."""


class AsyncInbox:
    """One reading task for all replies and subscriptions of a client; it runs while somebody waits."""

    def __init__(self, broker: AsyncRedisStreams) -> None:
        self._broker = broker
        self._postbox: Postbox[Awaited] = Postbox(new_client_id())
        self._reader: asyncio.Task[None] | None = None
        self._waker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: dict[Awaited, _Waiting] = {}
        self._reading: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._is_closing = False
        self._alarm: asyncio.TimerHandle | None = None
        self._wakes_at = inf

    def address(self, slot: str) -> str:
        """The reply stream for jobs of a slot."""
        key = self._addresses.get(slot)
        if key is None:
            key = self._addresses[slot] = self._postbox.address(slot)
            self._wake_if_behind()
        return key

    def expect(self, job_id: str, handle: Awaited) -> None:
        """See Postbox.expect."""
        self._postbox.expect(job_id, handle)

    def reply_to(self, handle: Awaited, until: float = inf) -> asyncio.Future[None]:
        """Done once the reply about a job of ours has come; it may raise BrokerUnavailable, or TimeoutError at `until`.

        until: on the clock of the loop. One timer serves all who wait: a timer each would take a tenth of a client's
        time per job.
        """
        if self._is_closing:
            raise _closed()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        waiting = self._waiters.get(handle)
        if waiting is None:
            self._waiters[handle] = _Waiting(self._loop.time(), [(waiter, until)])
        else:
            waiting.waiters.append((waiter, until))
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
        """Tells those whose time is up, and sets the timer for the next."""
        now, earliest = self._now(), inf
        for waiting in self._waiters.values():
            for waiter, until in waiting.waiters:
                if waiter.done():
                    continue
                if until <= now:
                    waiter.set_exception(TimeoutError())
                else:
                    earliest = min(earliest, until)
        self._wake_at(earliest)

    def answered(self, handle: Awaited) -> None:
        """Wakes those who wait for the job."""
        waiting = self._waiters.pop(handle, None)
        for waiter, _ in waiting.waiters if waiting else ():
            if not waiter.done():
                waiter.set_result(None)

    def listen(self) -> None:
        """Makes sure that somebody reads."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())

    def subscribe(self, job_id: str, after: int) -> Subscription:
        """Where the job's events will appear, see Postbox.subscribe."""
        if self._is_closing:
            raise _closed()
        subscription = Subscription()
        self._postbox.subscribe(job_id, after, subscription)
        self.listen()
        self._wake_if_behind()
        return subscription

    def unsubscribe(self, job_id: str, subscription: Subscription) -> None:
        """Ends a subscription."""
        self._postbox.unsubscribe(job_id, subscription)

    async def read_now(self, job_id: str, after: int) -> list[StreamEntry]:
        """A job's events after a sequence number, as they are now."""
        return await self._broker.read({events_key(job_id): f"{after}-0"}, 0, _ALL)

    async def _read(self) -> None:
        try:
            await self._read_while_awaited()
        finally:
            self._reader = None

    async def _read_while_awaited(self) -> None:
        while not self._is_closing and self._postbox.is_awaited:
            try:
                if not await self._hear(self._now() + SILENCE_S):
                    self._reading = self._postbox.cursors()
                    self._deliver(await self._broker.read(self._reading, _SILENCE_MS))
                await self._ask_records()
            except BrokerUnavailable as error:
                self._fail(error)
            except Exception as error:  # whatever it is, it belongs to those who wait
                self._fail(error)
                raise
            finally:
                self._reading = {}

    async def _hear(self, until: float) -> bool:
        """Reads on and on, and hands out what comes as it comes, until about `until`.

        False when that cannot go on: the connection is to be opened, or an error to be met by asking patiently.
        """
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def receive(entries: list[StreamEntry] | None) -> None:
            if entries is None:
                end(goes_on=False)
                return
            self._deliver(entries)
            if self._now() >= until or self._is_closing or not self._postbox.is_awaited:
                end(goes_on=True)
            else:
                ask()

        def ask() -> None:
            self._reading = self._postbox.cursors()
            if not self._broker.read_now(self._reading, _SILENCE_MS, receive):
                end(goes_on=False)

        def end(*, goes_on: bool) -> None:
            if not ended.done():
                ended.set_result(goes_on)

        ask()
        return await ended

    def _deliver(self, entries: list[StreamEntry]) -> None:
        for key, last in self._postbox.deliver(entries):
            self._broker.trim(key, last)

    async def _ask_records(self) -> None:
        """For jobs of which nothing was heard for a second: the streams are hints, the records are the truth."""
        self._postbox.sweep()
        now = self._now()
        for handle, waiting in list(self._waiters.items()):
            if all(waiter.done() for waiter, _ in waiting.waiters):
                # Those who waited gave up.
                del self._waiters[handle]
        silent = [
            handle for handle, waiting in self._waiters.items() if handle.is_ours and now - waiting.since >= SILENCE_S
        ]
        if await self._ask_for(silent):
            # A reply never came: those of other jobs may be gone with it.
            await self._ask_for(self._postbox.expected())

    async def _ask_for(self, handles: Sequence[Awaited]) -> bool:
        """Whether any of these jobs has ended."""
        has_ended = False
        for start in range(0, len(handles), RECORDS_AT_ONCE):
            part = handles[start : start + RECORDS_AT_ONCE]
            job_records = await self._broker.job_records([handle.id for handle in part])
            for handle, job_record in zip(part, job_records, strict=True):
                if handle.is_ours and (job_record is None or job_record.state is not State.QUEUED):
                    has_ended = True
                    self._postbox.settle(handle, job_record)
        return has_ended

    def _fail(self, error: Exception) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter, _ in chain.from_iterable(waiting.waiters for waiting in waiters.values()):
            if not waiter.done():
                waiter.set_exception(error)

    def _wake_if_behind(self) -> None:
        key = self._postbox.wake_key(self._reading) if self._reading else None
        if key is not None and (self._waker is None or self._waker.done()):
            self._waker = asyncio.create_task(self._nudge(key))

    async def _nudge(self, key: str) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self._broker.nudge(key)

    async def aclose(self) -> None:
        """Ends the reader by word, so that what it has just been told still arrives."""
        self._is_closing = True
        self._wake_at(inf)
        if self._waker is not None:
            await self._waker
        if (reader := self._reader) is not None:
            if key := next(iter(self._reading), None):
                await self._nudge(key)
            await asyncio.wait([reader], timeout=2 * SILENCE_S)
        self._fail(_closed())


def _closed() -> BrokerUnavailable:
    return BrokerUnavailable("This client was closed. Expected an open one")
