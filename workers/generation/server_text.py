"""The events of a text server -> outputs like those of our engine. Pure.

    event: {"choices": [...], "usage": ...} -> ServerText.take -> is there something new? -> ServerText.output
    TGI:   {"token": {...}, "details": ...}  ---'

A server that is asked again, after a break or by another worker, writes its text from the beginning. What was known of
it before is not delivered again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.registry.errors import ModelError, shown
from penstock.registry.package.text_server import RuntimeKind
from penstock.workers.generation.backend import Wish
from penstock.workers.generation.chat import ChatPrompt
from penstock.workers.generation.outputs import (
    ChatMessage,
    CompletionOutput,
    Delta,
    FinishReason,
    RequestOutput,
    Usage,
)
from penstock.workers.generation.stop_strings import first_stop, held_back
from penstock.workers.generation.tool_calls import ToolCall

__all__ = ["ServerText"]

_MOST_CHARACTERS: Final = 1 << 24
_REASONS: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
}


@dataclass(slots=True)
class _Choice:
    """One text. calls: (name, arguments) of tools, by their number. is_cut: a stop string was found here."""

    text: str = ""
    reason: FinishReason | None = None
    is_cut: bool = False
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def message(self) -> ChatMessage:
        calls = tuple(ToolCall(*call) for _, call in sorted(self.calls.items()))
        return ChatMessage(self.text, calls, "tool_calls" if calls and self.reason == "stop" else self.reason)


class ServerText:
    """The texts of one request. known: what was delivered of the first one.

    TGI has the stop string in its texts, and finds it only at the end of a token: they are cut here.
    """

    def __init__(self, wish: Wish, kind: RuntimeKind = "openai") -> None:
        self.wish: Final = wish
        self._has_tokens: Final = kind == "tgi" and not isinstance(wish.prompt, ChatPrompt)
        """Whether an event has a token, in TGI's own form."""
        self._stops: Final = tuple(wish.params.stop) if kind == "tgi" else ()
        self.known = "" if wish.delivered is None else wish.delivered.text
        self.usage: Usage | None = None
        self._choices: list[_Choice] = []
        self.characters = 0
        self.begin()

    def begin(self) -> None:
        """The server writes from the beginning."""
        self._choices = [_Choice() for _ in range(self.wish.params.n)]
        self.characters = 0
        self.usage = None

    @property
    def ends_with_done(self) -> bool:
        """Whether [DONE] follows the last event."""
        return not self._has_tokens

    @property
    def is_whole(self) -> bool:
        """Whether every text has its end."""
        return all(choice.reason is not None for choice in self._choices)

    def agrees(self, *, is_whole: bool) -> bool:
        """Whether the text is that which is known: as far as both go, or all of what is known."""
        text = self._choices[0].text
        return text.startswith(self.known) or (not is_whole and self.known.startswith(text))

    def catch_up(self) -> None:
        """No more of the text comes: what is known of it is not taken back."""
        if self.known.startswith(self._choices[0].text):
            self._choices[0].text = self.known

    @property
    def has_news(self) -> bool:
        """Whether the first text goes beyond what is known."""
        return self._shown() > len(self.known)

    def _shown(self) -> int:
        """The length of the first text without an end that may become a stop string."""
        first = self._choices[0]
        is_open = first.reason is None and not first.is_cut
        return len(first.text) - (held_back(first.text, self._stops) if is_open else 0)

    def take(self, data: bytes) -> None:
        """One event. Raises ModelError for one that is none of a text, and for an error of the server."""
        try:
            event = json.loads(data)
            if "error" in event:
                raise ModelError(f"The text server failed: {shown(_told(event['error']))}")
            if self._has_tokens:
                self._take_token(self._choices[0], event)
                return
            for choice in event["choices"]:
                self._take_choice(self._choices[choice.get("index", 0)], choice)
            if (usage := event.get("usage")) is not None:
                self.usage = _usage(usage)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError):
            expected = "TGI's form" if self._has_tokens else "OpenAI's form"
            raise ModelError(f"The text server sent an event that is none of a text. Expected {expected}") from None

    def output(self, *, is_last: bool, ends: FinishReason | None = None) -> RequestOutput:
        """What is new, which is known from here on. ends: how texts end that have no end yet."""
        wish, texts = self.wish, self._choices
        for text in texts if ends is not None else ():
            text.reason = text.reason or ends
        shown_text = texts[0].text[: self._shown()]
        new = shown_text[len(self.known) :]
        self.known = max(self.known, shown_text, key=len)
        outputs = [CompletionOutput(i, one.text, (), one.reason, None, None) for i, one in enumerate(texts)]
        prompt = wish.prompt
        return RequestOutput(
            wish.request_id,
            prompt if isinstance(prompt, str) else None,
            (),
            tuple(outputs),
            is_last,
            self.usage or Usage(0, 0, 0),
            (Delta(new, ()), *(Delta("", ()) for _ in texts[1:])),
            messages=tuple(one.message for one in texts) if isinstance(prompt, ChatPrompt) else None,
        )

    def _take_token(self, own: _Choice, event: Mapping[str, Any]) -> None:
        """An event of TGI. The last one has details; special tokens, such as the end, are no text."""
        token = event["token"]
        self._append(own, "" if token["special"] else token["text"])
        if (details := event.get("details")) is not None:
            self._end(own, details["finish_reason"])
            self.usage = Usage(int(details["input_length"]), int(details["generated_tokens"]), 0)

    def _take_choice(self, own: _Choice, choice: Mapping[str, Any]) -> None:
        if isinstance(self.wish.prompt, ChatPrompt):
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            calls = delta.get("tool_calls") or ()
            # Earlier versions of TGI send one call instead of a list.
            for number, call in enumerate([calls] if isinstance(calls, Mapping) else calls):
                _add_call(own.calls, call.get("index", number), call["function"])
        else:
            text = choice.get("text") or ""
        self._append(own, text)
        if (reason := choice.get("finish_reason")) is not None:
            self._end(own, reason)

    def _append(self, own: _Choice, text: object) -> None:
        if not isinstance(text, str):
            raise TypeError("no text")
        self.characters += len(text)
        if self.characters > _MOST_CHARACTERS:
            raise ModelError(f"The text server wrote more than {_MOST_CHARACTERS} characters. Expected max_tokens")
        if own.is_cut:
            return
        before = len(own.text)
        own.text += text
        longest = max(map(len, self._stops), default=0)
        if (found := first_stop(own.text, self._stops, max(0, before - longest))) is not None:
            own.text, own.is_cut = own.text[: found[0]], True

    def _end(self, own: _Choice, reason: object) -> None:
        if reason not in _REASONS:
            raise ModelError(f"The text server ended a text with {shown(reason)}. Expected stop or length")
        own.reason = "stop" if own.is_cut else _REASONS[str(reason)]


def _add_call(calls: dict[int, tuple[str, str]], number: int, function: Mapping[str, Any]) -> None:
    """The name of a call comes at once, its arguments in pieces."""
    name, arguments = calls.get(number, ("", ""))
    calls[number] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))


def _usage(found: Mapping[str, Any]) -> Usage:
    details = found.get("prompt_tokens_details") or {}
    return Usage(
        int(found["prompt_tokens"]), int(found.get("completion_tokens") or 0), int(details.get("cached_tokens") or 0)
    )


def _told(error: object) -> object:
    return error.get("message", "no reason") if isinstance(error, Mapping) else error
