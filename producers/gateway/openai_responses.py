"""OpenAI's responses. A response is a job: its id has the job's, and nothing else is stored. The `openai` client works.

    POST   /v1/responses                a response, or its events; with `background` at once, and the job goes on
    GET    /v1/responses/{id}           the response as it is now; ?stream=true&starting_after=N: its events behind N
    POST   /v1/responses/{id}/cancel    the response after its cancellation
    DELETE /v1/responses/{id}           cancels it, or deletes its result

A conversation is sent whole: a response does not know the one before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import msgspec

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.gateway.event_stream import EVENTS, HEARTBEAT, STREAM_HEADERS, EventStreams, StreamsStopped
from penstock.producers.gateway.exchange import Exchange, RequestRefused
from penstock.producers.gateway.openai import OPENAI_ERROR
from penstock.producers.gateway.openai_chat import structure_of
from penstock.producers.gateway.openai_response_events import ResponseEvents
from penstock.producers.gateway.openai_response_input import format_of, messages_of, tools_of
from penstock.producers.gateway.openai_response_views import (
    ResponseId,
    ResponseView,
    ended_view,
    failed_view,
    pending_view,
)
from penstock.producers.gateway.openai_sampling import SamplingFields, generating_spec, sampling_of
from penstock.producers.gateway.problems import problem_of
from penstock.producers.gateway.request_headers import KEY_HEADER, idempotency_key
from penstock.producers.gateway.routing import Route
from penstock.producers.gateway.tensors import decoded
from penstock.producers.gateway.text_jobs import TextRequest, only_text
from penstock.producers.gateway.waiting import JobRequest, Jobs, job_headers
from penstock.registry.errors import (
    BrokerUnavailable,
    InvalidInput,
    JobFailed,
    PenstockError,
    ResultGone,
    UnknownJob,
    UnknownModel,
)

__all__ = ["ResponseRoutes"]

_MAX_TOKENS: Final = 128
"""Of a request that names none, as chats have it."""
_CANCEL_WAIT_S: Final = 5.0
"""A worker that runs the job stops at its next token."""
_LONGEST_NUMBER: Final = 9
_WHOLE: Final = "Expected the whole conversation as input: a response does not know the one before it"


class ResponseFields(SamplingFields, kw_only=True):
    """A request for a response. Fields that OpenAI has beside these are ignored."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None


class DeletedResponse(msgspec.Struct):
    """The answer to a deletion."""

    id: str
    object: str = "response"
    deleted: bool = True


class _Asked(NamedTuple):
    """A request, read and checked. keeps: whether the result may be read later."""

    job: JobRequest
    has_tools: bool
    is_background: bool
    keeps: bool


