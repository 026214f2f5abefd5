"""The asyncio client: the same calls as the blocking client, awaited.

The submits of one turn of the event loop travel in one call. Those that come while that call is out travel in the next
one: the more tasks submit at a time, the fewer round trips a job costs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import ceil, inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import penstock.registry.settings  # noqa: F401 - now, because a running loop would stand still for it
from penstock.producers.async_replies import AsyncEndedJobs, AsyncReplyReader, SubmitCoalescer
from penstock.producers.core import ClientCore, Inputs, Item, Items, Refused, Untaken
from penstock.producers.events import EventMerger, JobEvent, Silence, unqueued_events
from penstock.producers.gathering import ENDS, FOLLOW_TTL_MS, MOST_FOLLOWED, Awaited, Follower, Gathered, listed
from penstock.producers.job_state import (
    CancelStatus,
    HandleCore,
    JobInfo,
    JobState,
    JobStatus,
    checked_timeout,
    result_timeout,
)
from penstock.producers.replies import RECORDS_AT_ONCE, SILENCE_S
from penstock.producers.rows import MapOrder
from penstock.producers.stack_start import StackStart
from penstock.producers.submission import HAVE_JOB, cancellation, expiry
from penstock.producers.unusable import CLOSED
from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.base import JobRecord, Receipt, State
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.errors import BrokerUnavailable, ClientUnusable, JobLost, PenstockError
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    from penstock.producers.async_cached_answers import LookupCoalescer
    from penstock.producers.cached_answers import CachedAnswer, CachedAnswers
    from penstock.registry.settings import Settings
    from penstock.testing.model import Served

__all__ = ["AsyncClient", "AsyncJobHandle"]

_LONGEST_SILENCE_S: Final = 8.0
"""Of a job's events, between two reads of its record. The first is SILENCE_S; each that follows is twice as long."""
_LOOKS_PER_S: Final = 20


