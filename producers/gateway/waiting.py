"""One job behind every protocol: submit, wait for its end within bounds, cancel it when nobody waits any more.

    JobRequest -> submit -> handle -> end -> Finished: outputs and JobInfo
                                     `-> the client has gone, or the time is up: cancelled unless it has a key

Too many requests that wait in this process are refused before their jobs are submitted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.events import JobEvent
from penstock.producers.gateway.drain_rate import Queues
from penstock.producers.gateway.exchange import ClientGone
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.job_state import JobInfo
from penstock.registry.admission import SubmitOptions
from penstock.registry.envelope import Retry
from penstock.registry.errors import PenstockError, QueueFull, ResultTimeout
from penstock.registry.queues import PriorityName
from penstock.registry.tensors import Array

__all__ = ["Finished", "JobRequest", "Jobs", "Requester", "check_late", "job_headers"]

_FULL_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 60
_WEIGHT: Final = 0.2
"""Of the newest job in the mean duration of a model's jobs."""


class Requester(Protocol):
    """The request that a job is for, in any protocol. about: headers of the job, for its answer."""

    about: list[tuple[bytes, bytes]]

    def watch(self) -> AbstractContextManager[None]:
        """Inside of the block the end of the client ends the task's wait: ClientGone, or CancelledError."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as any protocol asks for it. The fields are the arguments of AsyncClient.submit.

    prompt_tokens: of the inputs, for the usage of the API key; 0 where the model's result tells them, or nobody.
    """

    model: str
    inputs: Mapping[str, object]
    version: str | None = None
    outputs: tuple[str, ...] = ()
    priority: PriorityName = "normal"
    deadline_s: float | None = None
    idempotency_key: str | None = None
    traceparent: str = ""
    retry: Retry | None = None
    webhook: str | None = None
    sticky_key: str | None = None
    endpoint: str | None = None
    prompt_tokens: int = 0


class Finished(NamedTuple):
    """An ended job that has outputs."""

    job_id: str
    outputs: dict[str, Array]
    info: JobInfo


@dataclass(slots=True)
class Jobs:
    """The jobs of one process. max_waiting: requests that wait for a job at a time. wait_s: how long they wait.

    on_change: called when `waiting` has changed.
    """

    client: GatewayClient
    max_waiting: int
    wait_s: float
    on_change: Callable[[], None]
    waiting: int = 0
    _waiters: dict[str, int] = field(default_factory=dict)
    """How many requests of this process wait for a job, by its id."""
    _durations_s: dict[str, float] = field(default_factory=dict)
    """The mean time from submit to end, by model."""
    _cancelling: set[asyncio.Task[Any]] = field(default_factory=set)
    _queues: Queues = field(init=False)

    def __post_init__(self) -> None:
        self._queues = Queues(self.client.backlog)

    async def run(self, request: JobRequest, exchange: Requester) -> Finished:
        """Submits a job and waits for its outputs. Raises as `AsyncJobHandle.result`, and QueueFull without a place.

        A job without an idempotency key is cancelled when its client has gone, and when the time is up.
        """
        with self.place():
            handle = await self.submit(request, exchange)
            try:
                info = await self._await_end(handle, self.wait_s + (request.deadline_s or 0), exchange)
            except (ClientGone, asyncio.CancelledError, TimeoutError) as error:
                if request.idempotency_key is None:
                    self.abandon(handle)
                    check_late(error)
                raise
        return Finished(handle.id, await handle.result(), info)

    async def submit(self, request: JobRequest, exchange: Requester) -> AsyncJobHandle:
        """Publishes a job. Raises as AsyncClient.submit does."""
        options = SubmitOptions(
            priority=request.priority,
            deadline_s=request.deadline_s,
            version=request.version,
            outputs=request.outputs,
            traceparent=request.traceparent,
            retry=request.retry,
            webhook=request.webhook,
            sticky_key=request.sticky_key,
            endpoint=request.endpoint,
            prompt_tokens=(request.prompt_tokens,) if request.prompt_tokens else (),
        )
        handle = await self.client.submit_one(request.model, request.inputs, options, request.idempotency_key)
        exchange.about = job_headers(handle.id)
        return handle

    @asynccontextmanager
    async def following(self, request: JobRequest, exchange: Requester) -> AsyncIterator[AsyncJobHandle]:
        """Submits a job, and counts as a request that waits for it inside of the block.

        A job without an idempotency key is cancelled when its client has gone, and when the time is up.
        """
        with self.place():
            handle = await self.submit(request, exchange)
            try:
                with self.waiter(handle.id):
                    yield handle
            except (ClientGone, asyncio.CancelledError, OSError) as error:
                # OSError: also TimeoutError, and what servers raise at a write to a client that has gone.
                if request.idempotency_key is None:
                    self.abandon(handle)
                    check_late(error)
                raise

    async def submit_and_wait(self, request: JobRequest, wait_s: float, exchange: Requester) -> AsyncJobHandle:
        """Submits a job, and waits for its end no longer than that. Then the job goes on.

        A job without an idempotency key is cancelled when its client has gone: nobody knows its id.
        """
        with self.place():
            handle = await self.submit(request, exchange)
            try:
                with suppress(TimeoutError):
                    await self._await_end(handle, wait_s, exchange)
            except (ClientGone, asyncio.CancelledError):
                if request.idempotency_key is None:
                    self.abandon(handle)
                raise
        return handle

    async def stream(self, request: JobRequest, exchange: Requester) -> AsyncGenerator[JobEvent, None]:
        """Submits a job, and yields its events. Close it: a job that has not ended is cancelled then.

        Raises ResultTimeout after a silence as long as a request waits.
        """
        with self.place():
            handle = await self.submit(request, exchange)
            is_over = False
            try:
                async for event in handle.stream(timeout=self.wait_s):
                    is_over = event.is_terminal
                    yield event
            except ResultTimeout as late:
                if request.idempotency_key is None:
                    check_late(late)
                raise
            finally:
                if not is_over and request.idempotency_key is None:
                    self.abandon(handle)

    async def wait(self, handle: AsyncJobHandle, wait_s: float, exchange: Requester) -> None:
        """Waits for the end of any job, no longer than that. The job goes on then, also when the client goes."""
        with self.place(), suppress(TimeoutError):
            await self._await_end(handle, wait_s, exchange)

    async def retry_after_s(self, model: str) -> int:
        """After how many seconds a job that was submitted now has probably ended.

        While other jobs wait, by the rate at which the queue drains; else as earlier jobs of the model took.
        """
        wait_s = await self._queues.wait_s(model)
        if wait_s is None:
            wait_s = self._durations_s.get(model, 1.0)
        return max(1, math.ceil(min(_LONGEST_RETRY_S, wait_s)))

    async def aclose(self) -> None:
        """Waits for the jobs that are being cancelled."""
        if self._cancelling:
            await asyncio.wait(self._cancelling)

    def place(self) -> AbstractContextManager[None]:
        """Inside of the block a request has one of the places of those that wait. Raises QueueFull without one."""
        return _Place(self)

    async def _await_end(self, handle: AsyncJobHandle, wait_s: float, exchange: Requester) -> JobInfo:
        """How the job ended. Raises ClientGone and TimeoutError."""
        now = asyncio.get_running_loop().time
        begun = now()
        with self.waiter(handle.id), exchange.watch():
            info = await handle.info(wait_s)
        self._note_duration(handle.model, now() - begun)
        exchange.about = job_headers(handle.id, info)
        return info

    def waiter(self, job_id: str) -> AbstractContextManager[None]:
        """Inside of the block a request waits for the job: the end of another one does not cancel it."""
        return _Waiter(self._waiters, job_id)

    def abandon(self, handle: AsyncJobHandle) -> None:
        """Cancels a job whose request has ended, unless another request of any process waits for it."""
        if handle.id in self._waiters:
            return
        task = asyncio.get_running_loop().create_task(_abandon(self.client, handle))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    def _note_duration(self, model: str, duration_s: float) -> None:
        mean = self._durations_s.get(model, duration_s)
        self._durations_s[model] = mean + _WEIGHT * (duration_s - mean)


