"""Dead letters: dead-lettered bytes, what is kept about them, and how they come back."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import (
    Broker,
    CommitStatus,
    Emission,
    JobRecord,
    Limits,
    Position,
    Publication,
    Replay,
    State,
)
from penstock.registry.queues import Priority, reply_key, stream_key
from tests.conformance.conftest import DEAD_LETTERS_BYTES, Brokerage, OnRedis
from tests.conformance.jobs import (
    LEASE_MS,
    ROOMY,
    TTL_MS,
    claim,
    commit_of,
    held,
    ids,
    publication,
    publish,
    queued,
    settle,
)


def _dead_letter(broker: Broker, slot: str, sealed: bytes = b"", *, count: int = 1) -> list[str]:
    """Jobs of the slot, given up by a worker; their ids."""
    ids = publish(broker, slot, count)
    for delivery in claim(broker, "w", slot, count):
        assert broker.dead_letter("w", delivery, "poison", job_id=delivery.sealed.decode(), sealed=sealed)
    return ids


def test_letter_keeps_what_is_known_about_the_job(brokerage: Brokerage, broker: Broker, slot: str):
    """Reason, job, tenant, priority, the times of acceptance and dead-lettering, deliveries, crashes, bytes."""
    job = publication(slot, Priority.HIGH, tenant="acme", reply=reply_key(slot, "me"))
    broker.publish(slot, [job], ROOMY)
    (first,) = claim(broker, "w1", slot)
    broker.suspect(slot, [held(first)], "w1:boot1", TTL_MS)
    brokerage.elapse(LEASE_MS + 10)
    (second,) = broker.take_over("w2", slot, LEASE_MS, 8)
    assert broker.dead_letter("w2", second, "it killed w1", job_id=job.job_id, sealed=b"dead")
    (letter,) = broker.dead_letters(slot)
    assert (letter.slot, letter.reason, letter.priority) == (slot, "it killed w1", Priority.HIGH)
    assert (letter.job_id, letter.tenant) == (job.job_id, "acme")
    assert (letter.deliveries, letter.crashes, letter.size) == (2, 1, len(job.sealed))
    assert letter.accepted_as == first.entry_id.decode()
    assert letter.accepted_ms == first.accepted_ms
    assert LEASE_MS <= letter.dead_lettered_ms - letter.accepted_ms < 60_000
    assert letter.sealed == b""
    whole = broker.read_dead_letter(slot, letter.entry)
    assert whole is not None
    assert whole.sealed == job.sealed
    assert broker.job_records([job.job_id]) == [JobRecord(State.DEAD, "", b"dead")]
    (told,) = broker.read({reply_key(slot, "me"): "0-0"}, 0)
    assert told.fields == [job.job_id.rpartition(".")[2].encode(), b"D-dead"]


def test_bytes_that_were_no_job_name_none(broker: Broker, slot: str):
    """A letter about bytes whose claim did not hold says nothing of the job that they claimed to be."""
    victim, _ = publish(broker, slot, 2)
    _, forged = claim(broker, "w", slot)
    assert broker.dead_letter("w", forged, "forged", job_id=victim, sealed=b"dead")
    (letter,) = broker.dead_letters(slot)
    assert (letter.job_id, letter.tenant, letter.deliveries) == ("", "", 1)


def test_foreign_entry_is_kept_as_it_was_handed_out(redis_brokerage: OnRedis, slot: str):
    """A foreign entry may have any fields. Each of them is kept."""
    broker = redis_brokerage.connect()
    broker.prepare([slot])
    written = [{"e": b"one"}, {"x": b"1", "y": b"22"}, {"a": b"1", "b": b"2", "a2": b"3"}]
    with redis_brokerage.server.client() as client:
        for fields in written:
            client.xadd(stream_key(slot, Priority.NORMAL), fields)
    for delivery in claim(broker, "w", slot):
        assert broker.dead_letter("w", delivery, "foreign")
        letter = broker.read_dead_letter(slot, broker.dead_letters(slot)[-1].entry)
        assert letter is not None
        assert letter.sealed == delivery.sealed
    assert [letter.size for letter in broker.dead_letters(slot)] == [3, 5, 7]
    broker.close()


def test_letters_are_listed_in_pages(broker: Broker, slot: str):
    """Oldest first, after any entry, no more than asked for, until nothing is left."""
    ids = _dead_letter(broker, slot, count=5)
    first, second = broker.dead_letters(slot, count=2)
    rest = broker.dead_letters(slot, second.entry)
    assert [letter.job_id for letter in (first, second, *rest)] == ids
    assert broker.dead_letters(slot, rest[-1].entry) == []
    assert broker.read_dead_letter(slot, "1-1") is None
    assert broker.dead_letters(f"{slot}-unheard-of") == []


def test_oldest_letters_make_room(broker: Broker, slot: str):
    """The dead letters keep a bounded number of bytes, and always the last one."""
    size = DEAD_LETTERS_BYTES // 4
    for number in range(6):
        job = publication(slot)
        broker.publish(slot, [Publication(job.job_id, job.priority, bytes([number]) * size, job.tenant)], ROOMY)
    for delivery in claim(broker, "w", slot):
        assert broker.dead_letter("w", delivery, f"number {delivery.sealed[0]}")
    assert [letter.reason for letter in broker.dead_letters(slot)] == [f"number {number}" for number in range(2, 6)]
    job = publication(slot)
    broker.publish(slot, [Publication(job.job_id, job.priority, bytes(DEAD_LETTERS_BYTES + 1), job.tenant)], ROOMY)
    (large,) = claim(broker, "w", slot)
    assert broker.dead_letter("w", large, "large")
    assert [letter.reason for letter in broker.dead_letters(slot)] == ["large"]
    assert queued(broker, slot) == 0


def _dead_letter_job(broker: Broker, slot: str, job: Publication) -> str:
    """Publish a job and give it up; the name of its letter."""
    assert broker.publish(slot, [job], ROOMY)[0].outcome == "accepted"
    (delivery,) = claim(broker, "w", slot)
    assert broker.dead_letter("w", delivery, "poison", job_id=job.job_id, sealed=b"dead")
    return broker.dead_letters(slot)[-1].entry


def test_replayed_job_runs_under_its_own_id(broker: Broker, slot: str):
    """The record is live again, the bytes are the original ones, the letter is gone, and the client hears the end."""
    reply = reply_key(slot, "me")
    job = publication(slot, Priority.HIGH, reply=reply, idempotency_digest="key", fingerprint="p")
    entry = _dead_letter_job(broker, slot, job)
    assert broker.replay(slot, entry, job, ROOMY.job_ttl_ms) is Replay.REPLAYED
    assert broker.job_records([job.job_id]) == [JobRecord(State.QUEUED, "acme")]
    assert broker.dead_letters(slot) == []
    (receipt,) = broker.publish(slot, [publication(slot, idempotency_digest="key", fingerprint="p")], ROOMY)
    assert (receipt.outcome, receipt.job_id) == ("known", job.job_id)
    (delivery,) = claim(broker, "w2", slot)
    assert (delivery.sealed, delivery.priority, delivery.attempt) == (job.sealed, Priority.HIGH, 1)
    assert settle(broker, "w2", commit_of(delivery, reply=reply, idempotency_digest="key")) == [CommitStatus.COMMITTED]
    assert broker.job_records([job.job_id]) == [JobRecord(State.COMPLETED, "", b"result")]
    told = broker.read({reply: "0-0"}, 0)
    assert [entry.fields[1] for entry in told] == [b"D-dead", b"C-result"]


def test_replay_forgets_crashes_and_events(brokerage: Brokerage, broker: Broker, slot: str):
    """It is a fresh start: no crash counts, and who subscribes now does not read of the earlier end."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    broker.emit("w1", [Emission(held(delivery), "first", b"1")], TTL_MS, max_bytes=1000)
    broker.suspect(slot, [held(delivery)], "w1:boot1", TTL_MS)
    assert broker.dead_letter("w1", delivery, "poison", job_id=job_id, sealed=b"dead")
    (letter,) = broker.dead_letters(slot)
    assert letter.crashes == 1
    job = Publication(job_id, Priority.NORMAL, b"", "acme")
    assert broker.replay(slot, letter.entry, job, ROOMY.job_ttl_ms) is Replay.REPLAYED
    claim(broker, "w2", slot)
    brokerage.elapse(LEASE_MS + 10)
    (again,) = broker.take_over("w3", slot, LEASE_MS, 8)
    assert (again.sealed, again.attempt, again.crashes) == (delivery.sealed, 2, 0)
    emission = Emission(held(again), "second", b"2")
    assert broker.emit("w3", [emission], TTL_MS, max_bytes=1000) == [Position(3, 1)]


