"""A span for each call that submits jobs. Their own spans, in the worker, are its children.

    the caller's span, or `traceparent`  ->  publish <model>  ->  process <model>, see workers/job_spans.py

The names of the attributes are those of OpenTelemetry's conventions for messaging.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from msgspec.structs import replace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from penstock.producers.job_state import HandleCore
from penstock.registry.admission import SubmitOptions
from penstock.registry.open_telemetry.contexts import is_context, is_sampled, parent_of, traceparent_of

__all__ = ["AsyncPublishSpans", "PublishSpans"]


class PublishSpans:
    """The spans of one client."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer: Final = tracer

    @contextmanager
    def publishing(self, model: str, options: SubmitOptions) -> Iterator[tuple[Span, SubmitOptions]]:
        """The span of a call, and options whose jobs are children of it. An error of the block is the span's.

        A trace that nobody records makes no jobs with a trace, unless the caller has given its context. A context that
        is none stays in the options: it is refused, as without spans.
        """
        attributes: Mapping[str, AttributeValue] = {
            "messaging.system": "penstock",
            "messaging.operation.type": "send",
            "messaging.operation.name": "publish",
            "messaging.destination.name": model,
            "penstock.priority": str(options.priority),
        }
        given = options.traceparent
        with self._tracer.start_as_current_span(
            f"publish {model}",
            parent_of(given) if given else None,
            kind=SpanKind.PRODUCER,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            own = traceparent_of(span.get_span_context())
            is_carried = is_sampled(own) and (not given or is_context(given))
            try:
                yield span, replace(options, traceparent=own) if is_carried else options
            except BaseException as error:  # also a cancelled task
                # Neither its text nor its traceback: they may repeat what the job asked.
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise

    def publish(self, model: str, options: SubmitOptions, submit: Callable[..., Any]) -> Any:
        """What `submit(options=...)` returns, inside of a span: one handle, or several."""
        with self.publishing(model, options) as (span, carried):
            return _named(span, submit(options=carried))


class AsyncPublishSpans(PublishSpans):
    """Those of a client whose calls are awaited."""

    async def publish(self, model: str, options: SubmitOptions, submit: Callable[..., Awaitable[Any]]) -> Any:
        """As that of the blocking client."""
        with self.publishing(model, options) as (span, carried):
            return _named(span, await submit(options=carried))


def _named(span: Span, submitted: object) -> object:
    if isinstance(submitted, HandleCore):
        span.set_attribute("messaging.message.id", submitted.id)
    return submitted
