"""vLLM and TGI as their request forms and events are documented: what they refuse, obey and ignore.

Both write one fixed text, token by token. A request that asks for a form, by a name that the server knows, gets the
text of the form. An unknown name is ignored, as the real ones do, so a field under a wrong name shows in the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.workers.generation.text_servers import Asked, Reply, chat_event, event, usage

__all__ = ["FORM", "TEXT", "tgi", "vllm"]

TEXT = ("one", " two", " thr", "ee.", " four")
"""The pieces of a text without a form."""
FORM = '{"a": 1}'
"""The text of any form."""
_NUMBER = (int, float)
_VLLM: dict[str, Any] = {
    "model": str,
    "prompt": (str, list),
    "messages": list,
    "tools": list,
    "stream": bool,
    "stream_options": dict,
    "max_tokens": int,
    "n": int,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": int,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "seed": int,
    "stop": list,
    "stop_token_ids": list,
    "ignore_eos": bool,
    "min_tokens": int,
    "allowed_token_ids": list,
    "logit_bias": dict,
}
_VLLM_FORMS: dict[str, Any] = {"json": (str, dict), "regex": str, "choice": list, "grammar": str}
_TGI: dict[str, Any] = {
    "temperature": _NUMBER,
    "repetition_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "top_k": int,
    "top_p": _NUMBER,
    "do_sample": bool,
    "max_new_tokens": int,
    "stop": list,
    "details": bool,
    "seed": int,
    "grammar": dict,
}
_TGI_CHAT: dict[str, Any] = {
    "model": str,
    "messages": list,
    "tools": list,
    "stream": bool,
    "stream_options": dict,
    "max_tokens": int,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": int,
    "stop": list,
    "n": int,
    "logit_bias": list,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "response_format": dict,
}


def vllm(*, is_old: bool = False) -> Callable[[Asked], Reply]:
    """is_old: before 0.11, when the names of forms began with `guided_`."""

    def answer(asked: Asked) -> Reply:
        body = asked.body
        if asked.path not in ("/v1/completions", "/v1/chat/completions"):
            return Reply(status=404, body='{"detail": "Not Found"}')
        if (wrong := _wrong(body, _VLLM)) is not None:
            return _refused(400, f"{wrong}: Input should be a valid value")
        forms = _guided(body) if is_old else body.get("structured_outputs") or {}
        if len(forms) > 1 or any(not isinstance(value, _VLLM_FORMS[name]) for name, value in forms.items()):
            return _refused(400, "You can only use one kind of constraints for structured outputs")
        pieces = _cut((FORM,) if forms else TEXT, body.get("stop", ()), keeps=False)
        return _openai(pieces, is_chat="messages" in body)

    return answer


def _guided(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: body[f"guided_{name}"] for name in _VLLM_FORMS if f"guided_{name}" in body}


def tgi(asked: Asked) -> Reply:
    """Stop strings stay in the text, and are found only where a token ends with them."""
    body = asked.body
    if asked.path == "/v1/chat/completions":
        if (wrong := _wrong(body, _TGI_CHAT)) is not None:
            return _tgi_refused(f"{wrong}: invalid type")
        if body.get("top_p") == 1 or body.get("temperature", 1) < 0:
            return _tgi_refused("`top_p` must be > 0.0 and < 1.0")
        if body.get("tools") and body.get("response_format"):
            return _tgi_refused("Grammar and tools are mutually exclusive")
        form = body.get("response_format")
        if form is not None and not _is_grammar(form):
            return _tgi_refused("response_format: unknown variant")
        return _openai(_cut((FORM,) if form else TEXT, body.get("stop", ()), keeps=True), is_chat=True)
    if asked.path != "/generate_stream":
        return Reply(status=404)
    parameters = body.get("parameters", {})
    if not isinstance(body.get("inputs"), str) or (wrong := _wrong(parameters, _TGI)) is not None:
        return _tgi_refused("Failed to deserialize the JSON body into the target type")
    if parameters.get("temperature", 1) <= 0 or parameters.get("top_k", 1) <= 0 or parameters.get("top_p", 0.5) >= 1:
        return _tgi_refused("`temperature` must be strictly positive")
    grammar = parameters.get("grammar")
    if grammar is not None and not _is_grammar(grammar):
        return _tgi_refused("grammar: unknown variant")
    return Reply(_tokens(_cut((FORM,) if grammar else TEXT, parameters.get("stop", ()), keeps=True), parameters))


def _is_grammar(found: Mapping[str, Any]) -> bool:
    return found.get("type") in ("json", "regex") and set(found) == {"type", "value"}


def _tokens(pieces: list[str], parameters: Mapping[str, Any]) -> list[str]:
    """The events of /generate_stream. The end is a special token; no [DONE] follows."""
    events = []
    for index, piece in enumerate([*pieces, "</s>"], 1):
        is_last = index == len(pieces) + 1
        token = {"id": index, "text": piece, "logprob": -0.5, "special": is_last}
        details = {"finish_reason": "eos_token", "generated_tokens": index, "seed": None, "input_length": 3}
        shown = details if is_last and parameters.get("details") else None
        whole = "".join(pieces) if is_last else None
        events.append(json.dumps({"index": index, "token": token, "generated_text": whole, "details": shown}))
    return events


def _openai(pieces: list[str], *, is_chat: bool) -> Reply:
    piece = (lambda text: chat_event(role="assistant", content=text)) if is_chat else event
    last = chat_event("stop", content="") if is_chat else event("", "stop")
    return Reply([*map(piece, pieces), last, usage(3, len(pieces)), "[DONE]"])


def _cut(pieces: tuple[str, ...], stops: list[str] | tuple[()], *, keeps: bool) -> list[str]:
    """keeps: the stop string stays, and only one at the end of a piece is found."""
    text = ""
    for number, piece in enumerate(pieces, 1):
        text += piece
        for stop in stops:
            if keeps and text.endswith(stop):
                return list(pieces[:number])
            if not keeps and stop in text:
                return [text[: text.index(stop)]]
    return list(pieces)


def _wrong(body: Mapping[str, Any], kinds: Mapping[str, Any]) -> str | None:
    """The name of a known field of the wrong type. Unknown ones are ignored."""
    return next((name for name, value in body.items() if not isinstance(value, kinds.get(name, object))), None)


def _refused(status: int, message: str) -> Reply:
    return Reply(status=status, body=json.dumps({"error": {"message": message, "code": status}}))


def _tgi_refused(message: str) -> Reply:
    return Reply(status=422, body=json.dumps({"error": message, "error_type": "validation"}))
