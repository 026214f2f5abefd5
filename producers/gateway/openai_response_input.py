"""The input of OpenAI's responses -> messages and tools of a chat, as chat templates read them. Pure.

instructions, input: a text, or messages, calls of functions and their outputs -> messages
tools: [{"type": "function", "name", "parameters"}]                            -> tools of a chat
text: {"format": {"type", "schema"}}                                           -> response_format of a chat
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.registry.errors import InvalidInput, described

__all__ = ["format_of", "messages_of", "tools_of"]

_TEXTS: Final = ("input_text", "output_text", "text")
_ITEMS: Final = "messages, function_call and function_call_output"


def messages_of(instructions: str | None, given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Raises InvalidInput for items that no text model reads."""
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    if not given:
        raise InvalidInput("input: found an empty list, expected a text, or at least one message")
    for at, item in enumerate(given):
        where, kind = f"input[{at}]", item.get("type", "message")
        if kind == "message":
            found.append({"role": item.get("role"), "content": _content(where, item.get("content"))})
        elif kind == "function_call":
            _add_call(found, where, item)
        elif kind == "function_call_output":
            answer = _content(f"{where}.output", item.get("output"))
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": answer})
        else:
            raise InvalidInput(f"{where}.type: found {described(kind)}, expected {_ITEMS}")
    return found


def tools_of(tools: Sequence[Mapping[str, Any]] | None, choice: object) -> list[dict[str, Any]]:
    """The tools of a chat; none where they must not be called. Raises InvalidInput for other kinds than functions."""
    if choice not in (None, "auto", "none"):
        raise InvalidInput("tool_choice: found another value than auto and none. Expected one of both")
    found: list[dict[str, Any]] = []
    for at, tool in enumerate(tools or ()):
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise InvalidInput(f"tools[{at}]: found another form. Expected type function, and a name beside it")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return [] if choice == "none" else found


def format_of(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as the `response_format` of a chat. Raises InvalidInput for a kind that is unknown."""
    wish = (text or {}).get("format")
    if wish is None:
        return None
    kind = wish.get("type") if isinstance(wish, Mapping) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "json_schema" and isinstance(wish.get("schema"), Mapping):
        return {"type": kind, "json_schema": {"schema": wish["schema"]}}
    raise InvalidInput("text.format: found another form. Expected type text, json_object, or json_schema with schema")


def _add_call(found: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Calls that stand side by side belong to one message of the assistant, and to its text before them."""
    if not isinstance(item.get("name"), str):
        raise InvalidInput(f"{where}: found a call without a name. Expected call_id, name and arguments")
    function = {"name": item["name"], "arguments": item.get("arguments", "{}")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    found[-1].setdefault("tool_calls", []).append(call)


def _content(where: str, content: object) -> Any:
    """A text as it is; parts in the form of chats."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidInput(f"{where}: found {described(content)}, expected a text or a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise InvalidInput(f"{where}: found a part {described(kind)}, expected parts of type input_text")
        parts.append({"type": "text", "text": part["text"]})
    return parts
