"""A wish -> the request to a text server: its route and its JSON. Pure.

    prompt, token ids -> /v1/completions
    messages, tools   -> /v1/chat/completions

The caller has refused the fields that the server does not obey.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Final

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.backend import Wish
from penstock.workers.generation.chat import ChatPrompt

__all__ = ["request_of"]

_OWN: Final = ("timeout_s", "json_schema", "max_tokens", "temperature", "seed")
"""Fields that are not sent as they are, or that are always sent."""
_MOST_SEED: Final = 2**63 - 1
"""Servers read seeds as signed integers of 64 bits."""


def request_of(wish: Wish, model: str) -> tuple[str, bytes]:
    """(path behind the server's URL, body)."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _sampling(wish.params)
    prompt = wish.prompt
    if not isinstance(prompt, ChatPrompt):
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        if wish.params.json_schema is not None:
            body["json_schema"] = wish.params.json_schema
        return "/v1/completions", _json(body)
    body["messages"] = list(prompt.messages)
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    if (schema := wish.params.json_schema) is not None:
        whole = json.loads(schema) if isinstance(schema, str) else schema
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "text", "schema": whole}}
    return "/v1/chat/completions", _json(body)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Fields with their defaults are left out, but for those whose defaults differ from server to server."""
    plain: Any = SamplingParams()
    chosen = {
        field.name: getattr(params, field.name)
        for field in fields(params)
        if field.name not in _OWN and getattr(params, field.name) != getattr(plain, field.name)
    }
    found = {"max_tokens": params.max_tokens, "temperature": params.temperature, **chosen}
    return found if params.seed is None else {**found, "seed": params.seed & _MOST_SEED}


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()
