"""Jobs as resources: submit, look, wait, cancel, follow. A job's id is the same in every protocol.

POST   /v1/jobs               202 with Location and Retry-After; 200 with the job if it ends within Prefer: wait=N
POST   /v1/jobs:batch         202 with an id or a reason for each; all inputs are checked before a job is written
GET    /v1/jobs/{id}          the job as it is now, or after ?wait=N
DELETE /v1/jobs/{id}          cancels it as far as that is possible
GET    /v1/jobs/{id}/events   its events as they happen: event_stream.py
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.gateway.event_stream import EVENTS, EventStreams
from penstock.producers.gateway.exchange import JSON, Exchange, RequestRefused
from penstock.producers.gateway.problems import problem_of
from penstock.producers.gateway.request_headers import (
    HEAD_HEADER,
    KEY_HEADER,
    idempotency_key,
    preferred_wait_s,
    query_wait_s,
    wanted_type,
)
from penstock.producers.gateway.routing import Route
from penstock.producers.gateway.tensors import (
    BINARY,
    MSGPACK,
    TENSOR_TYPES,
    fields_of,
    read_document,
    read_inputs,
    write_outputs,
)
from penstock.producers.gateway.waiting import JobRequest, Jobs, job_headers
from penstock.producers.submission import with_keys
from penstock.registry.admission import SubmitOptions
from penstock.registry.codecs import Codec
from penstock.registry.envelope import Retry
from penstock.registry.errors import InvalidInput, PenstockError, QueueFull, Rejected, UnknownModel
from penstock.registry.queues import PriorityName

__all__ = ["JobFields", "JobRoutes"]

_MOST_ITEMS: Final = 10_000
_ENDED: Final = frozenset({"completed", "failed", "cancelled", "expired", "dead"})


class RetryFields(msgspec.Struct, forbid_unknown_fields=True):
    """How often, and after which pauses in seconds, a failed forward is repeated."""

    attempts: int = 3
    backoff_s: float = 0.5
    longest_s: float = 30.0


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a job beside its inputs."""

    model: str
    version: str | None = None
    outputs: list[str] = []
    priority: PriorityName = "normal"
    deadline_s: float | None = None
    retry: RetryFields | None = None
    webhook: str | None = None
    sticky_key: str | None = None
    endpoint: str | None = None


class JobFields(Options):
    """One job. inputs: a value for each input, as nested lists or {"dtype", "shape", "data" | "base64"}."""

    inputs: dict[str, Any]


class BatchFields(Options):
    """Jobs of one model. inputs: those of each job. idempotency_keys: one for each job, or null for none."""

    inputs: list[dict[str, Any]]
    idempotency_keys: list[str | None] | None = None


