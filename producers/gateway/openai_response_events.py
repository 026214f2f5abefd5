"""The events of a job -> the events of OpenAI's responses, each with its number. Pure.

    queued             -> response.created
    started            -> response.in_progress
    chunk, chunk, ...  -> output_item.added, content_part.added, output_text.delta, output_text.delta, ...
    completed          -> output_text.done, content_part.done, output_item.done, response.completed or .incomplete
    failed, cancelled  -> response.failed

The broker keeps the events of a job, and the same events give the same numbers: a client that lost its connection goes
on behind the last number that it saw, in any gateway process, and nothing is stored for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from penstock.producers.events import JobEvent
from penstock.producers.gateway.openai_response_views import (
    ResponseId,
    ResponseView,
    content_of,
    ended_view,
    failed_view,
    message_item,
    pending_view,
    text_part,
)
from penstock.producers.gateway.problems import problem_of
from penstock.producers.gateway.text_jobs import Sent, delta_of, only_text
from penstock.registry.errors import JobFailed, ResultGone

__all__ = ["NumberedEvent", "ResponseEvents"]

_TRIMMED: Final = "trimmed"
_GONE: Final = "The broker keeps the events of this response no longer. Expected the response without stream"


class NumberedEvent(NamedTuple):
    """An event. number: from 0."""

    number: int
    type: str
    fields: dict[str, Any]

    def written(self) -> bytes:
        """As a server-sent event."""
        data = msgspec.json.encode({"type": self.type, "sequence_number": self.number, **self.fields})
        return b"event: %s\ndata: %s\n\n" % (self.type.encode(), data)


class ResponseEvents:
    """The events of one response, from its first one on."""

    def __init__(self, name: ResponseId) -> None:
        self._name = name
        self._next = 0
        self._sent = Sent()
        self._text = ""
        self._has_begun = False
        """Whether `response.in_progress` was told."""
        self._has_message = False

    @property
    def count(self) -> int:
        """The events so far."""
        return self._next

    def read(self, event: JobEvent) -> Iterator[NumberedEvent]:
        """The events that one of the job brings.

        Raises ResultGone where the broker has dropped earlier events, and JobFailed for a text that began anew.
        """
        if event.type == "reset" and event.data == _TRIMMED:
            raise ResultGone(_GONE)
        if not self._next:
            yield self._state("response.created", pending_view(self._name, "queued"))
        if event.type == "queued":
            return
        if not self._has_begun:
            self._has_begun = True
            yield self._state("response.in_progress", pending_view(self._name, "in_progress"))
        if event.type == "completed":
            yield from self._end(event)
        elif isinstance(event.data, JobFailed):
            view = failed_view(self._name, problem_of(event.data))
            if event.type == "cancelled":
                view = pending_view(self._name, "cancelled")
            yield self._state("response.failed", view)
        elif (delta := delta_of(0, event, self._sent)) is not None:
            self._sent = self._sent.and_then(delta)
            # A text that may turn out to be a call is told when it has ended.
            if not self._name.has_tools:
                yield from self._more(delta.text)

    def error(self, message: str) -> NumberedEvent:
        """A last event: the stream cannot go on."""
        return self._event("error", code="server_error", message=message, param=None)

    def _end(self, event: JobEvent) -> Iterator[NumberedEvent]:
        text = only_text(event.data)
        view = ended_view(self._name, text)
        for place, item in enumerate(view.output):
            if item["type"] == "message":
                # An answer from the cache has no chunks.
                yield from self._more(content_of(text)[len(self._text) :])
                yield from self._message_done(item)
            else:
                yield from self._call(place, item)
        yield self._state(f"response.{view.status}", view)

    def _more(self, text: str) -> Iterator[NumberedEvent]:
        if not text:
            return
        yield from self._message()
        self._text += text
        yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _message(self) -> Iterator[NumberedEvent]:
        """The beginning of the message, once."""
        if self._has_message:
            return
        self._has_message = True
        item = message_item(self._name, "in_progress", None)
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place(), part=text_part(""))

    def _message_done(self, item: dict[str, Any]) -> Iterator[NumberedEvent]:
        yield from self._message()
        yield self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=text_part(self._text))
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call(self, place: int, item: dict[str, Any]) -> Iterator[NumberedEvent]:
        begun = {**item, "status": "in_progress", "arguments": ""}
        where = {"item_id": item["id"], "output_index": place}
        arguments = item["arguments"]
        yield self._event("response.output_item.added", output_index=place, item=begun)
        yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
        yield self._event("response.function_call_arguments.done", **where, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._name.job_id}", "output_index": 0, "content_index": 0}

    def _state(self, kind: str, view: ResponseView) -> NumberedEvent:
        return self._event(kind, response=view)

    def _event(self, kind: str, **fields: Any) -> NumberedEvent:
        self._next += 1
        return NumberedEvent(self._next - 1, kind, fields)
