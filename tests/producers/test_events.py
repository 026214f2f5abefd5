"""EventMerger: the end of a job whose event stream lost what its subscriber has seen."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.producers.events import EventMerger
from penstock.registry.broker.base import JobRecord, State, StreamEntry
from penstock.registry.envelope import Failure, Keyring, RequestContext, ResultHeader, seal
from penstock.registry.queues import events_key, new_job_id

UNSIGNED = Keyring.parse(None)


def _entries(job_id: str, *numbers: int) -> Sequence[StreamEntry]:
    fields = [b"t", b"reset", b"d", b"consumer entry"]
    return [StreamEntry(events_key(job_id), f"{number}-0", fields) for number in numbers]


def _failed(job_id: str) -> JobRecord:
    header = ResultHeader(job_id, RequestContext("acme"), content=(), error=Failure("ModelError", "why"))
    return JobRecord(State.FAILED, "", seal("result", header, b"", UNSIGNED))


def test_the_end_is_told_after_the_stream_went_back():
    """An older copy of the broker's data has lower numbers than the subscriber has seen: the end comes all the same."""
    job_id = new_job_id("m")
    merger = EventMerger(job_id, "acme", UNSIGNED, 0)
    seen = [event.seq for event in merger.entries(_entries(job_id, 5, 6, 9))]
    (end,) = merger.record(_failed(job_id))
    assert (end.type, end.seq) == ("failed", seen[-1] + 1)
    assert merger.is_over


def test_nothing_follows_for_a_subscriber_that_has_seen_the_end():
    """It goes on after the end's number: the stream is over without an event."""
    job_id = new_job_id("m")
    merger = EventMerger(job_id, "acme", UNSIGNED, 10)
    assert list(merger.record(_failed(job_id))) == []
    assert merger.is_over
