"""The spans of jobs, made out of their outcomes: texts, traces that nobody records, and bytes that are no trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure
from penstock.registry.open_telemetry.contexts import is_sampled, parent_of, traceparent_of
from penstock.registry.tensors import encode
from penstock.workers.job_spans import JobSpans
from penstock.workers.results import EncodedOutputs

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01"


class Spec(NamedTuple):
    generate: object


class Version(NamedTuple):
    spec: Spec


CLAIMED = 1000.0
"""In monotonic seconds."""
WRITER, OTHER = Version(Spec(generate=object())), Version(Spec(generate=None))
"""One that generates texts, and one that does not."""


@dataclass
class Header:
    traceparent: str
    model: str = "writer"
    id: str = "writer.1"
    priority: str = "normal"


class Job:
    """What a span reads of a claimed job."""

    def __init__(self, traceparent: str) -> None:
        self.header = Header(traceparent)
        self.body = b"12345678"
        self.claimed = CLAIMED
        self.queue_ms = 250
        self.tries = 2


@dataclass
class Outcome:
    job: Job
    answer: Any
    how: str = "ran"
    label: str = "3"
    run: Any = None
    version: Version | None = WRITER

    @property
    def failure(self) -> Failure | None:
        return self.answer if isinstance(self.answer, Failure) else None


def reported(
    answer: Any, traceparent: str = SAMPLED, state: State = State.COMPLETED, version: Version | None = WRITER
) -> list[ReadableSpan]:
    """The spans of one job that ended so."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans: Any = JobSpans(provider.get_tracer("penstock"), "w@here")
    spans.report([(Outcome(Job(traceparent), answer, version=version), state)], CLAIMED + 1.5)
    return list(exporter.get_finished_spans())


def encoded(**outputs: Any) -> EncodedOutputs:
    return EncodedOutputs(*encode(outputs), "hash", 0)


def test_a_text_has_the_attributes_of_generated_texts():
    """Tokens and reasons, and not the text."""
    answer = encoded(
        text=np.array(["secret words"], object),
        usage=np.array([12, 34, 5], np.int64),
        finish_reason=np.array(["length"], object),
    )
    (span,) = reported(answer)
    attributes = dict(span.attributes or {})
    assert {name: value for name, value in attributes.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "writer",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 34,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert "secret" not in str(attributes)
    assert (attributes["penstock.tries"], attributes["penstock.queue_s"]) == (2, 0.25)
    assert span.end_time is not None
    assert span.start_time is not None
    # A time of day in seconds has less than a microsecond of error as a float.
    assert span.end_time - span.start_time == pytest.approx(1.5e9, abs=1e3)


def test_a_job_that_asked_for_no_usage_has_none():
    (span,) = reported(encoded(text=np.array(["words"], object)))
    assert not [name for name in span.attributes or {} if name.startswith("gen_ai.")]


@pytest.mark.parametrize("usage", [np.ones((1, 4), np.float32), np.array([1, 2, 3])], ids=["rows", "three numbers"])
def test_an_output_of_another_model_is_no_usage(usage: Any):
    """Each model may name its outputs as it likes."""
    for version in (OTHER, None):
        (span,) = reported(encoded(usage=usage), version=version)
        assert not [name for name in span.attributes or {} if name.startswith("gen_ai.")]


def test_a_failure_is_named_by_its_class():
    (span,) = reported(Failure("ModelError", "it said: secret"), state=State.FAILED)
    assert (span.status.is_ok, span.status.description) == (False, "ModelError")
    assert "secret" not in span.to_json()


@pytest.mark.parametrize(
    "traceparent",
    ["", SAMPLED[:-2] + "00", SAMPLED[:-1], "x" + SAMPLED[1:], SAMPLED + "-00", "00-" + "é" * 52, SAMPLED.upper()],
)
def test_what_is_no_recorded_trace_has_no_span(traceparent: str):
    """Clients that are not ours may have written any text there."""
    assert not is_sampled(traceparent)
    assert reported(encoded(y=np.zeros(1)), traceparent) == []


def test_a_context_is_its_text_and_back():
    context = SpanContext(int(TRACE, 16), 0xB7AD6B7169203331, is_remote=False, trace_flags=TraceFlags(1))
    assert traceparent_of(context) == SAMPLED
    (span,) = reported(encoded(y=np.zeros(1)))
    assert span.parent is not None
    assert traceparent_of(span.parent) == SAMPLED
    assert traceparent_of(INVALID_SPAN_CONTEXT) == ""
    assert len(parent_of("nonsense")) == 0