def test_replay_outlives_the_result(brokerage: Brokerage, broker: Broker, slot: str):
    """Also a job whose record is gone comes back, and then lives as long as a job that was accepted now."""
    job = publication(slot)
    broker.publish(slot, [job], Limits(10, 0, job_ttl_ms=100))
    (delivery,) = claim(broker, "w", slot)
    assert broker.dead_letter("w", delivery, "poison")
    entry = broker.dead_letters(slot)[-1].entry
    settled = publication(slot)
    assert broker.replay(slot, entry, settled, 60_000) is Replay.REPLAYED
    assert broker.job_records([settled.job_id]) == [JobRecord(State.QUEUED, "acme")]
    brokerage.elapse(150)
    (job_record,) = broker.job_records([settled.job_id])
    assert job_record == JobRecord(State.QUEUED, "acme")


def test_replay_counts_as_in_flight(broker: Broker, slot: str):
    """The tenant's place was free while the job was dead, and is taken again."""
    limits = Limits(max_depth=10, tenant_max_in_flight=1, job_ttl_ms=60_000)
    job = publication(slot)
    entry = _dead_letter_job(broker, slot, job)
    assert broker.replay(slot, entry, job, 60_000) is Replay.REPLAYED
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "tenant-full"
    (delivery,) = claim(broker, "w", slot)
    settle(broker, "w", commit_of(delivery))
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "accepted"


