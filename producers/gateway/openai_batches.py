"""OpenAI's batches: the lines of a file as jobs at low priority, and two files of answers. See batches/ for the run.

    POST /v1/batches {"input_file_id", "endpoint", "completion_window", "metadata"}
    GET  /v1/batches[/{id}]
    POST /v1/batches/{id}/cancel

A further endpoint is one more BatchEndpoint in the table of the application.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.producers.gateway.batches.batch_run import Endpoint, LineJob, Resume
from penstock.producers.gateway.batches.file_store import FileStore, NotFound, keyed_id, new_id
from penstock.producers.gateway.batches.records import ENDED, Batch, StoredBatch
from penstock.producers.gateway.batches.runner import BatchRunner, RunOptions
from penstock.producers.gateway.callers import entered
from penstock.producers.gateway.exchange import Exchange, RequestRefused
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.openai import OPENAI_ERROR
from penstock.producers.gateway.openai_files import kept, page_of, stored_page
from penstock.producers.gateway.problems import problem_of
from penstock.producers.gateway.request_headers import KEY_HEADER, idempotency_key
from penstock.producers.gateway.routing import Route, path_pattern
from penstock.producers.gateway.tensors import decoded
from penstock.registry.errors import IdempotencyConflict, InvalidInput

__all__ = ["BatchEndpoint", "BatchRoutes"]

_OF_CLIENT: Final = ("endpoint", "input_file_id", "completion_window", "metadata")
"""The fields of a batch that its request names."""
_WINDOW: Final = re.compile(r"([1-9]\d{0,5})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_WINDOW_S: Final = 7 * 86_400
_MOST_METADATA: Final = 16
_LONGEST_KEY: Final = 64
_LONGEST_VALUE: Final = 512
_LISTED: Final = 20
_MOST_LISTED: Final = 100


class BatchEndpoint(NamedTuple):
    """An endpoint that batches may have. path: with words, such as {name}. prepare: (words, body) -> the job."""

    path: str
    prepare: Callable[[Mapping[str, str], bytes], Awaitable[LineJob]]


class NewBatchFields(msgspec.Struct, kw_only=True):
    """A request for a batch. completion_window: 24h, or another number of s, m, h or d; at most 7 days."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct):
    """Batches, the newest first."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class BatchRoutes:
    """The routes of batches, and the batches that this process runs. endpoints: what the lines may ask for."""

    def __init__(
        self,
        store: FileStore | None,
        client: GatewayClient,
        endpoints: Sequence[BatchEndpoint],
        *,
        resume: Resume,
        max_outstanding: int,
        max_line_bytes: int,
    ) -> None:
        self._store = store
        self._client = client
        self._endpoints = [(path_pattern(each.path), each.prepare) for each in endpoints]
        self._paths = ", ".join(each.path for each in endpoints)
        options = RunOptions(self._find, resume, _written_error, max_outstanding, max_line_bytes)
        self._runner = None if store is None else BatchRunner(store, client, options)

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        listed = {"after": "the id behind which the list begins", "limit": f"at most {_MOST_LISTED}"}
        return [
            _route(
                "POST",
                "/v1/batches",
                self.create,
                "OpenAI: run a file",
                takes=NewBatchFields,
                gives=Batch,
                parameters=KEY_HEADER,
            ),
            _route("GET", "/v1/batches", self.show_batches, "OpenAI: the batches", gives=BatchList, parameters=listed),
            _route("GET", "/v1/batches/{id}", self.show, "OpenAI: one batch", gives=Batch),
            _route("POST", "/v1/batches/{id}/cancel", self.cancel, "OpenAI: cancel a batch", gives=Batch),
        ]

    def start(self) -> None:
        """Begins to run batches, in the running loop."""
        if self._runner is not None:
            self._runner.start()

    async def aclose(self) -> None:
        """Leaves the batches to other processes, or to a later one."""
        if self._runner is not None:
            await self._runner.aclose()

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/batches."""
        store, tenant = kept(self._store), entered().tenant
        fields = decoded(await exchange.json_body(), NewBatchFields)
        window_s = _window_s(fields.completion_window)
        _check_metadata(fields.metadata)
        if self._find(fields.endpoint) is None:
            raise InvalidInput(f"An unknown endpoint. Expected one of: {self._paths}")
        key, now = idempotency_key(exchange), int(time.time())
        batch = Batch(
            id=new_id("batch_") if key is None else keyed_id("batch_", tenant, key),
            endpoint=fields.endpoint,
            input_file_id=fields.input_file_id,
            completion_window=fields.completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=fields.metadata,
        )
        new = StoredBatch(tenant, new_id("file-"), new_id("file-"), batch, entered().key_id)
        stored = await asyncio.to_thread(_added, store, new)
        if any(getattr(stored.batch, name) != getattr(batch, name) for name in _OF_CLIENT):
            raise IdempotencyConflict(
                "Idempotency-Key belongs to another batch. Expected the same request, or a new key"
            )
        if self._runner is not None:
            self._runner.wake()
        await exchange.answer(200, msgspec.json.encode(stored.batch))

    async def show_batches(self, exchange: Exchange) -> None:
        """GET /v1/batches."""
        store, tenant = kept(self._store), entered().tenant
        after, limit, _ = page_of(exchange, _LISTED, _MOST_LISTED)
        found = await asyncio.to_thread(store.batches, tenant, after, limit + 1)
        page = stored_page(BatchList, [stored.batch for stored in found], limit)
        await exchange.answer(200, msgspec.json.encode(page))

    async def show(self, exchange: Exchange) -> None:
        """GET /v1/batches/{id}."""
        store, tenant = kept(self._store), entered().tenant
        stored = await asyncio.to_thread(store.batch, tenant, exchange.words["id"])
        await exchange.answer(200, msgspec.json.encode(stored.batch))

    async def cancel(self, exchange: Exchange) -> None:
        """POST /v1/batches/{id}/cancel."""
        store, tenant = kept(self._store), entered().tenant
        await exchange.json_body()
        cancelling = partial(_cancelling, now=int(time.time()))
        stored = await asyncio.to_thread(store.change_batch, tenant, exchange.words["id"], cancelling)
        await exchange.answer(200, msgspec.json.encode(stored.batch))

    def _find(self, url: str) -> Endpoint | None:
        for pattern, prepare in self._endpoints:
            if (found := pattern.match(url)) is not None:
                return partial(prepare, found.groupdict())
        return None


