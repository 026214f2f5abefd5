"""Replies and events: what a client reads, in which order, and how it comes back to it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.registry.broker.base import Broker, CancelOutcome, Event, StreamEntry
from penstock.registry.queues import events_key, lane_key, reply_key
from tests.conformance.conftest import Brokerage
from tests.conformance.jobs import TTL_MS, claim, commit_of, held, publish, settle

CHUNK = Event("chunk", b"sealed chunk")


def told(broker: Broker, job_id: str, after: str = "0-0") -> list[tuple[str, bytes, bytes]]:
    """(entry id, type, sealed) of a job's written events."""
    found = []
    for entry in broker.read({events_key(job_id): after}, 0):
        name, kind, payload_name, sealed = entry.fields
        assert (name, payload_name) == (b"t", b"d")
        found.append((entry.entry_id, kind, sealed))
    return found


def in_background(action: Callable[[], object]) -> threading.Thread:
    """Run the action on another thread, a moment from now."""
    thread = threading.Timer(0.05, action)
    thread.start()
    return thread


def test_finished_jobs_of_a_batch_travel_in_one_reply(broker: Broker, slot: str):
    """A client gets the records of its jobs of one batch in one entry, and none of other clients."""
    mine, theirs = reply_key(slot, "me"), reply_key(slot, "them")
    first, second = publish(broker, slot, 2, reply=mine)
    (third,) = publish(broker, slot, reply=theirs)
    a, b, c = claim(broker, "w", slot)
    settle(broker, "w", commit_of(a, b"1", reply=mine), commit_of(b, b"2", reply=mine), commit_of(c, reply=theirs))
    (entry,) = broker.read({mine: "0-0"}, 0)
    local = [job_id.rpartition(".")[2].encode() for job_id in (first, second, third)]
    assert entry == StreamEntry(mine, entry.entry_id, [local[0], b"C-1", local[1], b"C-2"])
    assert [entry.fields[0] for entry in broker.read({theirs: "0-0"}, 0)] == [local[2]]


def test_large_result_is_announced_and_read_by_id(broker: Broker, slot: str):
    """A record above 4096 bytes is not in the reply, only its job's name."""
    reply = reply_key(slot, "me")
    published = publish(broker, slot, 2, reply=reply)
    fits, large = claim(broker, "w", slot)
    settle(broker, "w", commit_of(fits, b"x" * 4094, reply=reply), commit_of(large, b"x" * 4095, reply=reply))
    (entry,) = broker.read({reply: "0-0"}, 0)
    assert entry.fields[1::2] == [b"C-" + b"x" * 4094, b""]
    job_record = broker.job_records(published)[1]
    assert job_record is not None
    assert job_record.result == b"x" * 4095


def test_fenced_commit_is_not_announced(brokerage: Brokerage, broker: Broker, slot: str):
    """The client hears of a job once, from the worker whose result counts."""
    reply = reply_key(slot, "me")
    publish(broker, slot, reply=reply)
    (first,) = claim(broker, "w1", slot)
    brokerage.elapse(60)
    (second,) = broker.take_over("w2", slot, 50, 8)
    settle(broker, "w1", commit_of(first, b"late", reply=reply))
    settle(broker, "w2", commit_of(second, b"good", reply=reply))
    assert [entry.fields[1] for entry in broker.read({reply: "0-0"}, 0)] == [b"C-good"]


def test_lane_is_told_without_a_cap(broker: Broker, slot: str):
    """Replies for Celery stay until they are read, so that no result is dropped."""
    lane = lane_key(slot)
    publish(broker, slot, 700, reply=lane)
    for delivery in claim(broker, "w", slot, credit=700):
        settle(broker, "w", commit_of(delivery, reply=lane))
    assert len(broker.read({lane: "0-0"}, 0, count=1000)) == 700


