"""What a request gives back: RequestOutput, once at its end or at each step of a stream.

Those of a step are structs of msgspec: a stream makes four of them for each token, at a sixteenth of the cost of frozen
dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.workers.generation.tool_calls import ToolCall

__all__ = [
    "ChatMessage",
    "ChatOutput",
    "CompletionOutput",
    "Delta",
    "EngineStats",
    "FinishReason",
    "RequestOutput",
    "Usage",
]

FinishReason = Literal["abort", "error", "length", "stop", "timeout"]


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Counts of tokens. completion_tokens: of all texts. cached_tokens: of the prompt, found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class CompletionOutput(msgspec.Struct, frozen=True, gc=False):
    """All that was generated so far."""

    index: int
    text: str
    """Empty where the model has no tokenizer."""
    token_ids: tuple[int, ...]
    """With the token that ended the text."""
    finish_reason: FinishReason | None
    """None before the end. error: the model gave logits that are not finite."""
    stop_reason: int | str | None
    """The token or the string that ended the text."""
    logprobs: tuple[dict[int, float], ...] | None
    """At each token: its own log probability and those of the most probable ones."""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What is new in one text since the last output."""

    text: str
    token_ids: tuple[int, ...]


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """The state of a request, and what is new in it since the last output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    usage: Usage
    deltas: tuple[Delta, ...]
    """Of each of the outputs."""
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    """At each token of the prompt that was computed; None at the first, which has nothing before it."""
    messages: tuple[ChatMessage, ...] | None = None
    """The answers to a chat, where another server has parsed them."""

    @property
    def delta_text(self) -> str:
        """Of the first output."""
        return self.deltas[0].text

    @property
    def delta_token_ids(self) -> tuple[int, ...]:
        """Of the first output."""
        return self.deltas[0].token_ids


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of the assistant. content: without the calls of tools."""

    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason | Literal["tool_calls"] | None


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The messages that answer a chat, and the output that they are from."""

    messages: tuple[ChatMessage, ...]
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made, and the present state."""

    waiting: int
    running: int
    requests_finished: int
    """However they have ended."""
    steps: int
    """That computed something."""
    rows: int
    """Texts in these steps, added up: over `steps`, it is the mean batch."""
    preemptions: int
    prompt_tokens_computed: int
    tokens_generated: int
    pages_used: int
    pages_peak: int
    """The most that were used in a step."""
    pages_total: int
    pages_cached: int
    prefix_tokens_found: int
    prefix_tokens_queried: int
    draft_tokens: int
    draft_tokens_accepted: int
