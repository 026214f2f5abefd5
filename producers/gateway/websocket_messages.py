"""The messages of a WebSocket. Text frames hold JSON, binary frames MessagePack; an answer has the form of its request.

    {"id", "model", "inputs", ...}  run a job        -> outputs, or the job's events, or {"error"}
    {"id", "job", "after"}          follow a job     -> its events behind that number
    {"cancel": id}                  cancel a request -> the end of that request

The id is the client's own, and each message about a request repeats it. A request without one is answered without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from penstock.producers.events import JobEvent
from penstock.producers.gateway.event_stream import event_data
from penstock.producers.gateway.exchange import JSON
from penstock.producers.gateway.problems import Problem
from penstock.producers.gateway.tensors import (
    MSGPACK,
    Document,
    fields_of,
    json_document,
    msgpack_document,
    write_outputs,
)
from penstock.registry.codecs import Codec
from penstock.registry.queues import PriorityName

__all__ = [
    "Ask",
    "Cancel",
    "Follow",
    "RequestId",
    "Written",
    "asked",
    "id_of",
    "request_of",
    "written",
    "written_event",
    "written_problem",
]

RequestId: TypeAlias = str | int | None
Written: TypeAlias = str | bytes
"""A message: text is sent as a text frame, bytes as a binary one."""


class Ask(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A job. inputs: a tensor for each input, or one row of numbers. stream: None as the model has it. traceparent:
    empty: that of the handshake."""

    id: RequestId = None
    model: str | None = None
    version: str | None = None
    inputs: Any = None
    outputs: list[str] = []
    priority: PriorityName = "normal"
    timeout_ms: float | None = None
    idempotency_key: str | None = None
    traceparent: str = ""
    stream: bool | None = None


class Follow(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A job by its id. after: the number of the last event that was seen."""

    job: str
    id: RequestId = None
    after: int = 0


class Cancel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """cancel: the id of an open request of this connection."""

    cancel: str | int


def asked(message: Mapping[str, Any]) -> tuple[Document, bytes]:
    """(document, content type of the answer) of a received frame. Raises InvalidInput."""
    text = message.get("text")
    if text is not None:
        return json_document(text.encode()), JSON
    return msgpack_document(message["bytes"]), MSGPACK


def request_of(document: Document) -> Ask | Follow | Cancel:
    """The request of a document. Raises InvalidInput."""
    if "job" in document.fields:
        return fields_of(document, Follow)
    if "cancel" in document.fields:
        return fields_of(document, Cancel)
    return fields_of(document, Ask)


def id_of(document: Document) -> RequestId:
    """The id of a request, also of one whose other fields are wrong."""
    found = document.fields.get("id")
    return found if type(found) in (str, int) else None


def written(facts: Mapping[str, Any], kind: bytes) -> Written:
    """A message of plain values. kind: the content type."""
    return msgspec.msgpack.encode(facts) if kind == MSGPACK else msgspec.json.encode(facts).decode()


def written_event(about: Mapping[str, Any], job_id: str, event: JobEvent, codec: Codec, kind: bytes) -> Written:
    """The message of an event: its type and number, and its outputs, fraction, reason or error."""
    facts = {**about, "job_id": job_id, "type": event.type, "seq": event.seq}
    if isinstance(event.data, Mapping):
        body, _, _ = write_outputs(event.data, codec, facts, kind)
        return body if kind == MSGPACK else body.decode()
    return written({**facts, **event_data(job_id, event, codec)}, kind)


def written_problem(about: Mapping[str, Any], problem: Problem, kind: bytes) -> Written:
    """The message of a request that failed. retry_after_s: where a later try can succeed."""
    error = {"code": problem.code, "title": problem.title, "detail": problem.detail}
    facts: dict[str, Any] = {**about, "type": "error", "status": problem.status, "error": error}
    retry_after = dict(problem.headers).get(b"retry-after")
    if retry_after is not None:
        facts["retry_after_s"] = int(retry_after)
    return written(facts, kind)