class AsyncClient(
    ClientCore[
        "AsyncJobHandle",
        Coroutine[Any, Any, "AsyncJobHandle"],
        Coroutine[Any, Any, "list[AsyncJobHandle]"],
        Coroutine[Any, Any, list[Any]],
        Coroutine[Any, Any, list[dict[str, Array]]],
    ]
):
    """Submits jobs and reads their results in one event loop at a time. Close it with `aclose` or `async with`.

    When its loop was closed, the client goes on in the next one, with new connections. While its loop is open, calls
    from another one raise ClientUnusable. The arguments are those of Client.
    """

    _broker: AsyncRedisStreams
    _reader: AsyncReplyReader
    _awaits = True
    _loop: asyncio.AbstractEventLoop | None = None
    _lookups: LookupCoalescer | None = None
    _start: StackStart | None = None
    """The wait for a stack that is starting, until it is over."""

    @classmethod
    def in_memory(
        cls, models: Mapping[str, Served], *, tenant: str | None = None, settings: Settings | None = None
    ) -> AsyncClient:
        """A client of a worker in this process, for tests; see Client.in_memory. Close it."""
        from penstock.testing.async_client import InMemoryAsyncClient

        return InMemoryAsyncClient(models, tenant=tenant, settings=settings)

    async def _submit(self, model: str, inputs: Inputs, options: SubmitOptions, key: str | None) -> AsyncJobHandle:
        self._enter_loop()
        spec = (None if options.version else self._specs.fresh(model)) or await self._spec(model, options.version)
        if self._lookups is not None and (found := await self._look_up(self._lookups, spec, inputs, options, key)):
            return self._ended(found)
        job, handle = self._new_job(spec, inputs, options, key)
        coalescer = self._coalescers.get(model)
        if coalescer is None:
            coalescer = self._coalescers[model] = SubmitCoalescer(model, self._broker, self._limits)
        answer = coalescer.send(job)
        try:
            receipt = await answer
        except asyncio.CancelledError:
            # The broker has the job, or gets it in a moment. Nobody would ever know its id.
            if key is None:
                coalescer.leave(answer, partial(self._withdraw, handle))
            raise
        return self._accepted(handle, receipt, model)

    def _withdraw(self, handle: AsyncJobHandle, receipt: Receipt) -> None:
        """Cancels a job whose submitter was cancelled."""
        if receipt.outcome in HAVE_JOB:
            task = asyncio.get_running_loop().create_task(_cancel_quietly(handle))
            self._withdrawals.add(task)
            task.add_done_callback(self._withdrawals.discard)

    async def _submit_many(
        self,
        model: str,
        items: Items,
        options: SubmitOptions,
        *,
        first_index: int = 0,
        refused: Refused = None,
        timeout_s: float | None = None,
        untaken: Untaken = None,
        job_ids: Sequence[str] | None = None,
        stranded: list[AsyncJobHandle] | None = None,
    ) -> list[AsyncJobHandle]:
        spec = await self._spec(model, options.version)
        found: Mapping[int, CachedAnswer] = {}
        if self._lookups is not None:
            items = list(items)
            found = await self._look_up_all(self._lookups, spec, items, options)
        with self._submit_run(
            spec, items, options, first_index, refused, timeout_s, found, untaken, job_ids, stranded
        ) as run:
            while chunk := run.next_chunk():
                receipts = await self._broker.publish(model, chunk, self._limits)
                if pause_s := run.settle(receipts, time.monotonic()):
                    await asyncio.sleep(pause_s)
        return run.handles

    async def _look_up(
        self, lookups: LookupCoalescer, spec: ModelSpec, inputs: Inputs, options: SubmitOptions, key: str | None
    ) -> CachedAnswer | None:
        """The answer of the shared cache to one job."""
        if not await self._knows_active(lookups.answers, spec, options):
            return None
        question = lookups.answers.ask(self._builder, spec, inputs, options, key)
        return None if question is None else await lookups.find(question)

    async def _look_up_all(
        self, lookups: LookupCoalescer, spec: ModelSpec, items: Sequence[Item], options: SubmitOptions
    ) -> dict[int, CachedAnswer]:
        """The answers of the shared cache, by the place of the item."""
        if not await self._knows_active(lookups.answers, spec, options):
            return {}
        asked = lookups.answers.ask_all(self._builder, spec, items, options)
        found = zip(asked, await lookups.find_all(list(asked.values())), strict=True)
        return {place: answer for place, answer in found if answer is not None}

    async def _knows_active(self, cached: CachedAnswers, spec: ModelSpec, options: SubmitOptions) -> bool:
        """Whether jobs with these options are looked up. Reads the active version, if that is due."""
        if not cached.takes(spec, options):
            return False
        if cached.is_due(spec.name):
            now = cached.now()
            cached.note(spec.name, (await self._broker.actives([spec.name]))[spec.name], now)
        return True

    async def _map(self, model: str, options: SubmitOptions, order: MapOrder) -> list[Any]:
        spec = await self._spec(model, options.version)
        with self._map_run(spec, options, order) as run:
            try:
                while not run.is_over:
                    if chunk := run.next_items():
                        run.submitted(await self._submit_many(model, chunk, options, **run.places))
                    for handle in run.due():
                        try:
                            await handle._await_end(None)
                        except JobLost as lost:
                            run.lose(lost)
                        else:
                            run.complete(handle._state)
            finally:
                # The error that ended the map is raised, not an error of this cleaning up.
                for handle in run.unfinished():
                    try:
                        await handle.cancel()
                    except BrokerUnavailable:
                        # Each further call would wait for the broker, too.
                        break
                    except PenstockError:
                        continue
        return run.results

    def as_completed(
        self, jobs: Iterable[AsyncJobHandle], timeout: float | None = None
    ) -> AsyncIterator[AsyncJobHandle]:
        """The handles in the order in which their jobs end. Arguments and errors are those of Client.as_completed."""
        return self._ends(Awaited(self, jobs, timeout))

    @overload
    async def gather(
        self, jobs: Iterable[AsyncJobHandle], *, return_exceptions: Literal[False] = False, timeout: float | None = None
    ) -> list[dict[str, Array]]: ...

    @overload
    async def gather(
        self, jobs: Iterable[AsyncJobHandle], *, return_exceptions: bool, timeout: float | None = None
    ) -> list[Gathered]: ...

    async def gather(
        self, jobs: Iterable[AsyncJobHandle], *, return_exceptions: bool = False, timeout: float | None = None
    ) -> list[Any]:
        """The outputs of all jobs, in the order of the handles. See Client.gather."""
        handles = listed(jobs)
        gathered: dict[str, Gathered] = {}
        async for job in self.as_completed(handles, timeout):
            try:
                gathered[job.id] = await job.result()
            except ENDS as error:
                if not return_exceptions:
                    raise
                gathered[job.id] = error
        return [gathered[job.id] for job in handles]

    async def _ends(self, awaited: Awaited[AsyncJobHandle]) -> AsyncIterator[AsyncJobHandle]:
        for handle in awaited.take_known():
            yield handle
        if not awaited:
            return
        self._enter_loop()
        reader, ended, now = self._reader, AsyncEndedJobs(), asyncio.get_running_loop().time
        others = deque(each.id for each in awaited.handles() if not each._state.awaits_reply)
        try:
            for each in awaited.handles():
                if each._state.awaits_reply:
                    ended.expect(each.id, reader.reply_to(each._state))
            for handle in await self._read_ends(awaited, list(others)):
                yield handle
            while awaited:
                for handle in await self._follow(awaited, ended, others):
                    yield handle
                await self._tell(ended.follower)
                left = awaited.until(now()) - now()
                if left <= 0:
                    for handle in await self._read_ends(awaited, awaited.ids):
                        yield handle
                    if awaited:
                        raise awaited.late()
                elif await ended.wait(min(left, SILENCE_S, awaited.seconds_left(time.monotonic()))):
                    for job_id in ended.take():
                        if ended.unfollow(job_id):
                            reader.unsubscribe(job_id, ended)
                        for handle in awaited.take(job_id):
                            yield handle
                elif not awaited.seconds_left(time.monotonic()):
                    late = awaited.overdue(time.monotonic())
                    records = await asyncio.gather(*(handle._look() for handle in late))
                    for handle in awaited.settle(zip([each.id for each in late], records, strict=True)):
                        yield handle
                else:
                    for handle in await self._read_ends(awaited, awaited.sample(RECORDS_AT_ONCE)):
                        yield handle
        finally:
            ended.stop()
            for job_id in ended.followed:
                reader.unsubscribe(job_id, ended)
            self._untell(ended.follower)

    async def _follow(
        self, awaited: Awaited[AsyncJobHandle], ended: AsyncEndedJobs, others: deque[str]
    ) -> list[AsyncJobHandle]:
        """Reads the event streams of jobs without a reply; returns the handles of those that have ended meanwhile."""
        begun: list[str] = []
        while others and len(ended.followed) < MOST_FOLLOWED:
            job_id = others.popleft()
            if job_id in awaited:
                ended.follow(job_id)
                self._reader.attach(job_id, 0, ended)
                begun.append(job_id)
        records = await asyncio.gather(*(self._broker.job_record(job_id, subscribe=True) for job_id in begun))
        found = awaited.settle(zip(begun, records, strict=True))
        for handle in found:
            if ended.unfollow(handle.id):
                self._reader.unsubscribe(handle.id, ended)
        return found

    async def _tell(self, follower: Follower) -> None:
        """Tells the broker which jobs of other processes this client waits for."""
        now = time.monotonic()
        if due := follower.due(now):
            await self._broker.follow(due, follower.id, FOLLOW_TTL_MS)
            follower.told(due, now)

    def _untell(self, follower: Follower) -> None:
        """Tells the broker that this client waits no longer."""
        with suppress(ClientUnusable):
            if told := follower.take_told():
                self._broker.unfollow(told, follower.id)

    async def _read_ends(self, awaited: Awaited[AsyncJobHandle], job_ids: Sequence[str]) -> list[AsyncJobHandle]:
        found: list[AsyncJobHandle] = []
        for start in range(0, len(job_ids), RECORDS_AT_ONCE):
            part = job_ids[start : start + RECORDS_AT_ONCE]
            found += awaited.settle(zip(part, await self._broker.job_records(part), strict=True))
        return found

    async def report_quality(self, job: str | AsyncJobHandle, quality: float) -> bool:
        """The same as `await client.job(job).rate(quality)`: for the id of an ended job, in any process."""
        return await self.job(job).rate(quality)

    async def aclose(self) -> None:
        """Closes the connections. Submitted jobs go on. A later call that needs the broker raises ClientUnusable."""
        if self._is_closed:
            return
        self._enter_loop()
        self._is_closed = True
        for coalescer in self._coalescers.values():
            await coalescer.told()
        if self._withdrawals:
            await asyncio.wait(self._withdrawals)
        broker, reader = self._broker, self._reader
        self._broker = self._reader = CLOSED
        await reader.aclose()
        await broker.aclose()
        if self._lookups is not None:
            self._lookups.close()
        if self._cached is not None:
            self._cached.close()

    async def __aenter__(self) -> AsyncClient:
        self._check_open()
        try:
            await self._started()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _started(self) -> None:
        if self._start is not None:
            await self._start.wait_async()
            self._start = None

    async def _spec(self, model: str, version: str | None) -> ModelSpec:
        self._enter_loop()
        await self._started()
        return await self._specs.get_async(model, version, self._read_spec)

    async def _read_spec(self, model: str, version: str) -> bytes | None:
        if version:
            return await self._broker.spec(model, version)
        return self._spec_of(await self._broker.announced(model))

    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        self._broker = AsyncRedisStreams.from_url(url, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)
        self._start_reading()

    def _await_start(self, start: StackStart) -> None:
        # A wait here would hold up the caller's event loop: see `_started`.
        self._start = start

    def _leave_parent(self) -> None:
        self._broker.forget_connections()
        self._reader.abandon()
        self._start_reading()
        self._loop = None

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        """Makes the running loop that of this client, and returns it."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._change_loop(loop)
        return loop

    def _change_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._check_open()
        if self._loop is not None:
            if not self._loop.is_closed():
                raise ClientUnusable(
                    "This client serves another event loop, which is still open. Expected one client for each loop"
                )
            self._broker.abandon_connections()
            self._reader.abandon()
            self._start_reading()
        self._loop = loop

    def _start_reading(self) -> None:
        self._reader = AsyncReplyReader(self._broker)
        self._coalescers: dict[str, SubmitCoalescer] = {}
        self._withdrawals: set[asyncio.Task[None]] = set()
        """The jobs that are being cancelled, because their submitters were."""
        if self._lookups is not None:
            # A call of a loop that was closed would never end it.
            self._lookups.close()
        self._lookups = _lookups(self._cached)

    def _handle(self, state: JobState) -> AsyncJobHandle:
        # For each submit: a list and its only element would take longer.
        return AsyncJobHandle(self, state)

    def _handles(self, states: Iterable[JobState]) -> list[AsyncJobHandle]:
        return [AsyncJobHandle(self, state) for state in states]


async def _cancel_quietly(handle: AsyncJobHandle) -> None:
    # The job ends by its lifetime, if the broker is away.
    with suppress(PenstockError):
        await handle.cancel()


def _lookups(cached: CachedAnswers | None) -> LookupCoalescer | None:
    if cached is None:
        return None
    from penstock.producers.async_cached_answers import LookupCoalescer

    return LookupCoalescer(cached)


class AsyncJobHandle(HandleCore):
    """One job: `id`, `tenant`, and how it ends. The calls are those of JobHandle, awaited."""

    __slots__ = ()
    _client: AsyncClient

    async def status(self) -> JobStatus:
        """queued, running, completed, failed, cancelled, expired or dead. Errors are those of JobHandle.status."""
        return self._state.status(self._state.record or await self._read_record())

    async def result(self, timeout: float | None = None) -> dict[str, Array]:
        """The outputs by name, once the job has ended. Arguments and errors are those of JobHandle.result."""
        timeout, state = checked_timeout(timeout), self._state
        if state.record is None:
            self._client._enter_loop()
            until, is_due = inf if timeout is None else time.monotonic() + timeout, False
            if state.awaits_reply:
                # Here: a job whose reply comes in time needs no second coroutine.
                try:
                    await self._reply(until)
                except TimeoutError:
                    is_due = True
            if state.record is None:
                await self._find_end(until, timeout, is_due=is_due)
        return state.outputs()

    async def info(self, timeout: float | None = None) -> JobInfo:
        """The status, version, worker, batch and timings of the job, once it has ended in any way."""
        await self._await_end(timeout)
        return self._state.opened().info()

    async def stream(self, after: int = 0, timeout: float | None = None) -> AsyncIterator[JobEvent]:
        """The job's events after sequence number `after`, as they happen. Arguments and errors: see JobHandle.stream.

        A failed job does not raise: its failure is the last event.
        """
        self._client._enter_loop()
        if (outcome := self._state.outcome) is not None and not self._state.was_queued:
            for event in unqueued_events(outcome, after):
                yield event
            return
        reader, silence = self._client._reader, Silence(timeout)
        merger = EventMerger(self.id, self.tenant, self._client._builder.keyring, after)
        subscription = reader.subscribe(self.id, after)
        # The submitter of a job cancels it itself.
        follower = Follower(() if self._state.awaits_reply else (self.id,))
        quiet_s = SILENCE_S
        try:
            while not merger.is_over:
                record = await self._read_record(subscribe=True)
                if record.state is State.QUEUED:
                    await self._client._tell(follower)
                found = merger.entries(await reader.read_now(self.id, merger.last))
                for event in chain(found, merger.record(record)):
                    yield event
                    silence.broken()
                while not (merger.is_over or merger.awaits_record or follower.is_due(time.monotonic())):
                    left = silence.left(time.monotonic(), merger.last)
                    entries = await subscription.next(self._state.seconds_left(min(left, quiet_s)))
                    if not entries:
                        # Thousands of idle subscribers must not read their records each second.
                        quiet_s = min(2 * quiet_s, _LONGEST_SILENCE_S)
                        break
                    quiet_s = SILENCE_S
                    for event in merger.entries(entries):
                        yield event
                        silence.broken()
            follower.drop(self.id)
        finally:
            reader.unsubscribe(self.id, subscription)
            self._client._untell(follower)

    async def cancel(self) -> CancelStatus:
        """Cancels the job as far as that is possible, and returns what it did. See JobHandle.cancel."""
        self._client._enter_loop()
        broker, state = self._client._broker, self._state
        if not state.was_queued:
            return "too_late"
        sealed = cancellation(state.id, state.tenant, self._client._builder.keyring)
        return state.cancelled(await broker.cancel(state.id, state.tenant, sealed))

    async def rate(self, quality: float, timeout: float | None = None) -> bool:
        """Reports the quality of the answer to a running A/B experiment or rollout. See JobHandle.rate."""
        await self._await_end(timeout)
        state = self._state
        arm = state.arm(quality)
        if arm is None:
            return False
        self._client._enter_loop()
        broker = self._client._broker
        return state.rated(await broker.rate(state.id, arm.experiment, arm.version, quality))

    async def _read_record(self, *, subscribe: bool = False) -> JobRecord:
        return self._state.accept(await self._look(subscribe=subscribe))

    async def _look(self, *, subscribe: bool = False) -> JobRecord | None:
        """The record as it is now. A job whose time has passed, and that no worker holds, is ended."""
        self._client._enter_loop()
        broker, state = self._client._broker, self._state
        record = await broker.job_record(state.id, subscribe=subscribe)
        if record is not None and state.is_overdue(record):
            sealed = expiry(state.id, state.tenant, self._client._builder.keyring)
            is_ended = await broker.expire(state.id, state.tenant, sealed)
            record = JobRecord(State.EXPIRED, "", sealed) if is_ended else await broker.job_record(state.id)
        return record

    async def _await_end(self, timeout: float | None) -> None:
        timeout = checked_timeout(timeout)
        if self._state.record is None:
            self._client._enter_loop()
            await self._find_end(inf if timeout is None else time.monotonic() + timeout, timeout, is_due=False)

    def _reply(self, until: float) -> asyncio.Future[None]:
        """Done when the reply has come. TimeoutError at `until`, and when the record must be looked at.

        until: on the loop's clock, which is that of time.monotonic().
        """
        if (look_at := self._state.look_at) < until:
            # On a grid: each distinct time costs the reader a look at all waiting jobs.
            until = min(until, ceil(max(look_at, time.monotonic()) * _LOOKS_PER_S) / _LOOKS_PER_S)
        return self._client._reader.reply_to(self._state, until)

    async def _find_end(self, until: float, timeout: float | None, *, is_due: bool) -> None:
        """Waits for the end, and looks at the record where no reply has told it.

        is_due: whether `_reply` has raised TimeoutError.
        """
        state = self._state
        try:
            while state.awaits_reply and state.record is None:
                if is_due:
                    if until <= time.monotonic():
                        raise TimeoutError
                    await self._read_record()
                is_due = False
                if state.record is None:
                    try:
                        await self._reply(until)
                    except TimeoutError:
                        is_due = True
            if state.record is None:
                async with asyncio.timeout_at(None if until == inf else until):
                    await self._follow()
        except TimeoutError:
            # The time is up, and the record decides.
            await self._read_record()
            if state.record is None:
                raise result_timeout(timeout) from None

    async def _follow(self) -> None:
        """Waits for the end in the job's event stream: no reply comes to this client."""
        await self._read_record()
        if self._state.record is None:
            async for _ in self.stream():
                pass
            await self._read_record()
