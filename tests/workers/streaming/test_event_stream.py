"""What a running job may send, what is refused, and what comes too late."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.registry.errors import InvalidInput, ModelError
from penstock.workers.job import ClaimedJob
from penstock.workers.streaming import EventStream, EventWriter
from tests.workers.streaming.jobs import MAX_BYTES, UNSIGNED, Broker


def test_chunks_are_there_when_the_stream_is_finished(broker: Broker, job: ClaimedJob, writer: EventWriter):
    """All of them, in order, each with one sign of progress."""
    touches: list[int] = []
    stream = EventStream(job, lambda: touches.append(1), writer, UNSIGNED, MAX_BYTES)
    for number in range(50):
        stream.chunk({"t": np.array([number], np.uint8)})
    stream.finish()
    assert broker.chunks(job) == [*range(50)]
    assert len(touches) >= 50


def test_chunk_beyond_the_bound_is_refused_with_both_numbers(broker: Broker, job: ClaimedJob, writer: EventWriter):
    """What is kept of a job could not hold it. The chunks before it stay."""
    stream = EventStream(job, lambda: None, writer, UNSIGNED, MAX_BYTES)
    stream.chunk({"t": np.array([7], np.uint8)})
    with pytest.raises(ModelError, match=f"It has {MAX_BYTES + 1} bytes. Expected at most {MAX_BYTES}"):
        stream.chunk({"t": np.zeros(MAX_BYTES + 1, np.uint8)})
    stream.finish()
    assert broker.chunks(job) == [7]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_progress_outside_its_range_is_refused(fraction: float, broker: Broker, job: ClaimedJob, writer: EventWriter):
    """In the entry point, with what was expected."""
    stream = EventStream(job, lambda: None, writer, UNSIGNED, MAX_BYTES)
    with pytest.raises(InvalidInput, match="Expected a number from 0 to 1"):
        stream.progress(fraction)
    assert broker.calls == []


def test_what_comes_after_the_end_is_ignored(broker: Broker, job: ClaimedJob, writer: EventWriter):
    """A thread that the model left behind reports to nobody."""
    for end in ("finish", "discard"):
        stream = EventStream(job, lambda: None, writer, UNSIGNED, MAX_BYTES)
        getattr(stream, end)()
        stream.progress(0.5)
        stream.chunk({"t": np.array([1], np.uint8)})
    assert broker.calls == []


def test_cancelled_and_lost_jobs_are_told_to_end(job: ClaimedJob, writer: EventWriter):
    """Both look the same to an entry point."""
    stream = EventStream(job, lambda: None, writer, UNSIGNED, MAX_BYTES)
    seen = []
    for job.is_cancelled, job.is_lost in ((False, False), (True, False), (False, True)):
        seen.append(stream.is_cancelled)
    assert seen == [False, True, True]


def test_time_is_that_of_the_broker(broker: Broker, job: ClaimedJob, writer: EventWriter):
    """As at the claim, and what has passed here since: workers whose clocks differ agree on it."""
    seconds = [job.claimed]
    stream = EventStream(job, lambda: None, writer, UNSIGNED, MAX_BYTES, clock=lambda: seconds[0])
    at_claim = stream.now_ms
    assert at_claim == int(job.delivery.accepted_ms + job.queue_ms)
    seconds[0] += 2.5
    assert stream.now_ms - at_claim in (2499, 2500, 2501)
