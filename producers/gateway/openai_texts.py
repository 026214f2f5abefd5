"""Texts in OpenAI's form: one answer with the whole texts, or a stream of chunks that ends with [DONE].

    TextRequest -> TextJobs -> whole texts -> Shape.whole -> the answer
                            `-> deltas -> Shape.begin, chunk, end -> data: {...}, data: {...}, data: [DONE]

An error after the first chunk is a last chunk: `data: {"error": {...}}`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from penstock.producers.gateway.event_stream import EVENTS, HEARTBEAT, STREAM_HEADERS, StreamsStopped
from penstock.producers.gateway.exchange import ClientGone, Exchange
from penstock.producers.gateway.openai import openai_error
from penstock.producers.gateway.openai_sampling import SamplingFields
from penstock.producers.gateway.problems import problem_of
from penstock.producers.gateway.text_jobs import Delta, Text, TextJobs, TextRequest, TextUsage
from penstock.registry.errors import PenstockError

__all__ = ["Head", "OpenAiTexts", "Shape", "UsageView", "reason_of"]

_DONE: Final = b"data: [DONE]\n\n"
_JOB_ID: Final = b"penstock-job-id"


class Head(NamedTuple):
    """What each object of an answer has. job_id: of the first job. created: unix seconds."""

    job_id: str
    created: int
    model: str


class PromptTokens(msgspec.Struct):
    """cached_tokens: those that were not computed anew."""

    cached_tokens: int


class UsageView(msgspec.Struct):
    """Tokens of a request. The prompt of several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Shape(Protocol):
    """The objects of one route."""

    def whole(self, head: Head, texts: Sequence[Text], usage: UsageView) -> msgspec.Struct:
        """An answer that is no stream."""

    def begin(self, head: Head, index: int) -> msgspec.Struct | None:
        """The chunk before the first text of a choice; None: there is none."""

    def chunk(self, head: Head, delta: Delta) -> msgspec.Struct | None:
        """A chunk of one choice; None: there is nothing to tell yet."""

    def end(self, head: Head, usage: UsageView) -> msgspec.Struct:
        """The last chunk of a stream, for clients that ask for the usage."""


class OpenAiTexts:
    """Answers requests for texts."""

    def __init__(self, texts: TextJobs) -> None:
        self._texts = texts

    async def answer(self, fields: SamplingFields, request: TextRequest, shape: Shape, exchange: Exchange) -> None:
        """As a stream where `fields` asks for one. Each text counts for the limits of the caller."""
        if (more := len(request.prompts) * request.choices - 1) > 0:
            await exchange.entry.spend(requests=more)
        if not fields.stream:
            texts = await self._texts.wholes(request, exchange)
            usage = _summed([text.usage for text in texts], request.choices)
            await exchange.answer(200, msgspec.json.encode(shape.whole(_head(request, exchange), texts, usage)))
            return
        try:
            await self._stream(request, shape, exchange, tells_usage=fields.tells_usage)
        except ClientGone:
            raise
        except StreamsStopped:
            # Without [DONE], clients see that the text is not whole.
            if not exchange.has_begun:
                await exchange.begin_stream(EVENTS, STREAM_HEADERS)
            await exchange.end_stream()
        except Exception as error:  # where the answer has begun, it is told in the stream
            # A client that does not take the chunks gets no further one.
            if not exchange.has_begun or (isinstance(error, TimeoutError) and not isinstance(error, PenstockError)):
                raise
            body, _ = openai_error(problem_of(error))
            await exchange.write(b"data: %s\n\n" % body)
            await exchange.end_stream()

    async def _stream(self, request: TextRequest, shape: Shape, exchange: Exchange, *, tells_usage: bool) -> None:
        usages: dict[int, TextUsage] = {}
        async with self._texts.deltas(request, exchange) as deltas:
            head = _head(request, exchange)
            await exchange.begin_stream(EVENTS, STREAM_HEADERS)
            for index in range(len(request.prompts) * request.choices):
                if (beginning := shape.begin(head, index)) is not None:
                    await exchange.write(_event(beginning))
            async for delta in deltas:
                if delta is None:
                    await exchange.write(HEARTBEAT)
                    continue
                if delta.whole is not None:
                    usages[delta.index] = delta.whole.usage
                if (chunk := shape.chunk(head, delta)) is not None:
                    await exchange.write(_event(chunk))
            if tells_usage:
                usage = _summed([usages[index] for index in sorted(usages)], request.choices)
                await exchange.write(_event(shape.end(head, usage)))
            await exchange.write(_DONE)
            await exchange.end_stream()


def reason_of(text: Text) -> str:
    """The reason in OpenAI's words."""
    return "length" if text.finish_reason == "timeout" else text.finish_reason


def _head(request: TextRequest, exchange: Exchange) -> Head:
    return Head(dict(exchange.about)[_JOB_ID].decode(), int(time.time()), request.model)


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(chunk)


def _summed(usages: Sequence[TextUsage], choices: int) -> UsageView:
    """usages: of each text, those of one prompt side by side."""
    prompts = usages[::choices]
    prompt, completion = sum(each.prompt for each in prompts), sum(each.completion for each in usages)
    return UsageView(prompt, completion, prompt + completion, PromptTokens(sum(each.cached for each in prompts)))