def test_reading_goes_on_after_the_cursor(broker: Broker, slot: str):
    """Entries after a cursor, no more than asked for, without a gap or a repeat."""
    reply = reply_key(slot, "me")
    published = publish(broker, slot, 5, reply=reply)
    for delivery in claim(broker, "w", slot):
        settle(broker, "w", commit_of(delivery, reply=reply))
    seen, cursor = [], "0-0"
    while entries := broker.read({reply: cursor}, 0, count=2):
        assert len(entries) <= 2
        seen += [entry.fields[0].decode() for entry in entries]
        cursor = entries[-1].entry_id
    assert seen == [job_id.rpartition(".")[2] for job_id in published]


def test_trimmed_replies_are_forgotten(broker: Broker, slot: str):
    """Trimming forgets up to and including the named entry; of no stream it is harmless."""
    reply = reply_key(slot, "me")
    publish(broker, slot, 3, reply=reply)
    for delivery in claim(broker, "w", slot):
        settle(broker, "w", commit_of(delivery, reply=reply))
    first, second, third = broker.read({reply: "0-0"}, 0)
    broker.trim(reply, second.entry_id)
    assert broker.read({reply: "0-0"}, 0) == [third]
    assert broker.read({reply: first.entry_id}, 0) == [third]
    broker.trim(reply_key(slot, "another"), second.entry_id)


def test_blocked_read_returns_with_the_first_entry(brokerage: Brokerage, broker: Broker, slot: str):
    """A waiting client is woken by its reply: its time would run out after this test's."""
    other, reply = brokerage.connect(), reply_key(slot, "me")
    publish(broker, slot, reply=reply)
    (delivery,) = claim(broker, "w", slot)
    commit = in_background(lambda: settle(other, "w", commit_of(delivery, reply=reply)))
    assert len(broker.read({reply: "0-0", reply_key(slot, "other"): "0-0"}, 600_000)) == 1
    commit.join()
    other.close()


def test_blocked_read_ends_with_its_time(broker: Broker, slot: str):
    """Without news a read comes back empty."""
    assert broker.read({reply_key(slot, "me"): "0-0"}, 100) == []


def test_nudge_wakes_a_blocked_read(brokerage: Brokerage, broker: Broker, slot: str):
    """A client can be woken with an entry that says nothing."""
    other, reply = brokerage.connect(), reply_key(slot, "me")
    nudge = in_background(lambda: other.nudge(reply))
    (entry,) = broker.read({reply: "0-0"}, 4000)
    assert entry.fields == [b"", b""]
    nudge.join()
    other.close()


def test_quiet_job_has_no_event_stream(broker: Broker, slot: str):
    """Without a subscriber and without chunks nothing is written: a stream costs memory."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    settle(broker, "w", commit_of(delivery))
    assert told(broker, job_id) == []


def test_emitted_events_number_on_from_started(broker: Broker, slot: str):
    """1 is queued and 2 started; what the job emits follows, then its end."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    assert broker.emit("w", held(delivery), [CHUNK, Event("progress", b"half")], TTL_MS, after=0) == 4
    assert broker.emit("w", held(delivery), [CHUNK], TTL_MS, after=4) == 5
    settle(broker, "w", commit_of(delivery))
    started, *others = told(broker, job_id)
    assert started[:2] == ("2-0", b"started")
    assert others == [
        ("3-0", b"chunk", b"sealed chunk"),
        ("4-0", b"progress", b"half"),
        ("5-0", b"chunk", b"sealed chunk"),
        ("6-0", b"C", b""),
    ]
    assert told(broker, job_id, after="4-0")[0][0] == "5-0"