class ResponseRoutes:
    """The routes of responses."""

    def __init__(self, jobs: Jobs, streams: EventStreams) -> None:
        self._jobs = jobs
        self._client = jobs.client
        self._streams = streams

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        shown = {"stream": "true: its events", "starting_after": "the number of the last event that was seen"}
        one, error = "/v1/responses/{id}", OPENAI_ERROR
        return [
            Route(
                *("POST", "/v1/responses", self.create, "OpenAI: create a response", ResponseFields, ResponseView),
                parameters=KEY_HEADER,
                error=error,
                also_gives=(EVENTS,),
            ),
            Route(
                *("GET", one, self.show, "OpenAI: show a response"),
                gives=ResponseView,
                parameters=shown,
                error=error,
                also_gives=(EVENTS,),
            ),
            Route(
                *("POST", f"{one}/cancel", self.cancel, "OpenAI: cancel a response"),
                gives=ResponseView,
                error=error,
            ),
            Route(*("DELETE", one, self.delete, "OpenAI: delete a response"), gives=DeletedResponse, error=error),
        ]

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/responses."""
        key = idempotency_key(exchange)
        fields = decoded(await exchange.json_body(), ResponseFields)
        asked = await self._asked(fields, key, exchange.header(b"traceparent"))
        if fields.stream:
            with self._streams.place():
                async with self._begun(asked, exchange) as handle:
                    await self._stream(handle, ResponseId(handle.id, asked.has_tools), exchange, -1)
            await self._forget(handle, asked)
        elif asked.is_background:
            handle = await self._jobs.submit(asked.job, exchange)
            name = ResponseId(handle.id, asked.has_tools)
            if key is None:
                await _answer(pending_view(name, "queued"), exchange)
            else:
                # A repeated key has the job of its first request, which may have ended.
                await self._show(name, handle, exchange)
        else:
            finished = await self._jobs.run(asked.job, exchange)
            view = ended_view(ResponseId(finished.job_id, asked.has_tools), only_text(finished.outputs))
            await _answer(view, exchange)
            await self._forget(self._client.job(finished.job_id), asked)

    async def show(self, exchange: Exchange) -> None:
        """GET /v1/responses/{id}."""
        name, handle = await self._found(exchange)
        query = exchange.query()
        if (wanted := query.get("stream", "false")) not in ("true", "false"):
            raise InvalidInput("Bad stream. Expected true or false")
        if wanted == "true":
            await handle.status()
            exchange.about = job_headers(handle.id)
            after = _number(query.get("starting_after"))
            with self._streams.place(), self._jobs.waiter(handle.id):
                await self._stream(handle, name, exchange, after)
        else:
            await self._show(name, handle, exchange)

    async def cancel(self, exchange: Exchange) -> None:
        """POST /v1/responses/{id}/cancel."""
        await exchange.json_body()
        name, handle = await self._found(exchange)
        if await handle.cancel() == "requested":
            await self._jobs.wait(handle, _CANCEL_WAIT_S, exchange)
        await self._show(name, handle, exchange)

    async def delete(self, exchange: Exchange) -> None:
        """DELETE /v1/responses/{id}."""
        name, handle = await self._found(exchange)
        if await handle.cancel() == "requested":
            await self._jobs.wait(handle, _CANCEL_WAIT_S, exchange)
        if await handle.status() in ("queued", "running"):
            raise RequestRefused(409, "The response is being cancelled. Expected a retry")
        await self._client.forget(handle)
        await exchange.answer(200, msgspec.json.encode(DeletedResponse(str(name))))

    async def _asked(self, fields: ResponseFields, key: str | None, traceparent: str) -> _Asked:
        _refuse_others(fields, key)
        tools = tools_of(fields.tools, fields.tool_choice)
        spec = await generating_spec(self._client, fields.model)
        most = _MAX_TOKENS if fields.max_output_tokens is None else fields.max_output_tokens
        params, _ = sampling_of(fields, most, **structure_of(format_of(fields.text)))
        inputs = {"messages": messages_of(fields.instructions, fields.input), **({"tools": tools} if tools else {})}
        request = TextRequest(
            *(spec.name, [inputs], params),
            priority=fields.priority or "normal",
            idempotency_key=key,
            traceparent=traceparent,
        )
        return _Asked(request.jobs()[0], bool(tools), bool(fields.background), fields.store is not False)

    async def _found(self, exchange: Exchange) -> tuple[ResponseId, AsyncJobHandle]:
        """The response that a path names. Raises UnknownJob."""
        name = ResponseId.read(exchange.words["id"])
        handle = self._client.job(name.job_id)
        with suppress(UnknownModel):
            # The result of a model that is gone can still be read.
            if (await self._client.spec_of(handle.model)).generate is None:
                raise UnknownJob(f"Unknown response {exchange.words['id']!r:.120}. Expected that of a text")
        return name, handle

    @asynccontextmanager
    async def _begun(self, asked: _Asked, exchange: Exchange) -> AsyncIterator[AsyncJobHandle]:
        """The job of a stream. Without `background` it ends with its client, unless it has an idempotency key."""
        if asked.is_background:
            with self._jobs.place():
                yield await self._jobs.submit(asked.job, exchange)
            return
        async with self._jobs.following(asked.job, exchange) as handle:
            yield handle

    async def _show(self, name: ResponseId, handle: AsyncJobHandle, exchange: Exchange) -> None:
        status = await handle.status()
        if status in ("queued", "running"):
            exchange.about = job_headers(handle.id)
            await _answer(pending_view(name, "in_progress" if status == "running" else "queued"), exchange)
            return
        exchange.about = job_headers(handle.id, await handle.info())
        if status == "cancelled":
            await _answer(pending_view(name, "cancelled"), exchange)
            return
        try:
            outputs = await handle.result()
        except JobFailed as error:
            await _answer(failed_view(name, problem_of(error)), exchange)
            return
        await _answer(ended_view(name, only_text(outputs)), exchange)

    async def _stream(self, handle: AsyncJobHandle, name: ResponseId, exchange: Exchange, after: int) -> None:
        """The events behind `after`. A stream without a last event goes on in another request."""
        events = ResponseEvents(name)
        try:
            with self._streams.opened(), exchange.watch():
                await self._write(handle, events, exchange, after)
        except (StreamsStopped, BrokerUnavailable) as error:
            if not exchange.has_begun:
                if not isinstance(error, StreamsStopped):
                    raise
                await exchange.begin_stream(EVENTS, STREAM_HEADERS)
        except (JobFailed, ResultGone, UnknownJob) as error:
            if not exchange.has_begun:
                raise
            await exchange.write(events.error(problem_of(error).detail).written())
        await exchange.end_stream()

    async def _write(self, handle: AsyncJobHandle, events: ResponseEvents, exchange: Exchange, after: int) -> None:
        async with aclosing(self._streams.events(handle, 0)) as happened:
            async for event in happened:
                told = [] if event is None else [one for one in events.read(event) if one.number > after]
                if event is not None and event.is_terminal and events.count <= after:
                    raise ResultGone(f"The response has {events.count} events. Expected starting_after below that")
                if not exchange.has_begun and (event is None or told or event.is_terminal):
                    await exchange.begin_stream(EVENTS, STREAM_HEADERS)
                if event is None:
                    await exchange.write(HEARTBEAT)
                for one in told:
                    await exchange.write(one.written())

    async def _forget(self, handle: AsyncJobHandle, asked: _Asked) -> None:
        """Deletes the result of a request with `store: false`, if its job has ended. Without the broker it expires."""
        if not asked.keeps:
            with suppress(PenstockError):
                await self._client.forget(handle)


async def _answer(view: ResponseView, exchange: Exchange) -> None:
    await exchange.answer(200, msgspec.json.encode(view))


def _number(text: str | None) -> int:
    """`starting_after`; -1 without it."""
    if text is None:
        return -1
    if not text.isascii() or not text.isdigit() or len(text) > _LONGEST_NUMBER:
        raise InvalidInput("Bad starting_after. Expected the sequence_number of an event")
    return int(text)


def _refuse_others(fields: ResponseFields, key: str | None) -> None:
    """Raises for a wish that would change the answer and that is not obeyed."""
    if fields.previous_response_id is not None:
        raise RequestRefused(400, f"previous_response_id: found one. {_WHOLE}")
    if fields.conversation is not None:
        raise RequestRefused(400, f"conversation: found one. {_WHOLE}")
    if fields.prompt is not None:
        raise InvalidInput("prompt: found a template, expected input and instructions: no templates are stored here")
    if fields.n not in (None, 1):
        raise InvalidInput(f"n is {fields.n}. Expected none: a response has one text")
    if fields.top_logprobs:
        raise InvalidInput("top_logprobs: found a number, expected none: /v1/chat/completions has them")
    if fields.truncation not in (None, "disabled"):
        raise InvalidInput("truncation: found another value than disabled. Expected that: no input is cut here")
    if fields.store is False and (fields.background or key is not None):
        beside = "background" if fields.background else "Idempotency-Key"
        raise InvalidInput(f"store: found false beside {beside}, expected one of both: its result is read later")