def test_replay_wakes_a_waiting_worker(broker: Broker, slot: str):
    """A blocking claim is handed the job, as if it had been submitted."""
    job = publication(slot)
    entry = _dead_letter_job(broker, slot, job)
    broker.arm("w", [slot], 8, 1000)
    broker.replay(slot, entry, job, 60_000)
    assert ids(broker.collect()) == [job.job_id]


def test_deadline_counts_from_the_first_acceptance(brokerage: Brokerage, broker: Broker, slot: str):
    """A claim returns the first acceptance of a replayed job that keeps it, also after a second replay."""
    job = publication(slot)
    broker.publish(slot, [job], ROOMY)
    (first,) = claim(broker, "w", slot)
    broker.dead_letter("w", first, "poison", job_id=job.job_id, sealed=b"dead")
    for consumer in ("w1", "w2"):
        brokerage.elapse(20)
        (letter,) = broker.dead_letters(slot)
        assert letter.accepted_ms == first.accepted_ms
        assert broker.replay(slot, letter.entry, job, 60_000, keeps_acceptance=True) is Replay.REPLAYED
        (delivery,) = claim(broker, consumer, slot)
        assert (delivery.accepted_ms, delivery.sealed) == (first.accepted_ms, job.sealed)
        brokerage.elapse(LEASE_MS + 10)
        (delivery,) = broker.take_over("w", slot, LEASE_MS, 8)
        assert (delivery.accepted_ms, delivery.sealed) == (first.accepted_ms, job.sealed)
        assert broker.dead_letter("w", delivery, "again", job_id=job.job_id, sealed=b"dead")
    (letter,) = broker.dead_letters(slot)
    assert broker.replay(slot, letter.entry, job, 60_000) is Replay.REPLAYED
    (delivery,) = claim(broker, "w", slot)
    assert delivery.accepted_ms > first.accepted_ms


def test_replay_of_what_is_not_there(broker: Broker, slot: str):
    """No such letter: nothing happens. A repeat whose first answer was lost is told that it worked."""
    job = publication(slot)
    assert broker.replay(slot, "1-1", job, 60_000) is Replay.MISSING
    assert broker.job_records([job.job_id]) == [None]
    entry = _dead_letter_job(broker, slot, job)
    assert broker.replay(slot, entry, job, 60_000) is Replay.REPLAYED
    assert broker.replay(slot, entry, job, 60_000) is Replay.REPLAYED
    assert queued(broker, slot) == 1
    (delivery,) = claim(broker, "w", slot)
    settle(broker, "w", commit_of(delivery))
    assert broker.replay(slot, entry, job, 60_000) is Replay.MISSING


