"""Texts in OpenAI's form: one answer with the whole texts, or a stream of chunks that ends with [DONE].

    TextRequest -> TextJobs -> whole texts -> Shape.whole -> the answer
                            `-> deltas -> Shape.begin, chunk, end -> data: {...}, data: {...}, data: [DONE]
    line of a batch -> line_job -> one job -> Shape.whole -> the answer of the line

An error after the first chunk is a last chunk: `data: {"error": {...}}`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import msgspec

from penstock.producers.gateway.batches.batch_run import LineJob
from penstock.producers.gateway.event_stream import EVENTS, HEARTBEAT, STREAM_HEADERS, StreamsStopped
from penstock.producers.gateway.exchange import CallerRevoked, ClientGone, Exchange
from penstock.producers.gateway.openai import OPENAI_ERROR
from penstock.producers.gateway.openai_logprobs import LogprobWish
from penstock.producers.gateway.openai_sampling import SamplingFields
from penstock.producers.gateway.problems import problem_of
from penstock.producers.gateway.request_headers import idempotency_key
from penstock.producers.gateway.text_jobs import Delta, Text, TextJobs, TextRequest, TextUsage, texts_of
from penstock.producers.gateway.token_counts import PackageTokenizers
from penstock.registry.errors import ClientUnusable, InvalidInput, PenstockError
from penstock.registry.generation_inputs import with_options
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import Array

__all__ = ["Head", "OpenAiTexts", "Shape", "UsageView", "line_job", "reason_of"]

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

    def __init__(self, texts: TextJobs, tokenizers: PackageTokenizers) -> None:
        self._texts = texts
        self._tokenizers = tokenizers

    async def logprob_wish(self, spec: ModelSpec, top: int | None) -> LogprobWish | None:
        """How log probabilities are told; None: none are asked for. Raises InvalidInput without the tokenizer."""
        if top is None:
            return None
        if (tokenizer := await self._tokenizers.of(spec)) is None:
            raise InvalidInput(f"logprobs: the tokenizer of {spec.name} is not here. Expected a request without them")
        return LogprobWish(tokenizer.pieces, top)

    async def answer(self, fields: SamplingFields, request: TextRequest, shape: Shape, exchange: Exchange) -> None:
        """As a stream where `fields` asks for one. Each text counts for the limits of the caller.

        The headers of the request join it here: its idempotency key, and its trace.
        """
        key, trace = idempotency_key(exchange), exchange.header(b"traceparent")
        request = replace(request, idempotency_key=key, traceparent=trace)
        if (more := request.total - 1) > 0:
            await exchange.entry.spend(requests=more)
        if not fields.stream:
            texts = await self._texts.wholes(request, exchange)
            usage = _summed([text.usage for text in texts], request.choices)
            await exchange.answer(200, msgspec.json.encode(shape.whole(_head(request, exchange), texts, usage)))
            return
        try:
            await self._stream(request, shape, exchange, tells_usage=fields.tells_usage)
        except ClientGone as error:
            if isinstance(error, CallerRevoked) and exchange.has_begun:
                await exchange.write(_error_event(error))
            raise
        except StreamsStopped:
            stopped = ClientUnusable("The gateway stops")
            if not exchange.has_begun:
                raise stopped from None
            # Official clients take a stream that ends for a whole text, also without [DONE].
            await exchange.write(_error_event(stopped))
            await exchange.end_stream()
        except Exception as error:  # where the answer has begun, it is told in the stream
            # A client that does not take the chunks gets no further one.
            if not exchange.has_begun or (isinstance(error, TimeoutError) and not isinstance(error, PenstockError)):
                raise
            await exchange.write(_error_event(error))
            await exchange.end_stream()

    async def _stream(self, request: TextRequest, shape: Shape, exchange: Exchange, *, tells_usage: bool) -> None:
        usages: dict[int, TextUsage] = {}
        async with self._texts.deltas(request, exchange) as deltas:
            head = _head(request, exchange)
            await exchange.begin_stream(EVENTS, STREAM_HEADERS)
            for index in range(request.total):
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


def line_job(fields: SamplingFields, request: TextRequest, shape: Shape) -> LineJob:
    """The one job of a line of a batch. Raises InvalidInput for what a line cannot have."""
    if fields.stream:
        raise InvalidInput("stream: found true, expected none: a line of a batch has a whole answer")
    if fields.priority is not None:
        raise InvalidInput("Found priority. Expected none: a batch runs at low priority")
    if len(request.prompts) != 1:
        raise InvalidInput(f"prompt: found {len(request.prompts)} prompts. Expected a line of the batch for each")
    params = replace(request.params, n=request.choices)

    def write(outputs: Mapping[str, Array], _version: str, job_id: str) -> bytes:
        texts = texts_of(outputs)
        usage = _summed([text.usage for text in texts], request.choices)
        return msgspec.json.encode(shape.whole(Head(job_id, int(time.time()), request.model), texts, usage))

    return LineJob(request.model, with_options(request.prompts[0], params), None, (), write)


def reason_of(text: Text) -> str:
    """The reason in OpenAI's words."""
    return "length" if text.finish_reason == "timeout" else text.finish_reason


def _head(request: TextRequest, exchange: Exchange) -> Head:
    return Head(dict(exchange.about)[_JOB_ID].decode(), int(time.time()), request.model)


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(chunk)


def _error_event(error: Exception) -> bytes:
    return b"data: %s\n\n" % OPENAI_ERROR(problem_of(error))[0]


def _summed(usages: Sequence[TextUsage], choices: int) -> UsageView:
    """usages: of each text, those of one prompt side by side."""
    prompts = usages[::choices]
    prompt, completion = sum(each.prompt for each in prompts), sum(each.completion for each in usages)
    return UsageView(prompt, completion, prompt + completion, PromptTokens(sum(each.cached for each in prompts)))
