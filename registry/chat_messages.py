"""Messages and tools of a chat, as clients of OpenAI's API write them -> checked, in the form that chat templates read.

    [{"role", "content", "tool_calls"?}, ...] -> checked_messages -> contents as texts, arguments of calls as values
    [{"type": "function", "function": {"name", ...}}, ...] -> checked_tools

Pure. Producers check before anything is queued, and the worker again: a job may come from another client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.registry.errors import InvalidInput, described

__all__ = ["Message", "checked_messages", "checked_tools"]

Message = Mapping[str, Any]
"""role, content, and what the role has: tool_calls of an assistant, name and tool_call_id of a tool."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MAX_MESSAGES: Final = 4_096


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Raises InvalidInput for messages of a wrong form, and for none."""
    plain = [_message(at, message) for at, message in enumerate(_listed("messages", messages))]
    if not plain:
        raise InvalidInput("messages: found an empty list, expected at least one message")
    return plain


def checked_tools(tools: object) -> list[Mapping[str, Any]]:
    """Raises InvalidInput for tools of a wrong form."""
    return [_tool(at, tool) for at, tool in enumerate(_listed("tools", tools))]


def _listed(name: str, given: object) -> Sequence[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidInput(f"{name}: found {described(given)}, expected a list")
    if len(given) > _MAX_MESSAGES:
        raise InvalidInput(f"{name}: found {len(given)}, expected at most {_MAX_MESSAGES}")
    return given


def _message(at: int, message: object) -> dict[str, Any]:
    where = f"messages[{at}]"
    if not isinstance(message, Mapping):
        raise InvalidInput(f"{where}: found {described(message)}, expected a mapping with role and content")
    if message.get("role") not in _ROLES:
        raise InvalidInput(
            f"{where}.role: found {described(message.get('role'))}, expected one of: {', '.join(_ROLES)}"
        )
    plain = {**message, "content": _content(where, message)}
    if message.get("tool_calls"):
        calls = _listed(f"{where}.tool_calls", message["tool_calls"])
        plain["tool_calls"] = [_call(f"{where}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    return plain


def _content(where: str, message: Message) -> str:
    """Templates of text models know texts only, so parts are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidInput(f"{where}.content: found {described(content)}, expected a text or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidInput(f"{where}.content: found a part {described(kind)}, expected parts of type text")
        texts.append(part["text"])
    return "".join(texts)


def _call(where: str, call: object) -> dict[str, Any]:
    """Clients send arguments as JSON; templates write them, so they get the values."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidInput(f"{where}: found {described(call)}, expected a function with name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{where}.function.arguments: found {described(arguments)}, expected JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(at: int, tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidInput(f"tools[{at}]: found {described(tool)}, expected type function, and a function with a name")
    return tool