@pytest.mark.parametrize("now", ["live", "completed"])
def test_replay_never_doubles_a_job(broker: Broker, slot: str, now: str):
    """A letter about a job that lives, or has another end, stays where it is."""
    (job_id, copy) = publish(broker, slot, 2)
    original, double = claim(broker, "w", slot)
    assert broker.dead_letter("w", double, "a copy under a name of its own", job_id=copy, sealed=b"dead")
    (letter,) = broker.dead_letters(slot)
    if now == "completed":
        settle(broker, "w", commit_of(original))
    job = Publication(job_id, Priority.NORMAL, b"", "acme")
    expected = Replay.LIVE if now == "live" else Replay.SETTLED
    assert broker.replay(slot, letter.entry, job, 60_000) is expected
    assert len(broker.dead_letters(slot)) == 1
    assert queued(broker, slot) == (1 if now == "live" else 0)


def test_replay_respects_who_has_the_idempotency_key(brokerage: Brokerage, broker: Broker, slot: str):
    """When the key has expired and answers for another job now, a replay would be a second effect."""
    job = publication(slot, idempotency_digest="key", fingerprint="p")
    broker.publish(slot, [job], Limits(10, 0, job_ttl_ms=60_000))
    (delivery,) = claim(broker, "w", slot)
    broker.dead_letter("w", delivery, "poison")
    (letter,) = broker.dead_letters(slot)
    other = publication(slot, idempotency_digest="another", fingerprint="p")
    broker.publish(slot, [other], ROOMY)
    claimed = Publication(other.job_id + "0", Priority.NORMAL, b"", "acme", "", "another", "p")
    assert broker.replay(slot, letter.entry, claimed, 60_000) is Replay.SUPERSEDED
    assert broker.replay(slot, letter.entry, job, 60_000) is Replay.REPLAYED


def test_job_that_could_not_be_opened_comes_back(broker: Broker, slot: str):
    """Bytes of a newer protocol name no job when they are dead-lettered; its record still waits, and is used again."""
    job = publication(slot)
    broker.publish(slot, [job], ROOMY)
    (delivery,) = claim(broker, "w", slot)
    broker.dead_letter("w", delivery, "protocol 2; expected 1")
    assert broker.job_records([job.job_id]) == [JobRecord(State.QUEUED, "acme")]
    (letter,) = broker.dead_letters(slot)
    assert broker.replay(slot, letter.entry, job, 60_000) is Replay.REPLAYED
    (again,) = claim(broker, "w", slot)
    assert settle(broker, "w", commit_of(again)) == [CommitStatus.COMMITTED]
    limits = Limits(max_depth=10, tenant_max_in_flight=1, job_ttl_ms=60_000)
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "accepted"


def test_purged_letters_are_gone(broker: Broker, slot: str):
    """Those that were named, no others; and the bytes that they took are free again."""
    _dead_letter(broker, slot, count=3)
    first, second, third = broker.dead_letters(slot)
    assert broker.purge_dead(slot, [first.entry, third.entry, "1-1"]) == 2
    assert broker.dead_letters(slot) == [second]
    assert broker.purge_dead(slot, []) == 0
    size = DEAD_LETTERS_BYTES - second.size
    job = publication(slot)
    broker.publish(slot, [Publication(job.job_id, job.priority, bytes(size), job.tenant)], ROOMY)
    (large,) = claim(broker, "w", slot)
    assert broker.dead_letter("w", large, "large")
    assert [letter.reason for letter in broker.dead_letters(slot)] == ["poison", "large"]


def test_replayed_letter_leaves_its_room(broker: Broker, slot: str):
    """Its bytes no longer count: another as large drives nothing out."""
    _dead_letter(broker, slot)
    large = [publication(slot) for _ in range(2)]
    for job in large:
        sealed = bytes(int(DEAD_LETTERS_BYTES * 0.6))
        broker.publish(slot, [Publication(job.job_id, job.priority, sealed, job.tenant)], ROOMY)
    first, second = claim(broker, "w", slot)
    assert broker.dead_letter("w", first, "first", job_id=large[0].job_id, sealed=b"dead")
    (_, letter) = broker.dead_letters(slot)
    assert broker.replay(slot, letter.entry, large[0], 60_000) is Replay.REPLAYED
    assert broker.dead_letter("w", second, "second")
    assert [letter.reason for letter in broker.dead_letters(slot)] == ["poison", "second"]
