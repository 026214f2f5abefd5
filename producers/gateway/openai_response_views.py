"""A job as a response of OpenAI's API. Pure: nothing is stored of a response beside its job.

resp_<id of the job>           ResponseId -> the job
resp_<id of the job>_tools     the same of a request with tools, whose text is told when it has ended

job that has not ended -> pending_view     text -> ended_view     error -> failed_view
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import msgspec

from penstock.producers.gateway.problems import Problem
from penstock.producers.gateway.text_jobs import Text, TextUsage
from penstock.registry.errors import UnknownJob
from penstock.registry.queues import job_time_ms, slot_of

__all__ = [
    "ResponseId",
    "ResponseUsage",
    "ResponseView",
    "calls_of",
    "content_of",
    "ended_view",
    "failed_view",
    "message_item",
    "pending_view",
    "text_part",
]

_PREFIX: Final = "resp_"
_WITH_TOOLS: Final = "_tools"
_INVALID: Final = 422

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseId(NamedTuple):
    """What the id of a response says. has_tools: whether the model may call functions."""

    job_id: str
    has_tools: bool

    @classmethod
    def read(cls, text: str) -> ResponseId:
        """Raises UnknownJob for a text of another form."""
        if not text.startswith(_PREFIX):
            raise UnknownJob(f"Unknown response {text!r:.120}. Expected an id that POST /v1/responses gave")
        job_id = text.removeprefix(_PREFIX)
        return cls(job_id.removesuffix(_WITH_TOOLS), job_id.endswith(_WITH_TOOLS))

    def __str__(self) -> str:
        return f"{_PREFIX}{self.job_id}{_WITH_TOOLS if self.has_tools else ''}"


class InputDetails(msgspec.Struct):
    """cached_tokens: those that were not computed anew."""

    cached_tokens: int


class OutputDetails(msgspec.Struct):
    """reasoning_tokens: 0, because no model here tells them apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)


class ResponseView(msgspec.Struct, kw_only=True):
    """A response as it is now. The fields of its request are not told: nothing of them is stored.

    created_at: unix seconds. output: messages and calls of functions. error: {"code", "message"} of one that failed.
    """

    id: str
    created_at: int
    model: str
    status: Status
    output: list[dict[str, Any]] = []
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    usage: ResponseUsage | None = None
    object: str = "response"
    parallel_tool_calls: bool = True
    tool_choice: str = "auto"
    tools: list[dict[str, Any]] = []


def pending_view(name: ResponseId, status: Status) -> ResponseView:
    """Of a job that has not ended, or that was cancelled."""
    created_at = (job_time_ms(name.job_id) or 0) // 1000
    return ResponseView(id=str(name), created_at=created_at, model=slot_of(name.job_id), status=status)


def ended_view(name: ResponseId, text: Text) -> ResponseView:
    """Of a job that has a text. Without its end it is incomplete."""
    view = pending_view(name, "completed")
    if text.finish_reason in ("length", "timeout"):
        view.status, view.incomplete_details = "incomplete", {"reason": "max_output_tokens"}
    calls, content = calls_of(name, text), content_of(text)
    view.output = [message_item(name, view.status, content)] if content or not calls else []
    view.output += calls
    view.usage = _usage(text.usage)
    return view


def failed_view(name: ResponseId, problem: Problem) -> ResponseView:
    """Of a job that failed."""
    view = pending_view(name, "failed")
    code = "invalid_prompt" if problem.status == _INVALID else "server_error"
    view.error = {"code": code, "message": problem.detail}
    return view


def content_of(text: Text) -> str:
    """The text without the calls of functions."""
    message = text.message or {}
    return str(message.get("content") or "") if message.get("tool_calls") else text.text


def calls_of(name: ResponseId, text: Text) -> list[dict[str, Any]]:
    """The calls of functions, as items."""
    calls: list[dict[str, Any]] = (text.message or {}).get("tool_calls", [])
    return [
        {
            "id": f"fc_{name.job_id}_{place}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            **call["function"],
        }
        for place, call in enumerate(calls)
    ]


def message_item(name: ResponseId, status: Status, content: str | None) -> dict[str, Any]:
    """A message of the assistant; None: it has no content yet."""
    parts = [] if content is None else [text_part(content)]
    item = {"id": f"msg_{name.job_id}", "type": "message", "role": "assistant", "status": status}
    return {**item, "content": parts}


def text_part(text: str) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: TextUsage) -> ResponseUsage:
    details = InputDetails(usage.cached)
    return ResponseUsage(usage.prompt, usage.completion, usage.prompt + usage.completion, details)
