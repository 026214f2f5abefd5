"""The asyncio client: what producers/client.py does, awaited.

Submits of one turn of the event loop travel in one call, and those that come while that call is out in the next:
the more callers there are, the fewer round trips each costs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from penstock.producers.async_replies import AsyncInbox, Outbox
from penstock.producers.connection import (
    LONGEST_PAUSE_S,
    client_settings,
)
from penstock.producers.publish import accepted, cancellation, parcels
from penstock.producers.replies import SILENCE_S, EventMerger, JobEvent, JobInfo, Outcome, missing, open_outcome
from penstock.producers.rows import RowShape, Tracker
from penstock.registry import stack_file
from penstock.registry.admission import JobBuilder, SpecCache, limits_of
from penstock.registry.broker.base import CancelOutcome, JobRecord, Publication, Receipt, State
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.envelope import Retry
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    JobFailed,
    PenstockError,
    QueueFull,
    ResultTimeout,
)
from penstock.registry.package import ModelSpec
from penstock.registry.queues import slot_of
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array

__all__ = ["AsyncClient", "AsyncJobHandle"]

logger = logging.getLogger("penstock.client")

Inputs = Mapping[str, object]
_MAP_WINDOW = 512


class AsyncClient:
    """Submits jobs and reads their results, for one event loop. Arguments as for Client; end it with `aclose`."""

    def __init__(
        self,
        url: str,
        *,
        tenant: str | None = None,
        signing_keys: str | None = None,
        timeout_s: float = 5.0,
        models_root: str | Path | None = None,
        settings: Settings | None = None,
    ) -> None:
        settings = client_settings(settings, tenant=tenant, signing_keys=signing_keys, models_root=models_root)
        queue = settings.inference.queue
        self.tenant = settings.tenant_id
        self._result_ttl_s = queue.result_ttl_s
        self._limits = limits_of(queue)
        self._builder = JobBuilder.of(settings)
        self._specs = SpecCache(settings.inference.repo_root)
        self._broker = AsyncRedisStreams.from_url(
            url, timeout_s=timeout_s, result_ttl_ms=int(queue.result_ttl_s * 1000)
        )
        self._inbox = AsyncInbox(self._broker)
        self._outboxes: dict[str, Outbox] = {}
        _clients.add(self)

    @classmethod
    def from_env(cls, *, timeout_s: float = 5.0, settings: Settings | None = None) -> AsyncClient:
        """The broker that the settings name; without one, the embedded stack that runs on this home."""
        settings = stack_file.with_broker(settings or Settings.load())
        return cls(settings.redis_url or "", timeout_s=timeout_s, settings=settings)

    async def submit(
        self,
        model: str,
        inputs: Inputs,
        *,
        priority: str = "normal",
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
    ) -> AsyncJobHandle:
        """Publishes one job; see Client.submit."""
        publication = self._builder.publication(
            (None if version else self._specs.fresh(model)) or await self._spec(model, version),
            inputs,
            priority=priority,
            deadline_s=deadline_s,
            idempotency_key=idempotency_key,
            tenant=tenant,
            version=version,
            outputs=outputs,
            traceparent=traceparent,
            retry=retry,
            reply=self._inbox.address(model),
        )
        handle = self._handle(publication)
        outbox = self._outboxes.get(model)
        if outbox is None:
            outbox = self._outboxes[model] = Outbox(model, self._broker, self._limits)
        receipt = await outbox.send(publication)
        return self._answered(handle, receipt, model)

    async def submit_many(
        self,
        model: str,
        batches: Iterable[Inputs],
        *,
        priority: str = "normal",
        deadline_s: float | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
        timeout_s: float | None = None,
    ) -> list[AsyncJobHandle]:
        """Publishes one job per item and waits for room; see Client.submit_many."""
        spec, reply = await self._spec(model, version), self._inbox.address(model)
        publications = [
            self._builder.publication(
                spec,
                inputs,
                priority=priority,
                deadline_s=deadline_s,
                tenant=tenant,
                version=version,
                outputs=outputs,
                traceparent=traceparent,
                retry=retry,
                reply=reply,
            )
            for inputs in batches
        ]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        handles: list[AsyncJobHandle] = []
        for parcel in parcels(publications):
            waiting = [(job, self._handle(job)) for job in parcel]
            while waiting:
                try:
                    receipts = await self._broker.publish(model, [job for job, _ in waiting], self._limits)
                except BrokerUnavailable as error:
                    error.accepted, error.in_doubt = handles, [handle for _, handle in waiting]
                    raise
                refused = []
                for pair, receipt in zip(waiting, receipts, strict=True):
                    if receipt.outcome == "accepted":
                        handles.append(pair[1])
                    else:
                        refused.append((pair, receipt))
                waiting = [pair for pair, _ in refused]
                if refused:
                    await _room([receipt for _, receipt in refused], model, deadline, handles)
        return handles

    async def map(
        self,
        model: str,
        items: Iterable[Any],
        *,
        priority: str = "normal",
        progress: bool | Callable[[int], None] = False,
        on_error: Literal["raise", "return"] = "raise",
        window: int = _MAP_WINDOW,
    ) -> list[Any]:
        """One job per item, results in the items' order; see Client.map."""
        if on_error not in ("raise", "return"):
            raise ConfigurationError(f"on_error is {on_error!r:.80}. Expected 'raise' or 'return'")
        shape = RowShape(await self._spec(model))
        results: list[Any] = []
        outstanding: deque[tuple[AsyncJobHandle, bool]] = deque()
        source, chunk = iter(items), max(1, window // 4)
        with Tracker(progress, items) as advance:
            try:
                while True:
                    taken = shape.take(source, chunk) if len(outstanding) <= window - chunk else []
                    if taken:
                        handles = await self.submit_many(
                            model, [shape.inputs(item) for item in taken], priority=priority
                        )
                        outstanding.extend(
                            (handle, isinstance(item, Mapping)) for handle, item in zip(handles, taken, strict=True)
                        )
                    elif not outstanding:
                        return results
                    else:
                        handle, is_whole = outstanding.popleft()
                        try:
                            outputs = await handle.result()
                            results.append(outputs if is_whole else shape.row(outputs))
                        except JobFailed as failure:
                            if on_error == "raise":
                                raise
                            results.append(failure)
                        advance(len(results))
            finally:
                for handle, _ in outstanding:
                    with suppress(PenstockError):
                        await handle.cancel()

    def job(self, job_id: str, *, tenant: str | None = None) -> AsyncJobHandle:
        """The handle of a job that anybody submitted, from its id; nothing is asked yet."""
        slot_of(job_id)
        return AsyncJobHandle(self, job_id, tenant or self.tenant, is_ours=False)

    async def aclose(self) -> None:
        """Gives the connections back; jobs go on."""
        await self._inbox.aclose()
        await self._broker.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _spec(self, model: str, version: str | None = None) -> ModelSpec:
        spec = self._specs.fresh(model) or self._specs.store(model, await self._broker.spec(model))
        if not version or version == spec.version:
            return spec
        return self._specs.fresh(model, version) or self._specs.store(
            model, await self._broker.spec(model, version), version
        )

    def _handle(self, publication: Publication) -> AsyncJobHandle:
        handle = AsyncJobHandle(self, publication.job_id, publication.tenant, is_ours=True)
        self._inbox.expect(publication.job_id, handle)
        return handle

    def _answered(self, handle: AsyncJobHandle, receipt: Receipt, model: str) -> AsyncJobHandle:
        job_id = accepted(receipt, model)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("job submitted", extra={"job_id": job_id, "model": model})
        return handle if job_id == handle.id else AsyncJobHandle(self, job_id, handle.tenant, is_ours=False)


def _start_over() -> None:
    """In a forked child: other reply streams than the parent's, and other connections."""
    for client in list(_clients):
        client._broker.forget_connections()
        client._inbox = AsyncInbox(client._broker)
        client._outboxes = {}


_clients: weakref.WeakSet[AsyncClient] = weakref.WeakSet()
os.register_at_fork(after_in_child=_start_over)


class AsyncJobHandle:
    """One job: `id`, and what became of it; see JobHandle."""

    __slots__ = (
        "__weakref__",
        "_client",
        "_is_known",
        "_job_record",
        "_outcome",
        "id",
        "is_ours",
        "tenant",
    )

    def __init__(self, client: AsyncClient, job_id: str, tenant: str, *, is_ours: bool) -> None:
        self.id = job_id
        self.tenant = tenant
        self._client = client
        self.is_ours = is_ours
        """Whether this client will be told on its reply stream, and has not been yet."""
        self._is_known = is_ours
        self._job_record: JobRecord | None = None
        self._outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"<AsyncJobHandle {self.id}>"

    def receive(self, job_record: JobRecord | None) -> None:
        """The reply has come; see Recipient."""
        self._job_record = job_record
        self.is_ours = False
        self._client._inbox.answered(self)

    async def status(self) -> str:
        """See JobHandle.status."""
        if self._job_record is None:
            job_record = await self._ask()
            if job_record.state is State.QUEUED:
                return "running" if job_record.is_claimed else "queued"
        return self._opened().state.name.lower()

    async def result(self, timeout: float | None = None) -> dict[str, Array]:
        """See JobHandle.result."""
        return (await self._ended(timeout)).outputs()

    async def info(self, timeout: float | None = None) -> JobInfo:
        """See JobHandle.info."""
        return (await self._ended(timeout)).info()

    async def stream(self, after: int = 0) -> AsyncIterator[JobEvent]:
        """See JobHandle.stream."""
        inbox = self._client._inbox
        merger = EventMerger(self.id, self._client._builder.keyring, after)
        subscription = inbox.subscribe(self.id, after)
        try:
            while not merger.is_over:
                job_record = await self._ask(subscribe=True)
                for event in (
                    *merger.entries(await inbox.read_now(self.id, merger.last)),
                    *merger.job_record(job_record),
                ):
                    yield event
                while not (merger.is_over or merger.awaits_record):
                    entries = await subscription.next(SILENCE_S)
                    if not entries:
                        break
                    for event in merger.entries(entries):
                        yield event
        finally:
            inbox.unsubscribe(self.id, subscription)

    async def cancel(self) -> bool:
        """See JobHandle.cancel."""
        sealed = cancellation(self.id, self.tenant, self._client._builder.keyring)
        outcome = await self._client._broker.cancel(self.id, self.tenant, sealed)
        if outcome is CancelOutcome.UNKNOWN:
            raise self._missing()
        if outcome is CancelOutcome.SETTLED:
            await self._ask()
            return self._opened().state is State.CANCELLED
        return outcome is CancelOutcome.CANCELLED

    async def _follow(self) -> None:
        """Asks the record; of somebody else's job, reads the stream to its end."""
        await self._ask()
        if self._job_record is None:
            async for _ in self.stream():
                pass
            await self._ask()

    async def _ask(self, *, subscribe: bool = False) -> JobRecord:
        job_record = await self._stand(subscribe=subscribe)
        if job_record.state is not State.QUEUED:
            self._outcome = self._open(job_record)
            self._job_record = job_record
        elif job_record.tenant != self.tenant:
            raise self._missing()
        self._is_known = True
        return job_record

    async def _stand(self, *, subscribe: bool) -> JobRecord:
        job_record = await self._client._broker.job_record(self.id, subscribe=subscribe)
        if job_record is None:
            raise self._missing()
        return job_record

    def _missing(self) -> Exception:
        return missing(self.id, is_known=self._is_known, result_ttl_s=self._client._result_ttl_s)

    async def _ended(self, timeout: float | None) -> Outcome:
        if self._job_record is None:
            until = inf if timeout is None else asyncio.get_running_loop().time() + timeout
            try:
                if self.is_ours:
                    await self._client._inbox.reply_to(self, until)
                if self._job_record is None:
                    async with asyncio.timeout_at(None if until == inf else until):
                        await self._follow()
            except TimeoutError:
                # Time is up; the record has the last word.
                await self._ask()
                if self._job_record is None:
                    raise ResultTimeout(f"No result within {timeout:g} s; the job goes on") from None
        return self._opened()

    def _opened(self) -> Outcome:
        if self._outcome is None:
            if self._job_record is None:
                raise self._missing()
            self._outcome = self._open(self._job_record)
        return self._outcome

    def _open(self, job_record: JobRecord) -> Outcome:
        outcome = open_outcome(self.id, job_record, self._client._builder.keyring)
        if outcome.header.context.tenant != self.tenant:
            raise self._missing()
        return outcome


async def _room(receipts: Sequence[Receipt], model: str, deadline: float | None, handles: list[AsyncJobHandle]) -> None:
    try:
        for receipt in receipts:
            accepted(receipt, model)
    except QueueFull as full:
        pause = min(full.retry_after_s, LONGEST_PAUSE_S)
        if deadline is not None and time.monotonic() + pause > deadline:
            full.accepted = handles
            raise
        await asyncio.sleep(pause)