def _route(method: Any, path: str, handler: Any, summary: str, **further: Any) -> Route:
    return Route(method, path, handler, summary, error=OPENAI_ERROR, **further)


def _added(store: FileStore, new: StoredBatch) -> StoredBatch:
    """The batch as it is stored: the earlier one with its id, if any, also when that one's file is gone by now.

    Raises NotFound without the input file, and InvalidInput for a file of another purpose.
    """
    with suppress(NotFound):
        return store.batch(new.tenant, new.batch.id)
    if store.file(new.tenant, new.batch.input_file_id).purpose != "batch":
        raise InvalidInput("The file has another purpose. Expected a file with the purpose batch")
    return store.add_batch(new)


def _written_error(error: Exception) -> tuple[int, bytes]:
    problem = problem_of(error)
    return problem.status, OPENAI_ERROR(problem)[0]


def _cancelling(stored: StoredBatch, now: int) -> StoredBatch:
    batch = stored.batch
    if batch.status in ENDED:
        raise RequestRefused(409, f"The batch is {batch.status}. Expected one that has not ended")
    begun = batch.cancelling_at or now
    return replace(stored, batch=replace(batch, status="cancelling", cancelling_at=begun))


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    if found is None or (window_s := int(found[1]) * _SECONDS[found[2]]) > _LONGEST_WINDOW_S:
        raise InvalidInput("Bad completion_window. Expected 24h, or another number of s, m, h or d, at most 7d")
    return window_s


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is None:
        return
    is_long = any(len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE for key, value in metadata.items())
    if len(metadata) > _MOST_METADATA or is_long:
        raise InvalidInput(
            f"Bad metadata. Expected at most {_MOST_METADATA} texts of {_LONGEST_VALUE} characters, "
            f"with names of {_LONGEST_KEY}"
        )
