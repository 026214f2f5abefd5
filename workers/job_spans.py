"""A span for each job with a trace that is recorded: from its claim to its committed end, and its forward inside.

    publish <model>, or any span of the caller  ->  process <model>  ->  forward <model>

Between the end of `publish` and the beginning of `process` the job waited in its queue. Spans are made after the
commit, out of what the job's metrics are made of, so that no job waits for them. The names of the attributes are
those of OpenTelemetry's conventions for messaging and for generated texts, where they have one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from penstock.registry.broker.base import State
from penstock.registry.open_telemetry.contexts import is_sampled, parent_of
from penstock.registry.package.generation import USAGE
from penstock.registry.tensors import decode
from penstock.workers.batch_run import BatchRun
from penstock.workers.results import EncodedOutputs, JobOutcome

__all__ = ["JobSpans"]

_REASONS: Final = "finish_reason"


class JobSpans:
    """The spans of one worker's jobs. worker: its name."""

    def __init__(self, tracer: Tracer, worker: str) -> None:
        self._tracer: Final = tracer
        self._worker: Final = worker

    def report(self, outcomes: Iterable[tuple[JobOutcome, State]], at: float) -> None:
        """Make the spans of jobs that ended now. at: when the broker had them, in monotonic seconds."""
        traced = [(outcome, state) for outcome, state in outcomes if is_sampled(outcome.job.header.traceparent)]
        if not traced:
            return
        # Spans have the time of day.
        offset_s = time.time() - time.monotonic()
        for outcome, state in traced:
            self._report(outcome, state, at, offset_s)

    def _report(self, outcome: JobOutcome, state: State, at: float, offset_s: float) -> None:
        job, failure = outcome.job, outcome.failure
        span = self._tracer.start_span(
            f"process {job.header.model}",
            parent_of(job.header.traceparent),
            kind=SpanKind.CONSUMER,
            attributes=self._attributes(outcome, state),
            start_time=_ns(job.claimed + offset_s),
        )
        if outcome.run is not None and outcome.run.ended:
            inside = trace.set_span_in_context(span)
            forward = self._tracer.start_span(
                f"forward {job.header.model}",
                inside,
                attributes=_of_run(outcome.run),
                start_time=_ns(outcome.run.started + offset_s),
            )
            forward.end(_ns(outcome.run.ended + offset_s))
        if failure is not None:
            # Its text may repeat what the job asked.
            span.set_attribute("error.type", failure.code)
            span.set_status(Status(StatusCode.ERROR, failure.code))
        span.end(_ns(at + offset_s))

    def _attributes(self, outcome: JobOutcome, state: State) -> dict[str, AttributeValue]:
        job = outcome.job
        return {
            "messaging.system": "penstock",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": job.header.model,
            "messaging.message.id": job.header.id,
            "messaging.message.body.size": len(job.body),
            "penstock.worker": self._worker,
            "penstock.version": outcome.label,
            "penstock.priority": job.header.priority,
            "penstock.queue_s": job.queue_ms / 1000,
            "penstock.outcome": state.name.lower(),
            "penstock.answered_by": outcome.how,
            "penstock.tries": job.tries,
            **_of_text(outcome),
        }


def _of_run(run: BatchRun) -> dict[str, AttributeValue]:
    return {
        "messaging.batch.message_count": len(run.batch.items),
        "penstock.batch.rows": run.batch.rows,
    }


def _of_text(outcome: JobOutcome) -> dict[str, AttributeValue]:
    """What the conventions for generated texts ask for; nothing for other models."""
    answer, version = outcome.answer, outcome.version
    # Any model may have an output with such a name.
    if version is None or version.spec.generate is None:
        return {}
    if not isinstance(answer, EncodedOutputs) or USAGE not in {tensor.name for tensor in answer.content}:
        return {}
    outputs = decode(answer.content, answer.body)
    prompt, generated, cached = outputs[USAGE].tolist()
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": outcome.job.header.model,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.usage.cache_read.input_tokens": cached,
    }
    if _REASONS in outputs:
        found["gen_ai.response.finish_reasons"] = [str(reason) for reason in outputs[_REASONS]]
    return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
