"""Replies and events: what a client reads, in which order, and how it comes back to it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.registry.broker.base import Broker, CancelOutcome, Delivery, Emission, Position, StreamEntry
from penstock.registry.queues import events_key, lane_key, reply_key
from tests.conformance.conftest import Brokerage
from tests.conformance.jobs import TTL_MS, claim, commit_of, held, publish, settle

CHUNK = b"sealed chunk"
SIZE = len(CHUNK)
MAX_BYTES = 1000
START = Position()


def emit(
    broker: Broker,
    consumer: str,
    delivery: Delivery,
    after: Position = START,
    *,
    sealed: bytes = CHUNK,
    count: int = 1,
    keep_from: int = 0,
    run: str = "",
    max_bytes: int = MAX_BYTES,
    resumes: bool = False,
) -> Position:
    """One call for one job; each consumer runs it once unless `run` names another run."""
    emission = Emission(held(delivery), run or consumer, sealed, count, after, keep_from, resumes)
    (position,) = broker.emit(consumer, [emission], TTL_MS, max_bytes=max_bytes)
    return position


def told(broker: Broker, job_id: str, after: str = "0-0") -> list[tuple[str, bytes, bytes]]:
    """(entry id, type, sealed) of a job's written events."""
    found = []
    for entry in broker.read({events_key(job_id): after}, 0):
        name, kind, payload_name, sealed = entry.fields[:4]
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


def test_blocked_read_ends_with_its_time(brokerage: Brokerage, broker: Broker, slot: str):
    """Without news a read comes back empty."""
    brokerage.let_time_run()
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
    position = emit(broker, "w", delivery)
    assert position == Position(3, SIZE)
    position = emit(broker, "w", delivery, position, sealed=b"half")
    assert position == Position(4, SIZE + 4)
    settle(broker, "w", commit_of(delivery))
    started, *others = told(broker, job_id)
    assert started[:2] == ("2-0", b"started")
    assert others == [("3-0", b"events", CHUNK), ("4-0", b"events", b"half"), ("5-0", b"C", b"")]
    assert told(broker, job_id, after="3-0")[0][0] == "4-0"


def test_events_that_travel_together_have_the_number_of_the_last(broker: Broker, slot: str):
    """A reader who has seen some of an entry's events reads the entry again, and who has seen all of them does not."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    position = emit(broker, "w", delivery, count=4)
    assert position == Position(6, SIZE)
    assert emit(broker, "w", delivery, position, count=3) == Position(9, 2 * SIZE)
    settle(broker, "w", commit_of(delivery))
    assert [seq for seq, _, _ in told(broker, job_id)] == ["2-0", "6-0", "9-0", "10-0"]
    assert [seq for seq, _, _ in told(broker, job_id, after="5-0")] == ["6-0", "9-0", "10-0"]
    assert [seq for seq, _, _ in told(broker, job_id, after="6-0")] == ["9-0", "10-0"]


def test_one_call_emits_for_many_jobs(broker: Broker, slot: str):
    """Each job gets its own events, and a job that was lost meanwhile changes nothing for the others."""
    published = publish(broker, slot, 3)
    first, second, third = claim(broker, "w", slot)
    settle(broker, "w", commit_of(second))
    emissions = [Emission(held(each), "run", b"of %d" % n) for n, each in enumerate((first, second, third))]
    positions = broker.emit("w", emissions, TTL_MS, max_bytes=MAX_BYTES)
    assert positions == [Position(3, 4), Position(), Position(3, 4)]
    assert [[sealed for _, kind, sealed in told(broker, job) if kind == b"events"] for job in published] == [
        [b"of 0"],
        [],
        [b"of 2"],
    ]


def test_jobs_of_several_slots_are_emitted_together(broker: Broker, slot: str):
    """The positions come in the order of the emissions, whichever slot they are of."""
    slots = [slot, f"{slot}-b"]
    deliveries = []
    for each in slots:
        publish(broker, each, 2)
        deliveries.append(claim(broker, "w", each))
    mixed = [job for pair in zip(*deliveries, strict=True) for job in pair]
    sizes = [len(b"x" * n) for n in range(1, 5)]
    emissions = [Emission(held(job), "run", b"x" * n) for job, n in zip(mixed, sizes, strict=True)]
    assert broker.emit("w", emissions, TTL_MS, max_bytes=MAX_BYTES) == [Position(3, size) for size in sizes]


def test_old_events_are_deleted_on_request(broker: Broker, slot: str):
    """Those before the number; the numbers and the bytes go on."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    position = emit(broker, "w", delivery)
    for _ in range(4):
        position = emit(broker, "w", delivery, position)
    position = emit(broker, "w", delivery, position, keep_from=6)
    assert position == Position(8, 6 * SIZE)
    assert [seq for seq, _, _ in told(broker, job_id)] == ["6-0", "7-0", "8-0"]
    assert emit(broker, "w", delivery, position, keep_from=9) == Position(9, 7 * SIZE)
    assert [seq for seq, _, _ in told(broker, job_id)] == ["9-0"]


