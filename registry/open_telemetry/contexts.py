"""W3C trace contexts: the text that travels with a job <-> the parent of a span."""

from __future__ import annotations

from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from penstock.registry.envelope import TRACEPARENT

__all__ = ["is_context", "is_sampled", "parent_of", "traceparent_of"]

_SAMPLED: Final = TraceFlags.SAMPLED


def traceparent_of(context: SpanContext) -> str:
    """The text of a span's context; empty for an invalid one, which a process without a provider has."""
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & _SAMPLED:02x}"


def is_context(traceparent: object) -> bool:
    """Whether it is the text of a trace context. Callers may pass anything."""
    return isinstance(traceparent, str) and TRACEPARENT.fullmatch(traceparent) is not None


def is_sampled(traceparent: str) -> bool:
    """Whether the one who began the trace records it. Without a trace context nothing is recorded."""
    return is_context(traceparent) and bool(int(traceparent[-2:], 16) & _SAMPLED)


def parent_of(traceparent: str) -> Context:
    """The context in which a span is a child of the remote one. A bad text gives a context without a parent."""
    if not is_context(traceparent):
        return Context()
    _, trace_id, span_id, flags = traceparent.split("-")
    remote = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(remote), Context())
