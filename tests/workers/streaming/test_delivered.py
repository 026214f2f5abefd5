"""The chunks that earlier runs have delivered, read from the event stream of a job."""

from __future__ import annotations

import numpy as np

from penstock.registry.broker.base import StreamEntry
from penstock.registry.tensors import Array
from penstock.workers.job import ClaimedJob
from penstock.workers.streaming import EventStream, EventWriter
from penstock.workers.streaming.delivered import delivered_chunks
from tests.workers.streaming.jobs import MAX_BYTES, UNSIGNED, Broker


def run_of(job: ClaimedJob, writer: EventWriter, *numbers: int, resumes: bool = False) -> None:
    """One run of the job sends these numbers, each in an entry of its own, with its progress between them."""
    stream = EventStream(job, lambda: None, writer, UNSIGNED, MAX_BYTES)
    if resumes:
        stream.resume()
    for number in numbers:
        stream.chunk({"t": np.array([number], np.uint8)})
        stream.progress(0.5)
        writer.flush(stream._outbox, lambda: None)
    stream.finish()


def numbers_of(chunks: list[dict[str, Array]] | None) -> list[int] | None:
    return None if chunks is None else [int(each["t"][0]) for each in chunks]


def read(entries: list[StreamEntry], job: ClaimedJob) -> list[int] | None:
    return numbers_of(delivered_chunks(entries, job, UNSIGNED))


def test_chunks_of_all_runs_that_continue_each_other_are_delivered(
    broker: Broker, job: ClaimedJob, writer: EventWriter
):
    """A run that began anew voids those before it. Progress is no chunk."""
    assert read(broker.job_events(job.header.id), job) is None
    run_of(job, writer, 1, 2)
    assert read(broker.job_events(job.header.id), job) == [1, 2]
    run_of(job, writer, 3, resumes=True)
    assert read(broker.job_events(job.header.id), job) == [1, 2, 3]
    run_of(job, writer, 4)
    assert read(broker.job_events(job.header.id), job) == [4]


def test_a_stream_without_its_first_events_has_no_beginning(broker: Broker, job: ClaimedJob, writer: EventWriter):
    """The broker has deleted them: what is kept would be the middle of a text. A later run has a beginning again."""
    run_of(job, writer, 1, 2, 3)
    entries = broker.job_events(job.header.id)
    assert entries[0].fields[1] == b"started"
    for first in range(1, len(entries)):
        assert read(entries[first:], job) is None
    run_of(job, writer, 4)
    assert read(broker.job_events(job.header.id)[2:], job) == [4]


def test_events_of_others_are_not_continued(broker: Broker, writer: EventWriter):
    """Any program may write to the broker: events of another job, or bytes that are none."""
    mine, other = broker.running(2)
    for job in (mine, other):
        run_of(job, writer, 1)
    entries = broker.job_events(mine.header.id)
    assert read([*entries, *broker.job_events(other.header.id)[1:]], mine) is None
    damaged = entries[-1]._replace(fields=[b"t", b"events", b"d", b"no envelope"])
    assert read([*entries, damaged], mine) is None
