"""OpenAI's chats. The model's own chat template makes a prompt of the messages. The `openai` client works unchanged.

POST /v1/chat/completions    messages: [{"role", "content"}, ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock.producers.gateway.exchange import Exchange
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.openai import openai_error
from penstock.producers.gateway.openai_sampling import SamplingFields, generating_spec, sampling_of
from penstock.producers.gateway.openai_texts import Head, OpenAiTexts, UsageView
from penstock.producers.gateway.request_headers import idempotency_key
from penstock.producers.gateway.routing import Route
from penstock.producers.gateway.tensors import decoded
from penstock.producers.gateway.text_jobs import Delta, Text, TextRequest
from penstock.registry.errors import InvalidInput

__all__ = ["ChatRoutes"]

_MAX_TOKENS: Final = 128
"""Of a request that names none."""


class ChatFields(SamplingFields, kw_only=True):
    """A request for a chat. Fields that OpenAI has beside these are ignored."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """An answer, or what is new of it."""

    role: str = ""
    content: str | None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answers. id: `chatcmpl-` and the id of the first job."""

    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    usage: UsageView
    object: str = "chat.completion"


class ChatDelta(msgspec.Struct):
    """What is new of one answer. finish_reason: null before the end."""

    index: int
    delta: ChatMessage
    finish_reason: str | None = None
    logprobs: None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a stream."""

    id: str
    choices: list[ChatDelta]
    created: int
    model: str
    usage: UsageView | None = None
    object: str = "chat.completion.chunk"


class ChatRoutes:
    """The route of chats."""

    def __init__(self, client: GatewayClient, texts: OpenAiTexts) -> None:
        self._client = client
        self._texts = texts

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        what = ("POST", "/v1/chat/completions", self.chat, "OpenAI: answer a chat", ChatFields, ChatCompletion)
        return [Route(*what, write_problem=openai_error)]

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        key = idempotency_key(exchange)
        fields = decoded(await exchange.body(), ChatFields)
        _refuse_others(fields)
        spec = await generating_spec(self._client, fields.model)
        most = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        params, choices = sampling_of(fields, _MAX_TOKENS if most is None else most)
        request = TextRequest(
            spec.name,
            [{"messages": fields.messages}],
            params,
            choices,
            priority=fields.priority or "normal",
            idempotency_key=key,
            traceparent=exchange.header(b"traceparent"),
        )
        await self._texts.answer(fields, request, _Shape(), exchange)


class _Shape:
    """The objects of chats."""

    def whole(self, head: Head, texts: Sequence[Text], usage: UsageView) -> ChatCompletion:
        choices = [
            ChatChoice(index, ChatMessage("assistant", each.text), each.finish_reason)
            for index, each in enumerate(texts)
        ]
        return ChatCompletion(id=_id(head), choices=choices, created=head.created, model=head.model, usage=usage)

    def begin(self, head: Head, index: int) -> ChatChunk:
        return _chunk(head, [ChatDelta(index, ChatMessage("assistant", ""))])

    def chunk(self, head: Head, delta: Delta) -> ChatChunk:
        news = ChatMessage(content=delta.text) if delta.text else ChatMessage()
        return _chunk(head, [ChatDelta(delta.index, news, delta.finish_reason)])

    def end(self, head: Head, usage: UsageView) -> ChatChunk:
        return _chunk(head, [], usage)


def _chunk(head: Head, choices: list[ChatDelta], usage: UsageView | None = None) -> ChatChunk:
    return ChatChunk(id=_id(head), choices=choices, created=head.created, model=head.model, usage=usage)


def _id(head: Head) -> str:
    return f"chatcmpl-{head.job_id}"


def _refuse_others(fields: ChatFields) -> None:
    """Raises InvalidInput for a wish that would change the answer and that is not obeyed."""
    if fields.logprobs:
        raise InvalidInput("logprobs: found true, expected none on this route")
    if fields.tools or fields.functions:
        raise InvalidInput("tools: found some, expected none on this route")
    kind = (fields.response_format or {}).get("type", "text")
    if kind != "text":
        raise InvalidInput("response_format: found another type than text, expected text")