class _Place:
    """See Jobs.place. A class: each request enters it, and a generator takes three times as long."""

    __slots__ = ("_jobs",)

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def __enter__(self) -> None:
        jobs = self._jobs
        if jobs.waiting >= jobs.max_waiting:
            raise QueueFull(
                f"{jobs.max_waiting} requests wait in this process. Expected a retry after {_FULL_RETRY_S:g} s",
                _FULL_RETRY_S,
            )
        jobs.waiting += 1
        jobs.on_change()

    def __exit__(self, *_: object) -> None:
        self._jobs.waiting -= 1
        self._jobs.on_change()


class _Waiter:
    """See Jobs.waiter."""

    __slots__ = ("_job_id", "_waiters")

    def __init__(self, waiters: dict[str, int], job_id: str) -> None:
        self._waiters = waiters
        self._job_id = job_id

    def __enter__(self) -> None:
        self._waiters[self._job_id] = self._waiters.get(self._job_id, 0) + 1

    def __exit__(self, *_: object) -> None:
        if (left := self._waiters.pop(self._job_id) - 1) > 0:
            self._waiters[self._job_id] = left


def check_late(error: BaseException) -> None:
    """Raises the ResultTimeout of a request that takes its job with it: the client's own one says that it goes on."""
    if isinstance(error, ResultTimeout):
        begin, _, _ = str(error).partition(";")
        raise ResultTimeout(
            f"{begin}; the job is cancelled, unless another request waits for it. Expected a shorter job, or an "
            "idempotency key, with which it goes on"
        ) from None


async def _abandon(client: GatewayClient, handle: AsyncJobHandle) -> None:
    # The job ends by its lifetime, if the broker is away.
    with suppress(PenstockError):
        await client.abandon(handle)


def job_headers(job_id: str, info: JobInfo | None = None) -> list[tuple[bytes, bytes]]:
    """The headers that every answer about a job has: its id; once it has ended, version, content hash and times."""
    headers = [(b"penstock-job-id", job_id.encode())]
    if info is None:
        return headers
    if info.version:
        headers.append((b"penstock-model-version", info.version.encode()))
    if info.content_hash:
        headers.append((b"penstock-content-hash", info.content_hash.encode()))
    times = b"queue;dur=%.3f, batch;dur=%.3f, compute;dur=%.3f" % (info.queue_ms, info.batch_ms, info.compute_ms)
    headers.append((b"server-timing", times))
    return headers
