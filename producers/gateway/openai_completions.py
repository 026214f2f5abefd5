"""OpenAI's completions of prompts. The `openai` client works unchanged.

POST /v1/completions    prompt: a text, texts, a list of tokens, or lists of tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.producers.gateway.batches.batch_run import LineJob
from penstock.producers.gateway.event_stream import EVENTS
from penstock.producers.gateway.exchange import Exchange
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.openai import OPENAI_ERROR
from penstock.producers.gateway.openai_logprobs import CompletionLogprobs, LogprobWish, completion_logprobs
from penstock.producers.gateway.openai_sampling import SamplingFields, generating_spec, sampling_of
from penstock.producers.gateway.openai_texts import Head, OpenAiTexts, UsageView, line_job, reason_of
from penstock.producers.gateway.request_headers import KEY_HEADER
from penstock.producers.gateway.routing import Route
from penstock.producers.gateway.tensors import decoded
from penstock.producers.gateway.text_jobs import Delta, Text, TextRequest
from penstock.producers.gateway.token_pieces import TokenChoice
from penstock.registry.errors import InvalidInput
from penstock.registry.generation_inputs import as_inputs

__all__ = ["CompletionRoutes"]

_MAX_TOKENS: Final = 16
"""Of a request that names none, as OpenAI has it."""


class CompletionFields(SamplingFields, kw_only=True):
    """A request for completions. Fields that OpenAI has beside these are ignored."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


class CompletionChoice(msgspec.Struct):
    """One text, or what is new of it. finish_reason: null before the end."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, kw_only=True):
    """Completions, or a chunk of one. id: `cmpl-` and the id of the first job."""

    id: str
    choices: list[CompletionChoice]
    created: int
    model: str
    usage: UsageView | None = None
    object: str = "text_completion"


class CompletionRoutes:
    """The route of completions."""

    def __init__(self, client: GatewayClient, texts: OpenAiTexts) -> None:
        self._client = client
        self._texts = texts

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        takes, gives = CompletionFields, Completion
        return [
            Route(
                "POST",
                "/v1/completions",
                self.complete,
                "OpenAI: complete prompts",
                takes,
                gives,
                parameters=KEY_HEADER,
                error=OPENAI_ERROR,
                also_gives=(EVENTS,),
            )
        ]

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        fields = decoded(await exchange.json_body(), CompletionFields)
        await self._texts.answer(fields, *await self._asked(fields), exchange)

    async def prepare_line(self, words: Mapping[str, str], body: bytes) -> LineJob:
        """The job of a line of a batch. Raises InvalidInput and UnknownModel."""
        fields = decoded(body, CompletionFields)
        return line_job(fields, *await self._asked(fields))

    async def _asked(self, fields: CompletionFields) -> tuple[TextRequest, _Shape]:
        _refuse_others(fields)
        spec = await generating_spec(self._client, fields.model)
        most = _MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        wish = await self._texts.logprob_wish(spec, fields.logprobs)
        params, choices = sampling_of(fields, most, logprobs=fields.logprobs)
        prompts = _prompts(fields.prompt)
        inputs = [as_inputs(prompt) for prompt in prompts]
        request = TextRequest(spec.name, inputs, params, choices, priority=fields.priority or "normal")
        echoes = [_echoed(prompt) if fields.echo else "" for prompt in prompts for _ in range(choices)]
        return request, _Shape(echoes, wish)


class _Shape:
    """echoes: what stands before each text. wish: None where no log probabilities are asked for."""

    def __init__(self, echoes: Sequence[str], wish: LogprobWish | None) -> None:
        self._echoes = echoes
        self._wish = wish
        self._places = [] if wish is None else [wish.places() for _ in echoes]

    def whole(self, head: Head, texts: Sequence[Text], usage: UsageView) -> Completion:
        choices = [
            CompletionChoice(
                index, self._echoes[index] + each.text, reason_of(each), self._logprobs(index, each.text, each.tokens)
            )
            for index, each in enumerate(texts)
        ]
        return _completion(head, choices, usage)

    def begin(self, head: Head, index: int) -> Completion | None:
        echo = self._echoes[index]
        return _completion(head, [CompletionChoice(index, echo)]) if echo else None

    def chunk(self, head: Head, delta: Delta) -> Completion:
        reason = reason_of(delta.whole) if delta.whole else None
        logprobs = self._logprobs(delta.index, delta.text, delta.tokens)
        return _completion(head, [CompletionChoice(delta.index, delta.text, reason, logprobs)])

    def end(self, head: Head, usage: UsageView) -> Completion:
        return _completion(head, [], usage)

    def _logprobs(self, index: int, text: str, tokens: Sequence[TokenChoice]) -> CompletionLogprobs | None:
        """Of what is new of a text."""
        if self._wish is None:
            return None
        placed = self._places[index].take(text, tokens)
        return completion_logprobs(self._wish, placed, len(self._echoes[index]))


def _completion(head: Head, choices: list[CompletionChoice], usage: UsageView | None = None) -> Completion:
    return Completion(id=f"cmpl-{head.job_id}", choices=choices, created=head.created, model=head.model, usage=usage)


def _refuse_others(fields: CompletionFields) -> None:
    """Raises InvalidInput for a wish that would change the answer and that is not obeyed."""
    if fields.suffix:
        raise InvalidInput("suffix: found a text, expected none: no model here fills a gap")
    if fields.logprobs is not None and fields.echo:
        raise InvalidInput("logprobs: found a number beside echo, expected one of both: a prompt has none here")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidInput(f"best_of is {fields.best_of}. Expected none, or n")


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    """Each prompt. Raises InvalidInput for a mixture."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    kinds = {type(prompt) for prompt in given}
    if kinds not in ({str}, {list}) or not all(given):
        raise InvalidInput("prompt: found none, an empty one or a mixture. Expected texts, or lists of tokens")
    return given


def _echoed(prompt: str | list[int]) -> str:
    if not isinstance(prompt, str):
        raise InvalidInput("echo: found true beside tokens, expected it beside texts")
    return prompt
