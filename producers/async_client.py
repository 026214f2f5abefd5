"""The asyncio client: the same calls as the blocking client, awaited.

The submits of one turn of the event loop travel in one call. Those that come while that call is out travel in the next
one: the more tasks submit at a time, the fewer round trips a job costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any

import penstock.registry.settings  # noqa: F401 - now, because a running loop would stand still for it
from penstock.producers.async_replies import AsyncReplyReader, SubmitCoalescer
from penstock.producers.core import ClientCore, Inputs, Items
from penstock.producers.events import EventMerger, JobEvent
from penstock.producers.job_state import HandleCore, JobInfo, JobState, JobStatus, Outcome, result_timeout
from penstock.producers.replies import SILENCE_S
from penstock.producers.rows import MapOrder
from penstock.producers.submission import cancellation
from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.base import CancelOutcome, JobRecord
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.errors import BrokerUnavailable, PenstockError
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    from penstock.registry.settings import Settings
    from penstock.testing.model import Served

__all__ = ["AsyncClient", "AsyncJobHandle"]


class AsyncClient(
    ClientCore[
        "AsyncJobHandle",
        Coroutine[Any, Any, "AsyncJobHandle"],
        Coroutine[Any, Any, "list[AsyncJobHandle]"],
        Coroutine[Any, Any, list[Any]],
    ]
):
    """Submits jobs and reads their results in one event loop. Close it with `aclose` or `async with`.

    The arguments are those of Client.
    """

    _reader: AsyncReplyReader

    @classmethod
    def in_memory(
        cls, models: Mapping[str, Served], *, tenant: str | None = None, settings: Settings | None = None
    ) -> AsyncClient:
        """A client of a worker in this process, for tests; see Client.in_memory. Close it."""
        from penstock.testing.async_client import InMemoryAsyncClient

        return InMemoryAsyncClient(models, tenant=tenant, settings=settings)

    async def _submit(self, model: str, inputs: Inputs, options: SubmitOptions, key: str | None) -> AsyncJobHandle:
        spec = (None if options.version else self._specs.fresh(model)) or await self._spec(model, options.version)
        job, handle = self._new_job(spec, inputs, options, key)
        coalescer = self._coalescers.get(model)
        if coalescer is None:
            coalescer = self._coalescers[model] = SubmitCoalescer(model, self._broker, self._limits)
        return self._accepted(handle, await coalescer.send(job), model)

    async def _submit_many(
        self, model: str, items: Items, options: SubmitOptions, *, first_index: int = 0, timeout_s: float | None = None
    ) -> list[AsyncJobHandle]:
        spec = await self._spec(model, options.version)
        with self._submit_run(spec, items, options, first_index, timeout_s) as run:
            while chunk := run.next_chunk():
                receipts = await self._broker.publish(model, chunk, self._limits)
                if pause_s := run.settle(receipts, time.monotonic()):
                    await asyncio.sleep(pause_s)
        return run.handles

    async def _map(self, model: str, options: SubmitOptions, order: MapOrder) -> list[Any]:
        spec = await self._spec(model, options.version)
        with self._map_run(spec, options, order) as run:
            try:
                while not run.is_over:
                    if chunk := run.next_items():
                        run.submitted(await self._submit_many(model, chunk, options, first_index=run.count))
                    for handle in run.due():
                        run.complete(await handle._ended(None))
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

    async def aclose(self) -> None:
        """Closes the connections. Submitted jobs go on."""
        await self._reader.aclose()
        await self._broker.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _spec(self, model: str, version: str | None) -> ModelSpec:
        return await self._specs.get_async(model, version, self._broker.spec)

    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        self._broker = AsyncRedisStreams.from_url(url, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)
        self._start_reading()

    def _leave_parent(self) -> None:
        self._broker.forget_connections()
        self._start_reading()

    def _start_reading(self) -> None:
        self._reader = AsyncReplyReader(self._broker)
        self._coalescers: dict[str, SubmitCoalescer] = {}

    def _handle(self, state: JobState) -> AsyncJobHandle:
        return AsyncJobHandle(self, state)


class AsyncJobHandle(HandleCore):
    """One job: `id`, `tenant`, and how it ends. The calls are those of JobHandle, awaited."""

    __slots__ = ()
    _client: AsyncClient

    async def status(self) -> JobStatus:
        """queued, running, completed, failed, cancelled, expired or dead. Errors are those of JobHandle.status."""
        return self._state.status(self._state.record or await self._read_record())

    async def result(self, timeout: float | None = None) -> dict[str, Array]:
        """The outputs by name, once the job has ended. Arguments and errors are those of JobHandle.result."""
        return (await self._ended(timeout)).outputs()

    async def info(self, timeout: float | None = None) -> JobInfo:
        """The status, version, worker, batch and timings of the job, once it has ended in any way."""
        return (await self._ended(timeout)).info()

    async def stream(self, after: int = 0) -> AsyncIterator[JobEvent]:
        """The job's events after sequence number `after`, as they happen. The terminal event is the last one.

        A failed job does not raise: its failure is the last event.
        """
        reader = self._client._reader
        merger = EventMerger(self.id, self._client._builder.keyring, after)
        subscription = reader.subscribe(self.id, after)
        try:
            while not merger.is_over:
                record = await self._read_record(subscribe=True)
                found = merger.entries(await reader.read_now(self.id, merger.last))
                for event in (*found, *merger.record(record)):
                    yield event
                while not (merger.is_over or merger.awaits_record):
                    entries = await subscription.next(SILENCE_S)
                    if not entries:
                        break
                    for event in merger.entries(entries):
                        yield event
        finally:
            reader.unsubscribe(self.id, subscription)

    async def cancel(self) -> bool:
        """Whether the job will never run. False for a running job: it is asked to stop, but may still end."""
        broker, state = self._client._broker, self._state
        sealed = cancellation(state.id, state.tenant, self._client._builder.keyring)
        outcome = await broker.cancel(state.id, state.tenant, sealed)
        if outcome is CancelOutcome.SETTLED and state.record is None:
            await self._read_record()
        return state.cancelled(outcome)

    async def _read_record(self, *, subscribe: bool = False) -> JobRecord:
        return self._state.accept(await self._client._broker.job_record(self.id, subscribe=subscribe))

    async def _ended(self, timeout: float | None) -> Outcome:
        state = self._state
        if state.record is None:
            until = inf if timeout is None else asyncio.get_running_loop().time() + timeout
            try:
                if state.awaits_reply:
                    await self._client._reader.reply_to(state, until)
                if state.record is None:
                    async with asyncio.timeout_at(None if until == inf else until):
                        await self._follow()
            except TimeoutError:
                # The time is up, and the record decides.
                await self._read_record()
                if state.record is None:
                    raise result_timeout(timeout) from None
        return state.opened()

    async def _follow(self) -> None:
        """Waits for the end in the job's event stream: no reply comes to this client."""
        await self._read_record()
        if self._state.record is None:
            async for _ in self.stream():
                pass
            await self._read_record()
