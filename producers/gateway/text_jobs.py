"""Texts that are generated for one request: a job for each choice, waited for as wholes, or followed as they grow.

    TextRequest -> one JobRequest for each prompt and choice -> submit -> wholes: Text, Text, ...
                                                              `-> deltas: Delta, Delta, ... of all in turn

A request without an idempotency key takes its jobs with it: when its client has gone, they are cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import msgspec

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.events import JobEvent
from penstock.producers.gateway.event_stream import EventStreams
from penstock.producers.gateway.exchange import ClientGone, Exchange
from penstock.producers.gateway.token_pieces import TokenChoice
from penstock.producers.gateway.waiting import JobRequest, Jobs, check_late, job_headers
from penstock.registry.errors import InvalidInput, JobFailed, ResultGone, UnknownJob
from penstock.registry.generation_inputs import with_options
from penstock.registry.queues import PriorityName
from penstock.registry.sampling_params import SamplingParams
from penstock.registry.tensors import Array

__all__ = ["Delta", "Sent", "Text", "TextJobs", "TextRequest", "TextUsage", "delta_of", "only_text", "texts_of"]

_MOST_JOBS: Final = 128
_MOST_SEED: Final = 2**64
_UNREAD: Final = 64
"""Events that wait for a slow client; those behind them wait in the broker."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """prompts: the inputs of each prompt, without sampling parameters. choices: the texts of each prompt.

    Raises InvalidInput for too many texts.
    """

    model: str
    prompts: Sequence[Mapping[str, Any]]
    params: SamplingParams
    choices: int = 1
    priority: PriorityName = "normal"
    idempotency_key: str | None = None
    traceparent: str = ""

    def __post_init__(self) -> None:
        # Before anything is made for each text: n may be any number.
        if not 1 <= self.total <= _MOST_JOBS:
            raise InvalidInput(f"Found {self.total} texts in one request. Expected 1 to {_MOST_JOBS}: prompts times n")

    @property
    def total(self) -> int:
        """How many texts there are."""
        return len(self.prompts) * self.choices

    def jobs(self) -> list[JobRequest]:
        """One for each text, those of one prompt side by side.

        With a seed, each choice has a seed of its own: otherwise they would be equal.
        """
        found: list[JobRequest] = []
        for prompt in self.prompts:
            for choice in range(self.choices):
                found.append(
                    JobRequest(
                        self.model,
                        with_options(prompt, self._params(choice)),
                        priority=self.priority,
                        idempotency_key=self._key_of(len(found)),
                        traceparent=self.traceparent,
                    )
                )
        return found

    def _key_of(self, number: int) -> str | None:
        """The first job has the key of the request, so that the key with another request is refused. Those of the
        others are none that a client uses by chance.
        """
        key = self.idempotency_key
        if key is None or number == 0:
            return key
        return f"texts {hashlib.sha256(key.encode('ascii')).hexdigest()} {number}"

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
    """A whole text. message: of the answer to a chat, in OpenAI's form; None where there was a prompt.

    tokens: those that were generated, where their log probabilities were asked for.
    """

    text: str
    finish_reason: str
    usage: TextUsage
    message: dict[str, Any] | None = None
    tokens: Sequence[TokenChoice] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one text. index: of the text. whole: with its end. tokens: see Text."""

    index: int
    text: str
    whole: Text | None = None
    tokens: Sequence[TokenChoice] = ()


class Sent(NamedTuple):
    """How much of a text was told: characters, and tokens with their log probabilities."""

    characters: int = 0
    tokens: int = 0

    def and_then(self, delta: Delta) -> Sent:
        return Sent(self.characters + len(delta.text), self.tokens + len(delta.tokens))


