"""Messages and tools -> the prompt that a model's own template writes -> tokens; an output -> messages.

    messages, tools -> checked -> template of the tokenizer or the caller, in the sandbox of transformers -> text
    output          -> calls of tools parsed -> messages of the assistant

Templates are programs of a model's folder. They run in the sandbox of Jinja that transformers makes, which lets them
read the messages and nothing else.

Importing this module imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.registry.errors import InvalidInput, described, shown
from penstock.workers.generation.outputs import ChatMessage, ChatOutput, CompletionOutput, RequestOutput
from penstock.workers.generation.tool_calls import ParsedText, parse_tool_calls

__all__ = ["Message", "chat_output", "chat_prompt", "chat_tokens"]

Message = Mapping[str, Any]
"""role, content, and what the role has: tool_calls of an assistant, name and tool_call_id of a tool."""

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MAX_MESSAGES: Final = 4_096


def chat_tokens(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), template: str | None = None
) -> list[int]:
    """The prompt in tokens. The template writes the beginning of a text itself, so nothing is added to it."""
    text = chat_prompt(tokenizer, messages, tools, template)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def chat_prompt(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), template: str | None = None
) -> str:
    """The prompt that asks for the next message of the assistant. template: in place of the tokenizer's own.

    Raises InvalidInput for messages of a wrong form, for a model without a template, and where the template refuses.
    """
    if tokenizer is None:
        raise InvalidInput("Found messages for a model without a tokenizer, expected a prompt of token ids")
    if template is None and not tokenizer.chat_template:
        raise InvalidInput("Found messages for a model without a chat template, expected a prompt")
    plain = [_message(at, message) for at, message in enumerate(_listed("messages", messages))]
    if not plain:
        raise InvalidInput("messages: found an empty list, expected at least one message")
    known = [_tool(at, tool) for at, tool in enumerate(_listed("tools", tools))]
    try:
        text = tokenizer.apply_chat_template(
            plain, tools=known or None, chat_template=template, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:
        # A template is a program: it raises its own refusals, and whatever its mistakes raise.
        raise InvalidInput(f"The chat template refused the messages: {shown(error)}") from error
    if not isinstance(text, str) or not text:
        raise InvalidInput("The chat template wrote an empty prompt, expected at least one character")
    return text


def chat_output(output: RequestOutput, parser: str | None, tools: Sequence[str]) -> ChatOutput:
    """tools: the names that the model was told. Without any, all text is content."""
    return ChatOutput(tuple(_answer(each, parser, tools) for each in output.outputs), output)


def _answer(completion: CompletionOutput, parser: str | None, tools: Sequence[str]) -> ChatMessage:
    found = ParsedText(completion.text)
    if tools and parser is not None:
        found = parse_tool_calls(completion.text, parser, tools)
    is_call = found.tool_calls and completion.finish_reason == "stop"
    return ChatMessage(found.content, found.tool_calls, "tool_calls" if is_call else completion.finish_reason)


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


def _content(where: str, message: Mapping[str, Any]) -> str:
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
