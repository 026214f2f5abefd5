"""A wish -> the request to a text server: its route and its JSON. Pure.

             prompt, token ids                       messages, tools
    openai   /v1/completions                         /v1/chat/completions
    vllm     the same, with structured_outputs       the same, with structured_outputs
    tgi      /generate_stream, no token ids          /v1/chat/completions, with its own response_format

The caller has refused the fields that the server does not obey.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from penstock.registry.chat_messages import Message
from penstock.registry.package.text_server import RuntimeKind
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.backend import Wish
from penstock.workers.generation.chat import ChatPrompt

__all__ = ["request_of"]

_ALWAYS: Final = ("max_tokens", "temperature", "seed")
"""Fields whose defaults differ from server to server, so they are always sent; a seed where there is one."""
_FORMS: Final = ("json_schema", "regex", "choice", "grammar")
_VLLM_FORMS: Final = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_MOST_SEED: Final = 2**63 - 1
"""Servers read seeds as signed integers of 64 bits."""
_CHAT: Final = "/v1/chat/completions"


def request_of(wish: Wish, model: str, kind: RuntimeKind = "openai") -> tuple[str, bytes]:
    """(path behind the server's URL, body)."""
    prompt = wish.prompt
    if not isinstance(prompt, ChatPrompt):
        if kind == "tgi":
            return "/generate_stream", _json({"inputs": prompt, "parameters": _tgi_parameters(wish.params)})
        written = prompt if isinstance(prompt, str) else list(prompt)
        return "/v1/completions", _json(_body(wish, model, kind) | {"prompt": written})
    body = _body(wish, model, kind) | {"messages": [_as_sent(message) for message in prompt.messages]}
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    return _CHAT, _json(body)


def _body(wish: Wish, model: str, kind: RuntimeKind) -> dict[str, Any]:
    """The fields that both of OpenAI's routes have."""
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    form = _form(wish.params, kind, is_chat=isinstance(wish.prompt, ChatPrompt))
    return common | _sampling(wish.params) | (_models_own(wish.params) if kind == "vllm" else {}) | form


def _as_sent(message: Message) -> Message:
    """A message with the arguments of its calls as JSON, as clients send them. Templates get the values."""
    if not (calls := message.get("tool_calls")):
        return message
    return {**message, "tool_calls": [{**call, "function": _with_json(call["function"])} for call in calls]}


def _with_json(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else _json(arguments).decode()}


def _models_own(params: SamplingParams) -> dict[str, Any]:
    """Fields that vLLM takes from the model's generation_config.json where they are left out."""
    found = {name: getattr(params, name) for name in ("top_p", "min_p", "repetition_penalty")}
    # Versions before 0.9 refuse 0.
    return found | {"top_k": params.top_k or -1}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Fields with their defaults are left out, but for those whose defaults differ. Without the form."""
    found = {"max_tokens": params.max_tokens, "temperature": params.temperature}
    if params.seed is not None:
        found["seed"] = params.seed & _MOST_SEED
    return found | _further(params)


def _further(params: SamplingParams) -> dict[str, Any]:
    plain: Any = SamplingParams()
    own = {*_ALWAYS, *_FORMS, "timeout_s"}
    return {
        field.name: getattr(params, field.name)
        for field in fields(params)
        if field.name not in own and getattr(params, field.name) != getattr(plain, field.name)
    }


def _form(params: SamplingParams, kind: RuntimeKind, *, is_chat: bool) -> dict[str, Any]:
    """The fields that say which form the text has: {} where it may have any."""
    name = next((name for name in _FORMS if getattr(params, name) is not None), None)
    if name is None:
        return {}
    value = getattr(params, name)
    if kind == "openai" and not (is_chat and name == "json_schema"):
        return {name: value}
    if name == "json_schema":
        value = json.loads(value) if isinstance(value, str) else value
    if kind == "vllm":
        # Servers before 0.11 read the second name. Each ignores what it does not know, and would write any text.
        own = _VLLM_FORMS[name]
        return {"structured_outputs": {own: value}, f"guided_{own}": value}
    if kind == "tgi":
        return {"response_format": _tgi_grammar(name, value)}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "text", "schema": value}}}


def _tgi_parameters(params: SamplingParams) -> dict[str, Any]:
    """TGI has no temperature 0: without `do_sample` it is greedy."""
    found: dict[str, Any] = {"max_new_tokens": params.max_tokens, "details": True, "do_sample": not params.is_greedy}
    if not params.is_greedy:
        found["temperature"] = params.temperature
    if params.seed is not None:
        found["seed"] = params.seed & _MOST_SEED
    form = _form(params, "tgi", is_chat=False)
    return found | _further(params) | ({"grammar": form["response_format"]} if form else {})


def _tgi_grammar(name: str, value: Any) -> dict[str, Any]:
    return {"type": "json" if name == "json_schema" else name, "value": value}


def _json(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()