def test_repeated_emit_appends_nothing(broker: Broker, slot: str):
    """A worker that did not hear the answer may repeat a call, the attempt's first or a later one."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    for _ in range(2):
        first = emit(broker, "w", delivery, count=2)
        assert first == Position(4, SIZE)
    for _ in range(2):
        assert emit(broker, "w", delivery, first, sealed=b"later") == Position(5, SIZE + 5)
    assert [kind for _, kind, _ in told(broker, job_id)] == [b"started", b"events", b"events"]


def test_repeated_attempt_resets_the_stream(brokerage: Brokerage, broker: Broker, slot: str):
    """A second attempt says so before its first event, and the numbers go on."""
    (job_id,) = publish(broker, slot)
    (first,) = claim(broker, "w1", slot)
    position = emit(broker, "w1", first)
    brokerage.elapse(60)
    (second,) = broker.take_over("w2", slot, 50, 8)
    assert emit(broker, "w1", first, position) == Position()
    assert emit(broker, "w2", second) == Position(5, 2 * SIZE)
    settle(broker, "w2", commit_of(second))
    assert [(seq, kind) for seq, kind, _ in told(broker, job_id)] == [
        ("2-0", b"started"),
        ("3-0", b"events"),
        ("4-0", b"reset"),
        ("5-0", b"events"),
        ("6-0", b"C"),
    ]


def test_second_run_of_one_worker_resets_the_stream(broker: Broker, slot: str):
    """The same worker runs the job again under the same lease, and its first run emits nothing more."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    first = emit(broker, "w", delivery, run="first")
    assert emit(broker, "w", delivery, run="second") == Position(5, 2 * SIZE)
    assert emit(broker, "w", delivery, first, run="first", sealed=b"late") == Position()
    assert [kind for _, kind, _ in told(broker, job_id)] == [b"started", b"events", b"reset", b"events"]


def test_events_of_earlier_runs_make_room(broker: Broker, slot: str):
    """While all of them fit, they stay; otherwise the events of the earlier runs are deleted."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    emit(broker, "w", delivery, run="first")
    assert emit(broker, "w", delivery, run="second", max_bytes=2 * SIZE) == Position(5, 2 * SIZE)
    assert len(told(broker, job_id)) == 4
    assert emit(broker, "w", delivery, run="third", max_bytes=2 * SIZE) == Position(7, 3 * SIZE)
    assert [(seq, kind) for seq, kind, _ in told(broker, job_id)] == [("6-0", b"reset"), ("7-0", b"events")]


def test_repeated_attempt_without_history_needs_no_reset(brokerage: Brokerage, broker: Broker, slot: str):
    """When the first attempt emitted nothing there is nothing to reset."""
    (job_id,) = publish(broker, slot)
    claim(broker, "w1", slot)
    brokerage.elapse(60)
    (second,) = broker.take_over("w2", slot, 50, 8)
    emit(broker, "w2", second)
    assert [kind for _, kind, _ in told(broker, job_id)] == [b"started", b"events"]


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
    assert emit(broker, "stranger", delivery) == Position()
    settle(broker, "w", commit_of(delivery))
    assert emit(broker, "w", delivery, Position(3, SIZE)) == Position()
    assert told(broker, job_id) == []


def test_events_expire(brokerage: Brokerage, broker: Broker, slot: str):
    """A job's events live as long as its result."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    emit(broker, "w", delivery)
    settle(broker, "w", commit_of(delivery), result_ttl_ms=100)
    assert len(told(broker, job_id)) == 3
    brokerage.elapse(120)
    assert told(broker, job_id) == []


def test_run_that_resumes_voids_no_event(brokerage: Brokerage, broker: Broker, slot: str):
    """A second run continues the events of the first: its beginning is no reset. A worker reads them all by the job."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    assert broker.job_events(job_id) == []
    position = emit(broker, "w", delivery, sealed=b"first")
    emit(broker, "w", delivery, sealed=b"second", run="another", resumes=True)
    emit(broker, "w", delivery, position, sealed=b"late")
    entries = [(entry.fields[1], entry.fields[3]) for entry in broker.job_events(job_id)]
    assert entries == [(b"started", b"w"), (b"events", b"first"), (b"resumed", b"another"), (b"events", b"second")]
