"""Texts that are generated for one request: a job for each choice, waited for as wholes, or followed as they grow.

    TextRequest -> one JobRequest for each prompt and choice -> submit -> wholes: Text, Text, ...
                                                              `-> deltas: Delta, Delta, ... of all in turn

A request without an idempotency key takes its jobs with it: when its client has gone, they are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import msgspec

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.events import JobEvent
from penstock.producers.gateway.event_stream import EventStreams
from penstock.producers.gateway.exchange import ClientGone, Exchange
from penstock.producers.gateway.waiting import JobRequest, Jobs, job_headers
from penstock.registry.errors import InvalidInput, JobFailed
from penstock.registry.generation_inputs import with_options
from penstock.registry.queues import PriorityName
from penstock.registry.sampling_params import SamplingParams
from penstock.registry.tensors import Array

__all__ = ["Delta", "Text", "TextJobs", "TextRequest", "TextUsage"]

_MOST_JOBS: Final = 128
_MOST_SEED: Final = 2**64
_UNREAD: Final = 64
"""Events that wait for a slow client; those behind them wait in the broker."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """prompts: the inputs of each prompt, without sampling parameters. choices: the texts of each prompt."""

    model: str
    prompts: Sequence[Mapping[str, Any]]
    params: SamplingParams
    choices: int = 1
    priority: PriorityName = "normal"
    idempotency_key: str | None = None
    traceparent: str = ""

    def jobs(self) -> list[JobRequest]:
        """One for each text, those of one prompt side by side. Raises InvalidInput for too many.

        With a seed, each choice has a seed of its own: otherwise they would be equal.
        """
        total = len(self.prompts) * self.choices
        if not 1 <= total <= _MOST_JOBS:
            raise InvalidInput(f"Found {total} texts in one request. Expected 1 to {_MOST_JOBS}: prompts times n")
        found: list[JobRequest] = []
        for prompt in self.prompts:
            for choice in range(self.choices):
                key = self.idempotency_key
                found.append(
                    JobRequest(
                        self.model,
                        with_options(prompt, self._params(choice)),
                        priority=self.priority,
                        idempotency_key=key if key is None or total == 1 else f"{key}/{len(found)}",
                        traceparent=self.traceparent,
                    )
                )
        return found

    def _params(self, choice: int) -> SamplingParams:
        seed = self.params.seed
        if not choice or seed is None:
            return self.params
        return replace(self.params, seed=(seed + choice) % _MOST_SEED)


class TextUsage(NamedTuple):
    """Tokens of a prompt and its text. cached: those of the prompt that were not computed anew."""

    prompt: int
    completion: int
    cached: int


class Text(NamedTuple):
    """A whole text. message: of the answer to a chat, in OpenAI's form; None where there was a prompt."""

    text: str
    finish_reason: str
    usage: TextUsage
    message: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one text. index: of the text. whole: with its end."""

    index: int
    text: str
    whole: Text | None = None


class TextJobs:
    """The texts of one process."""

    def __init__(self, jobs: Jobs, streams: EventStreams) -> None:
        self._jobs = jobs
        self._streams = streams

    async def wholes(self, request: TextRequest, exchange: Exchange) -> list[Text]:
        """All texts, in the order of the jobs. Raises as AsyncJobHandle.result does; the other jobs are cancelled."""
        async with self._begun(request, exchange) as handles:
            waits = [asyncio.ensure_future(handle.info(self._jobs.wait_s)) for handle in handles]
            try:
                with exchange.watch():
                    infos = await asyncio.gather(*waits)
            finally:
                for wait in waits:
                    wait.cancel()
            exchange.about = job_headers(handles[0].id, infos[0])
            return [_text_of(await handle.result()) for handle in handles]

    @asynccontextmanager
    async def deltas(
        self, request: TextRequest, exchange: Exchange
    ) -> AsyncIterator[AsyncGenerator[Delta | None, None]]:
        """Inside of the block the jobs run. Gives their deltas as they come, and None after each silence.

        Raises StreamsStopped when the server stops, and the error of a job that fails.
        """
        async with self._begun(request, exchange) as handles:
            with self._streams.opened(), exchange.watch():
                async with aclosing(self._merged(handles)) as merged:
                    yield merged

    @asynccontextmanager
    async def _begun(self, request: TextRequest, exchange: Exchange) -> AsyncIterator[list[AsyncJobHandle]]:
        """The handles of the jobs. When the block is left by an error, those without a key are cancelled."""
        handles: list[AsyncJobHandle] = []
        with self._jobs.place():
            try:
                for each in request.jobs():
                    handles.append(await self._jobs.submit(each, exchange))
                exchange.about = job_headers(handles[0].id)
                yield handles
            except (ClientGone, asyncio.CancelledError, Exception):
                if request.idempotency_key is None:
                    for handle in handles:
                        self._jobs.abandon(handle)
                raise

    async def _merged(self, handles: Sequence[AsyncJobHandle]) -> AsyncGenerator[Delta | None, None]:
        arrived: asyncio.Queue[tuple[int, JobEvent | BaseException]] = asyncio.Queue(_UNREAD)

        async def follow(index: int, handle: AsyncJobHandle) -> None:
            try:
                async for event in handle.stream():
                    await arrived.put((index, event))
            except Exception as error:  # it is raised where the deltas are read
                await arrived.put((index, error))

        tasks = [asyncio.create_task(follow(*each)) for each in enumerate(handles)]
        left = len(handles)
        sent = [0] * left
        try:
            while left:
                try:
                    async with asyncio.timeout(self._streams.heartbeat_s):
                        index, event = await arrived.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, BaseException):
                    raise event
                delta = _delta_of(index, event, sent[index])
                if delta is not None:
                    sent[index] += len(delta.text)
                    left -= delta.whole is not None
                    yield delta
        finally:
            for task in tasks:
                task.cancel()


def _text_of(outputs: Mapping[str, Array]) -> Text:
    prompt, completion, cached = (int(number) for number in outputs["usage"])
    message = str(outputs["message"][0])
    return Text(
        str(outputs["text"][0]),
        str(outputs["finish_reason"][0]),
        TextUsage(prompt, completion, cached),
        msgspec.json.decode(message) if message else None,
    )


def _delta_of(index: int, event: JobEvent, sent: int) -> Delta | None:
    """None for an event without text. sent: characters of the text so far.

    Raises the error of a job that failed, and JobFailed for a lost beginning.
    """
    if event.type == "chunk":
        return Delta(index, str(event.data["text"]))
    if event.type == "completed":
        whole = _text_of(event.data)
        # An answer from the cache has no chunks.
        return Delta(index, whole.text[sent:], whole)
    if event.type == "reset" and sent:
        raise JobFailed("The beginning of the text was sent, and the job began anew. Expected a new request")
    if isinstance(event.data, Exception):
        raise event.data
    return None