class TextJobs:
    """The texts of one process."""

    def __init__(self, jobs: Jobs, streams: EventStreams) -> None:
        self._jobs = jobs
        self._streams = streams

    async def wholes(self, request: TextRequest, exchange: Exchange) -> list[Text]:
        """All texts, in the order of the jobs. Raises as AsyncJobHandle.result does; the other jobs are cancelled."""
        async with self._begun(request, exchange) as handles:
            waits = [asyncio.ensure_future(self._whole(handle, handles[0], exchange)) for handle in handles]
            try:
                with exchange.watch():
                    return await asyncio.gather(*waits)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _whole(self, handle: AsyncJobHandle, first: AsyncJobHandle, exchange: Exchange) -> Text:
        """The text of a job. The answer has the headers of the first job."""
        info = await handle.info(self._jobs.wait_s)
        if handle is first:
            exchange.about = job_headers(handle.id, info)
        return texts_of(await handle.result())[0]

    @asynccontextmanager
    async def deltas(
        self, request: TextRequest, exchange: Exchange
    ) -> AsyncIterator[AsyncGenerator[Delta | None, None]]:
        """Inside of the block the jobs run. Gives their deltas as they come, and None after each silence.

        Raises QueueFull without a place, StreamsStopped when the server stops, and the error of a job that fails.
        """
        with self._streams.place():
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
            except (ClientGone, asyncio.CancelledError, Exception) as error:
                if request.idempotency_key is None:
                    for handle in handles:
                        self._jobs.abandon(handle)
                    check_late(error)
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
        sent = [Sent()] * left
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
                delta = delta_of(index, event, sent[index])
                if delta is not None:
                    sent[index] = sent[index].and_then(delta)
                    left -= delta.whole is not None
                    yield delta
        finally:
            for task in tasks:
                task.cancel()


def texts_of(outputs: Mapping[str, Array]) -> list[Text]:
    """The texts that one job has generated. Raises UnknownJob for one whose outputs are not all here."""
    if "usage" not in outputs:
        raise UnknownJob("The job has other outputs than a text. Expected one with all outputs of its model")
    prompt, completion, cached = (int(number) for number in outputs["usage"])
    found: list[Text] = []
    for row, text in enumerate(outputs["text"]):
        ids = [int(token) for token in outputs["token_ids"][row] if token >= 0]
        # The usage of a job counts its texts together. Another server may tell no ids: then the first has all tokens.
        is_counted = len(outputs["text"]) > 1 and outputs["token_ids"].shape[1] > 0
        written = len(ids) if is_counted else completion * (row == 0)
        message = str(outputs["message"][row])
        found.append(
            Text(
                str(text),
                str(outputs["finish_reason"][row]),
                TextUsage(prompt, written, cached),
                msgspec.json.decode(message) if message else None,
                _choices(ids, str(outputs["logprobs"][row])),
            )
        )
    return found


def only_text(outputs: Mapping[str, Array]) -> Text:
    """The text of a job that has one. Raises UnknownJob."""
    found = texts_of(outputs)
    if len(found) != 1:
        raise UnknownJob(f"The job has {len(found)} texts. Expected one with a single text")
    return found[0]


def delta_of(index: int, event: JobEvent, sent: Sent) -> Delta | None:
    """None for an event without text. sent: what was told before.

    Raises the error of a job that failed, JobFailed for a text that began anew behind its beginning, and ResultGone
    where the broker has dropped events: the text would have a gap.
    """
    if event.type == "chunk":
        tokens = _choices(event.data["token_ids"].tolist(), str(event.data.get("logprobs", "")))
        return Delta(index, str(event.data["text"]), tokens=tokens)
    if event.type == "completed":
        whole = only_text(event.data)
        # An answer from the cache has no chunks.
        return Delta(index, whole.text[sent.characters :], whole, whole.tokens[sent.tokens :])
    if event.type == "reset" and event.data == "trimmed":
        raise ResultGone("The broker keeps the beginning of the text no longer. Expected a request without stream")
    if event.type == "reset" and sent != Sent():
        raise JobFailed("The beginning of the text was sent, and the job began anew. Expected a new request")
    if isinstance(event.data, Exception):
        raise event.data
    return None


def _choices(ids: Sequence[int], logprobs: str) -> list[TokenChoice]:
    """The tokens with their log probabilities, which are JSON; none where none were asked for."""
    if not logprobs:
        return []
    found = [{int(token): float(value) for token, value in at.items()} for at in json.loads(logprobs)]
    return [TokenChoice(*each) for each in zip(ids, found, strict=True)]
