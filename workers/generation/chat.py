"""Messages and tools -> the prompt that a model's own template writes; an output -> messages.

    messages, tools -> checked -> template of the tokenizer or the caller, in the sandbox of transformers -> text
    output          -> calls of tools parsed -> messages of the assistant

Templates are programs of a model's folder. They run in the sandbox of Jinja that transformers makes, which lets them
read the messages and nothing else.

Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.registry.chat_messages import Message, checked_messages, checked_tools
from penstock.registry.errors import ConfigurationError, InvalidInput, shown
from penstock.workers.generation.outputs import ChatMessage, ChatOutput, CompletionOutput, RequestOutput
from penstock.workers.generation.tool_calls import TOOL_PARSERS, ParsedText, parse_tool_calls, parser_of_template

__all__ = ["ChatPrompt", "chat_output", "chat_prompt", "check_template", "parser_of"]


class ChatPrompt(NamedTuple):
    """What is asked in place of a prompt. template: in place of the tokenizer's own. parser: of calls of tools."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template: str | None = None
    parser: str | None = None

    @property
    def tool_names(self) -> list[str]:
        """The names that the model is told."""
        return [tool["function"]["name"] for tool in self.tools]


def parser_of(tokenizer: Any, prompt: ChatPrompt) -> str | None:
    """The parser of the calls; None: there are no tools. Raises InvalidInput where none is known."""
    if not prompt.tools:
        return None
    parser = prompt.parser or parser_of_template(str(prompt.template or tokenizer.chat_template))
    if parser is None:
        known = ", ".join(TOOL_PARSERS)
        raise InvalidInput(f"Found tools for a template that shows no form of calls, expected a tool_parser: {known}")
    return parser


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
    plain, known = checked_messages(messages), checked_tools(tools)
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


def check_template(tokenizer: Any, template: str | None) -> None:
    """Raises ConfigurationError for a template that no chat of the model can use. None: there is none to check."""
    if template is None:
        return
    if tokenizer is None:
        raise ConfigurationError("chat_template: found one for a model without a tokenizer, expected none")
    from jinja2 import TemplateSyntaxError

    # It may refuse this message. What is no template refuses all.
    try:
        chat_prompt(tokenizer, [{"role": "user", "content": "a"}], (), template)
    except InvalidInput as error:
        if isinstance(wrong := error.__cause__, TemplateSyntaxError):
            found = f"{shown(wrong.message or 'an error')} in line {wrong.lineno}"
            raise ConfigurationError(f"chat_template: found {found}, expected a template of Jinja") from error


def chat_output(output: RequestOutput, parser: str | None, tools: Sequence[str]) -> ChatOutput:
    """tools: the names that the model was told. Without any, all text is content."""
    return ChatOutput(tuple(_answer(each, parser, tools) for each in output.outputs), output)


def _answer(completion: CompletionOutput, parser: str | None, tools: Sequence[str]) -> ChatMessage:
    found = ParsedText(completion.text)
    if tools and parser is not None:
        found = parse_tool_calls(completion.text, parser, tools)
    is_call = found.tool_calls and completion.finish_reason == "stop"
    return ChatMessage(found.content, found.tool_calls, "tool_calls" if is_call else completion.finish_reason)
