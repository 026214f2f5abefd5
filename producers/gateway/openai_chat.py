"""OpenAI's chats. The model's own chat template makes a prompt of the messages. The `openai` client works unchanged.

POST /v1/chat/completions    messages: [{"role", "content"}, ...]
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
from penstock.producers.gateway.openai_logprobs import ChatLogprobs, LogprobWish, chat_logprobs, wished_top
from penstock.producers.gateway.openai_sampling import SamplingFields, generating_spec, sampling_of
from penstock.producers.gateway.openai_texts import Head, OpenAiTexts, UsageView, line_job, reason_of
from penstock.producers.gateway.request_headers import KEY_HEADER
from penstock.producers.gateway.routing import Route
from penstock.producers.gateway.tensors import decoded
from penstock.producers.gateway.text_jobs import Delta, Text, TextRequest
from penstock.producers.gateway.token_pieces import TokenChoice
from penstock.registry.errors import InvalidInput

__all__ = ["ChatRoutes", "structure_of"]

_MAX_TOKENS: Final = 128
"""Of a request that names none."""


class Named(msgspec.Struct):
    """A function that must be called."""

    name: str


class ChatFields(SamplingFields, kw_only=True):
    """A request for a chat. Fields that OpenAI has beside these are ignored. functions: the older form of tools."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | Named | None = None
    response_format: dict[str, Any] | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """An answer, or what is new of it. function_call: the older form of one call."""

    role: str = ""
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    function_call: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


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
    logprobs: ChatLogprobs | None = None


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
        takes, gives = ChatFields, ChatCompletion
        return [
            Route(
                "POST",
                "/v1/chat/completions",
                self.chat,
                "OpenAI: answer a chat",
                takes,
                gives,
                parameters=KEY_HEADER,
                error=OPENAI_ERROR,
                also_gives=(EVENTS,),
            )
        ]

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        fields = decoded(await exchange.json_body(), ChatFields)
        await self._texts.answer(fields, *await self._asked(fields), exchange)

    async def prepare_line(self, words: Mapping[str, str], body: bytes) -> LineJob:
        """The job of a line of a batch. Raises InvalidInput and UnknownModel."""
        fields = decoded(body, ChatFields)
        return line_job(fields, *await self._asked(fields))

    async def _asked(self, fields: ChatFields) -> tuple[TextRequest, _Shape]:
        tools, top = _tools(fields), wished_top(wants_logprobs=fields.logprobs, top=fields.top_logprobs)
        spec = await generating_spec(self._client, fields.model)
        most = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        params, choices = sampling_of(
            fields, _MAX_TOKENS if most is None else most, logprobs=top, **structure_of(fields.response_format)
        )
        inputs = {"messages": _messages(fields), **({"tools": tools} if tools else {})}
        request = TextRequest(spec.name, [inputs], params, choices, priority=fields.priority or "normal")
        wish = await self._texts.logprob_wish(spec, top)
        return request, _Shape(wish, choices, may_call=bool(tools), is_older=bool(fields.functions))


class _Shape:
    """The objects of chats. wish: None where no log probabilities are asked for. choices: the answers of the chat.

    may_call: an answer may be calls of tools. is_older: in the form of functions.
    """

    def __init__(self, wish: LogprobWish | None, choices: int, *, may_call: bool, is_older: bool) -> None:
        self._wish = wish
        self._places = [] if wish is None else [wish.places() for _ in range(choices)]
        self._may_call = may_call
        self._is_older = is_older

    def whole(self, head: Head, texts: Sequence[Text], usage: UsageView) -> ChatCompletion:
        choices = [
            ChatChoice(
                *(index, self._message(each, "assistant"), self._reason(each)),
                self._logprobs(index, each.text, each.tokens),
            )
            for index, each in enumerate(texts)
        ]
        return ChatCompletion(id=_id(head), choices=choices, created=head.created, model=head.model, usage=usage)

    def begin(self, head: Head, index: int) -> ChatChunk:
        return _chunk(head, [ChatDelta(index, ChatMessage("assistant", ""))])

    def chunk(self, head: Head, delta: Delta) -> ChatChunk | None:
        """A text that may turn out to be a call is told with its end."""
        whole = delta.whole
        logprobs = self._logprobs(delta.index, delta.text, delta.tokens)
        if not self._may_call:
            news = ChatMessage(content=delta.text) if delta.text else ChatMessage()
            return _chunk(head, [ChatDelta(delta.index, news, None if whole is None else reason_of(whole), logprobs)])
        if whole is None:
            return None
        news = self._message(whole, "")
        if isinstance(news.tool_calls, list):
            news.tool_calls = [{"index": index, **call} for index, call in enumerate(news.tool_calls)]
        if self._wish is not None:
            logprobs = chat_logprobs(self._wish, self._wish.places().take(whole.text, whole.tokens))
        return _chunk(head, [ChatDelta(delta.index, news, self._reason(whole), logprobs)])

    def end(self, head: Head, usage: UsageView) -> ChatChunk:
        return _chunk(head, [], usage)

    def _message(self, text: Text, role: str) -> ChatMessage:
        message = text.message or {}
        calls: list[dict[str, Any]] = message.get("tool_calls", [])
        if not calls:
            return ChatMessage(role, text.text)
        content = message.get("content") or None
        if self._is_older:
            return ChatMessage(role, content, function_call=calls[0]["function"])
        return ChatMessage(role, content, calls)

    def _logprobs(self, index: int, text: str, tokens: Sequence[TokenChoice]) -> ChatLogprobs | None:
        """Of what is new of an answer."""
        if self._wish is None:
            return None
        return chat_logprobs(self._wish, self._places[index].take(text, tokens))

    def _reason(self, text: Text) -> str:
        is_call = text.finish_reason == "tool_calls"
        return "function_call" if is_call and self._is_older else reason_of(text)


def _chunk(head: Head, choices: list[ChatDelta], usage: UsageView | None = None) -> ChatChunk:
    return ChatChunk(id=_id(head), choices=choices, created=head.created, model=head.model, usage=usage)


def _id(head: Head) -> str:
    return f"chatcmpl-{head.job_id}"


def _messages(fields: ChatFields) -> list[dict[str, Any]]:
    """With the calls and answers of older clients in the newer form."""
    found: list[dict[str, Any]] = []
    for message in fields.messages:
        if message.get("role") == "function":
            message = {**message, "role": "tool"}
        elif isinstance(call := message.get("function_call"), dict):
            others = {name: value for name, value in message.items() if name != "function_call"}
            message = {**others, "tool_calls": [{"type": "function", "function": call}]}
        found.append(message)
    return found


def _tools(fields: ChatFields) -> list[dict[str, Any]]:
    """The tools of a request; none where they must not be called. Raises InvalidInput for both forms at once, and for a
    choice that is not obeyed."""
    if fields.tools and fields.functions:
        raise InvalidInput("Found tools and functions. Expected one of both")
    name = "function_call" if fields.functions else "tool_choice"
    choice = getattr(fields, name)
    if choice not in (None, "auto", "none"):
        raise InvalidInput(f"{name}: found another value than auto and none. Expected one of both")
    if choice == "none":
        return []
    return fields.tools or [{"type": "function", "function": function} for function in fields.functions or []]


def structure_of(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """`response_format` as a field of SamplingParams. Raises InvalidInput for a kind that is unknown."""
    wish = response_format or {"type": "text"}
    kind = wish.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = wish.get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json_schema": schema["schema"]}
    raise InvalidInput(
        "response_format: found another form. Expected type text, json_object, or json_schema with json_schema.schema"
    )