class JobView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A job as it is now. outputs: of a completed one. error: of one that ended otherwise."""

    id: str
    model: str
    status: Literal["queued", "running", "completed", "failed", "cancelled", "expired", "dead"]
    outputs: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class BatchedJob(msgspec.Struct, kw_only=True, omit_defaults=True):
    """accepted: with its id and its location. refused: with the reason; there is no job."""

    status: Literal["accepted", "refused"]
    id: str | None = None
    location: str | None = None
    error: dict[str, Any] | None = None


class BatchView(msgspec.Struct):
    """What became of each item, in the order of the inputs."""

    jobs: list[BatchedJob]


class Cancellation(msgspec.Struct):
    """cancelled: the job will never run. requested: it runs and is told to stop. too_late: it had ended."""

    id: str
    status: Literal["cancelled", "requested", "too_late"]


class JobRoutes:
    """The routes of jobs."""

    def __init__(self, jobs: Jobs, streams: EventStreams) -> None:
        self._jobs = jobs
        self._client = jobs.client
        self._streams = streams

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        headers = {
            "Prefer": "wait=N: answer with the job if it ends within N seconds",
            **KEY_HEADER,
            **HEAD_HEADER,
        }
        return [
            Route(
                *("POST", "/v1/jobs", self.submit, "Submit a job", JobFields, JobView, 202, headers),
                other_statuses=(200,),
                also_takes=TENSOR_TYPES,
                also_gives=TENSOR_TYPES,
            ),
            Route(
                *("POST", "/v1/jobs:batch", self.submit_many, "Submit jobs of one model"),
                *(BatchFields, BatchView, 202, KEY_HEADER),
                also_takes=(MSGPACK,),
            ),
            Route(
                *("GET", "/v1/jobs/{id}", self.show, "Show a job"),
                gives=JobView,
                parameters={"wait": "seconds to wait for its end, at most 300"},
                also_gives=TENSOR_TYPES,
            ),
            Route("DELETE", "/v1/jobs/{id}", self.cancel, "Cancel a job", gives=Cancellation),
            Route(
                *("GET", "/v1/jobs/{id}/events", self.follow, "Follow the events of a job"),
                parameters={
                    "Last-Event-ID": "the id of the last event that was seen",
                    "after": "the same, for clients that cannot set the header",
                },
                also_gives=(EVENTS,),
                other_statuses=(204,),
            ),
        ]

    async def submit(self, exchange: Exchange) -> None:
        """POST /v1/jobs."""
        wait_s, key = preferred_wait_s(exchange), idempotency_key(exchange)
        document = read_document(exchange, await exchange.body())
        fields = fields_of(document, JobFields)
        spec = await self._client.spec_of(fields.model, fields.version)
        request = JobRequest(
            model=fields.model,
            inputs=read_inputs(spec, document),
            version=fields.version,
            outputs=tuple(fields.outputs),
            priority=fields.priority,
            deadline_s=fields.deadline_s,
            idempotency_key=key,
            traceparent=exchange.header(b"traceparent"),
            retry=_retry(fields.retry),
            webhook=fields.webhook,
            sticky_key=fields.sticky_key,
            endpoint=fields.endpoint,
        )
        if wait_s:
            handle = await self._jobs.submit_and_wait(request, wait_s, exchange)
            await self._show(handle, exchange, pending_status=202, codec=spec.codecs.default)
        else:
            handle = await self._jobs.submit(request, exchange)
            await self._answer_pending(handle, "queued", exchange, 202)

    async def submit_many(self, exchange: Exchange) -> None:
        """POST /v1/jobs:batch."""
        if exchange.media_type.encode() == BINARY:
            raise RequestRefused(415, "Bytes behind a document are of one job. Expected application/json or /msgpack")
        document = read_document(exchange, await exchange.body())
        fields = fields_of(document, BatchFields)
        keys = _keys_of(fields, idempotency_key(exchange))
        if not 0 < len(fields.inputs) <= _MOST_ITEMS:
            raise InvalidInput(f"inputs has {len(fields.inputs)} entries. Expected 1 to {_MOST_ITEMS}")
        spec = await self._client.spec_of(fields.model, fields.version)
        items = [read_inputs(spec, document._replace(fields={"inputs": inputs})) for inputs in fields.inputs]
        # The request itself was charged as one.
        await exchange.entry.spend(requests=len(items) - 1)
        options = SubmitOptions(
            priority=fields.priority,
            deadline_s=fields.deadline_s,
            version=fields.version,
            outputs=fields.outputs,
            traceparent=exchange.header(b"traceparent"),
            retry=_retry(fields.retry),
            webhook=fields.webhook,
            sticky_key=fields.sticky_key,
            endpoint=fields.endpoint,
        )
        keyed = [*with_keys(items, keys)]
        answers = await self._client.submit_each(fields.model, keyed, options)
        full = next((problem_of(each) for each in answers if isinstance(each, QueueFull)), None)
        view = BatchView([_batched(each, exchange) for each in answers])
        await exchange.answer(202, msgspec.json.encode(view), headers=full.headers if full else ())

    async def show(self, exchange: Exchange) -> None:
        """GET /v1/jobs/{id}."""
        wait_s = query_wait_s(exchange)
        handle = self._client.job(exchange.words["id"])
        if wait_s and await handle.status() not in _ENDED:
            await self._jobs.wait(handle, wait_s, exchange)
        await self._show(handle, exchange, pending_status=200, codec=await self._codec(handle))

    async def cancel(self, exchange: Exchange) -> None:
        """DELETE /v1/jobs/{id}."""
        handle = self._client.job(exchange.words["id"])
        done = Cancellation(handle.id, await handle.cancel())
        exchange.about = job_headers(handle.id)
        await exchange.answer(200, msgspec.json.encode(done))

    async def follow(self, exchange: Exchange) -> None:
        """GET /v1/jobs/{id}/events."""
        handle = self._client.job(exchange.words["id"])
        with self._jobs.waiter(handle.id):
            await self._streams.send(handle, await self._codec(handle), exchange)

    async def _show(self, handle: AsyncJobHandle, exchange: Exchange, *, pending_status: int, codec: Codec) -> None:
        status = await handle.status()
        if status not in _ENDED:
            await self._answer_pending(handle, status, exchange, pending_status)
            return
        exchange.about = job_headers(handle.id, await handle.info())
        facts: dict[str, Any] = {"id": handle.id, "model": handle.model, "status": status}
        try:
            outputs = await handle.result()
        except PenstockError as error:
            facts["error"] = _error(error)
            await exchange.answer(200, msgspec.json.encode(facts))
            return
        body, kind, headers = write_outputs(outputs, codec, facts, wanted_type(exchange))
        await exchange.answer(200, body, kind, headers)

    async def _answer_pending(self, handle: AsyncJobHandle, status: str, exchange: Exchange, http_status: int) -> None:
        exchange.about = job_headers(handle.id)
        headers = [
            (b"location", _location(handle, exchange).encode()),
            (b"retry-after", b"%d" % await self._jobs.retry_after_s(handle.model)),
        ]
        facts = {"id": handle.id, "model": handle.model, "status": status}
        await exchange.answer(http_status, msgspec.json.encode(facts), JSON, headers)

    async def _codec(self, handle: AsyncJobHandle) -> Codec:
        """How the model's package wants its outputs in JSON. A model that is no longer served has left no wish."""
        try:
            return (await self._client.spec_of(handle.model)).codecs.default
        except UnknownModel:
            return "json"


def _keys_of(fields: BatchFields, key: str | None) -> list[str | None] | None:
    """The idempotency key of each item. That of the request gives each place one of its own. Raises RequestRefused."""
    if key is None:
        return fields.idempotency_keys
    if fields.idempotency_keys is not None:
        raise RequestRefused(400, "Found Idempotency-Key beside idempotency_keys. Expected one of both")
    digest = hashlib.sha256(key.encode("ascii")).hexdigest()
    return [f"jobs:batch {digest} {index}" for index in range(len(fields.inputs))]


def _retry(fields: RetryFields | None) -> Retry | None:
    return None if fields is None else Retry(fields.attempts, fields.backoff_s, fields.longest_s)


def _batched(answer: AsyncJobHandle | Rejected, exchange: Exchange) -> BatchedJob:
    if isinstance(answer, AsyncJobHandle):
        return BatchedJob(status="accepted", id=answer.id, location=_location(answer, exchange))
    return BatchedJob(status="refused", error=_error(answer))


def _error(error: PenstockError) -> dict[str, Any]:
    problem = problem_of(error)
    return {"code": problem.code, "title": problem.title, "detail": problem.detail}


def _location(handle: AsyncJobHandle, exchange: Exchange) -> str:
    return f"{exchange.mount_path}/v1/jobs/{handle.id}"