def test_repeated_emit_appends_nothing(broker: Broker, slot: str):
    """A worker that did not hear the answer may repeat a call, the attempt's first or a later one."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    for _ in range(2):
        assert broker.emit("w", held(delivery), [CHUNK, CHUNK], TTL_MS, after=0) == 4
    for _ in range(2):
        assert broker.emit("w", held(delivery), [CHUNK], TTL_MS, after=4) == 5
    assert [kind for _, kind, _ in told(broker, job_id)] == [b"started", b"chunk", b"chunk", b"chunk"]


def test_repeated_attempt_resets_the_stream(brokerage: Brokerage, broker: Broker, slot: str):
    """A second attempt says so before its first event, and the numbers go on."""
    (job_id,) = publish(broker, slot)
    (first,) = claim(broker, "w1", slot)
    broker.emit("w1", held(first), [CHUNK], TTL_MS, after=0)
    brokerage.elapse(60)
    (second,) = broker.take_over("w2", slot, 50, 8)
    assert not broker.emit("w1", held(first), [CHUNK], TTL_MS, after=3)
    assert broker.emit("w2", held(second), [CHUNK], TTL_MS, after=0)
    settle(broker, "w2", commit_of(second))
    assert [(seq, kind) for seq, kind, _ in told(broker, job_id)] == [
        ("2-0", b"started"),
        ("3-0", b"chunk"),
        ("4-0", b"reset"),
        ("5-0", b"chunk"),
        ("6-0", b"C"),
    ]


def test_repeated_attempt_without_history_needs_no_reset(brokerage: Brokerage, broker: Broker, slot: str):
    """When the first attempt emitted nothing there is nothing to reset."""
    (job_id,) = publish(broker, slot)
    claim(broker, "w1", slot)
    brokerage.elapse(60)
    (second,) = broker.take_over("w2", slot, 50, 8)
    broker.emit("w2", held(second), [CHUNK], TTL_MS, after=0)
    assert [kind for _, kind, _ in told(broker, job_id)] == [b"started", b"chunk"]


def test_subscriber_of_a_quiet_job_is_told_its_end(broker: Broker, slot: str):
    """Subscribed while it waits or while it runs, a job that emits nothing ends with event 3."""
    waiting, running = publish(broker, slot, 2)
    broker.job_record(waiting, subscribe=True)
    first, second = claim(broker, "w", slot)
    job_record = broker.job_record(running, subscribe=True)
    assert job_record is not None
    assert job_record.is_claimed
    settle(broker, "w", commit_of(first), commit_of(second))
    assert told(broker, waiting) == told(broker, running) == [("3-0", b"C", b"")]


def test_subscriber_of_a_job_that_never_started_is_told_its_end(broker: Broker, slot: str):
    """Cancelled while it waits: the end is event 3 as well, also for a reader that was shown more."""
    (job_id,) = publish(broker, slot)
    broker.job_record(job_id, subscribe=True)
    assert broker.cancel(job_id, "acme", b"cancelled") is CancelOutcome.CANCELLED
    assert told(broker, job_id) == [("3-0", b"X", b"")]


def test_subscription_to_a_finished_job_writes_nothing(broker: Broker, slot: str):
    """Its record says all there is to say."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    settle(broker, "w", commit_of(delivery, b"done"))
    job_record = broker.job_record(job_id, subscribe=True)
    assert job_record is not None
    assert job_record.result == b"done"
    assert told(broker, job_id) == []


def test_only_the_holder_emits(broker: Broker, slot: str):
    """Neither a stranger nor a worker whose job is finished writes events."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    assert not broker.emit("stranger", held(delivery), [CHUNK], TTL_MS, after=0)
    settle(broker, "w", commit_of(delivery))
    assert not broker.emit("w", held(delivery), [CHUNK], TTL_MS, after=3)
    assert told(broker, job_id) == []


def test_events_expire(brokerage: Brokerage, broker: Broker, slot: str):
    """A job's events live as long as its result."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    broker.emit("w", held(delivery), [CHUNK], TTL_MS, after=0)
    settle(broker, "w", commit_of(delivery), result_ttl_ms=100)
    assert len(told(broker, job_id)) == 3
    brokerage.elapse(120)
    assert told(broker, job_id) == []
