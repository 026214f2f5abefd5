"""The text of an assistant -> its content and the tools that it calls. Pure.

    parser        text of a call
    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number; also Qwen
    llama3_json   {"name": ..., "parameters": {...}}, alone, or several with a semicolon between them
    mistral       [TOOL_CALLS] [{"name": ..., "arguments": {...}}]

A text that looks like a call and is none stays content: the caller sees what the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.registry.errors import InvalidInput, described

__all__ = ["TOOL_PARSERS", "ParsedText", "ToolCall", "parse_tool_calls", "parser_of_template"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON, as clients expect it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """content: what is left without the calls."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def parse_tool_calls(text: str, parser: str, tools: Collection[str]) -> ParsedText:
    """tools: the names that the model was told. A call of another one stays content.

    Raises InvalidInput for an unknown parser.
    """
    if parser not in TOOL_PARSERS:
        raise InvalidInput(f"Tool parser: found {described(parser)}, expected one of: {', '.join(TOOL_PARSERS)}")
    found = TOOL_PARSERS[parser](text)
    if all(call.name in tools for call in found.tool_calls):
        return found
    return ParsedText(text)


def parser_of_template(template: str) -> str | None:
    """The parser whose form a chat template shows; None where it shows none that is known."""
    for sign, parser in _SIGNS:
        if sign in template:
            return parser
    return None


def _hermes(text: str) -> ParsedText:
    calls: list[ToolCall] = []
    kept, at = [], 0
    while (start := text.find(_OPEN, at)) >= 0:
        value, end = _json_at(text, start + len(_OPEN))
        call = _call(value, "arguments")
        if call is None:
            kept.append(text[at : start + len(_OPEN)])
            at = start + len(_OPEN)
            continue
        calls.append(call)
        kept.append(text[at:start])
        # A text that ends at its last brace is complete, too.
        rest = text[end:].lstrip()
        at = len(text) - len(rest) + (len(_CLOSE) if rest.startswith(_CLOSE) else 0)
    kept.append(text[at:])
    return ParsedText("".join(kept).strip() if calls else text, tuple(calls))


def _llama3_json(text: str) -> ParsedText:
    calls = []
    rest = text.strip().removeprefix(_TAG).lstrip()
    while rest:
        value, end = _json_at(rest, 0)
        call = _call(value, "parameters") or _call(value, "arguments")
        rest = rest[end:].lstrip()
        if call is None or (rest and not rest.startswith(";")):
            return ParsedText(text)
        calls.append(call)
        rest = rest[1:].lstrip()
    return ParsedText("" if calls else text, tuple(calls))


def _mistral(text: str) -> ParsedText:
    # The sign is a special token, which decoded texts have not.
    before, sign, behind = text.rpartition(_MISTRAL)
    values, end = _json_at(behind, 0)
    calls = [_call(value, "arguments") for value in values] if isinstance(values, list) else []
    if not calls or None in calls or behind[end:].strip():
        return ParsedText(text)
    return ParsedText(before.strip() if sign else "", tuple(call for call in calls if call is not None))


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """(value, place behind it); (None, start) where no JSON begins."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _call(value: Any, arguments: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    if isinstance(given, str):
        # Some models write the arguments as JSON within JSON.
        given = _json_at(given, 0)[0]
    if not isinstance(given, dict):
        return None
    try:
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        # Infinity, or half a character: nobody could read the call.
        return None
    return ToolCall(value["name"], text)


_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_TAG: Final = "<|python_tag|>"
_MISTRAL: Final = "[TOOL_CALLS]"
TOOL_PARSERS: Final[Mapping[str, Callable[[str], ParsedText]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}
_SIGNS: Final = ((_OPEN, "hermes"), (_MISTRAL, "mistral"), (_TAG, "llama3_json"), ("ipython", "llama3_json"))
