"""Purging a queue: waiting jobs are withdrawn, and their clients are told."""

from __future__ import annotations

from contextlib import closing

from penstock.registry.broker.base import Broker, CommitStatus, JobRecord, Limits, Replay, State, Withdrawal
from penstock.registry.queues import Priority, reply_key, stream_key
from tests.conformance.conftest import Brokerage, OnRedis
from tests.conformance.jobs import (
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


def _withdrawals(broker: Broker, slot: str, priority: Priority = Priority.NORMAL) -> list[Withdrawal]:
    return [
        Withdrawal(entry.entry_id, entry.head.decode(), "acme", b"purged")
        for entry in broker.waiting(slot, priority, b"", 1000, 1000)
    ]


def test_waiting_jobs_are_seen_in_order(broker: Broker, slot: str):
    """`waiting` pages through the jobs without a holder, released ones included. Held jobs are left out."""
    published = publish(broker, slot, 6)
    deliveries = claim(broker, "w", slot, 4)
    broker.release("w", [held(deliveries[1]), held(deliveries[3])])
    expected = [published[1], published[3], published[4], published[5]]
    found = broker.waiting(slot, Priority.NORMAL, b"", 3, 1000)
    found += broker.waiting(slot, Priority.NORMAL, found[-1].entry_id, 3, 1000)
    assert [entry.head.decode() for entry in found] == expected
    assert broker.waiting(slot, Priority.NORMAL, found[-1].entry_id, 3, 1000) == []
    assert broker.waiting(slot, Priority.LOW, b"", 3, 1000) == []
    assert broker.waiting(slot, Priority.NORMAL, b"", 1, 5)[0].head == expected[0][:5].encode()


def test_newest_entry_bounds_those_that_are_there(broker: Broker, brokerage: Brokerage, slot: str):
    """Held entries count, and each later one has a greater id, also after the broker's clock was set back."""
    assert broker.newest_entry(slot, Priority.NORMAL) == b""
    publish(broker, slot, 2)
    second = broker.newest_entry(slot, Priority.NORMAL)
    assert [delivery.entry_id for delivery in claim(broker, "w", slot)][-1] == second
    brokerage.elapse(-3_600_000)
    publish(broker, slot, 1)
    (third,) = [entry.entry_id for entry in broker.waiting(slot, Priority.NORMAL, second, 9, 1000)]
    assert broker.newest_entry(slot, Priority.NORMAL) == third
    assert third > second
    assert broker.newest_entry(slot, Priority.LOW) == b""


def test_queue_without_a_worker_is_seen_too(broker: Broker, slot: str):
    """Before the first worker comes there is no consumer group."""
    published = publish(broker, slot, 2, Priority.LOW)
    assert [entry.head.decode() for entry in broker.waiting(slot, Priority.LOW, b"", 9, 1000)] == published
    assert broker.withdraw(slot, Priority.LOW, _withdrawals(broker, slot, Priority.LOW), TTL_MS) == 2
    assert queued(broker, slot) == 0


def test_withdrawn_jobs_end_cancelled(broker: Broker, slot: str):
    """A withdrawn job has its result, its client is told, its idempotency key finds it, and no worker gets it."""
    reply = reply_key(slot, "me")
    job = publication(slot, reply=reply, idempotency_digest="key", fingerprint="p")
    broker.publish(slot, [job], ROOMY)
    assert broker.withdraw(slot, Priority.NORMAL, _withdrawals(broker, slot), TTL_MS) == 1
    assert broker.job_records([job.job_id]) == [JobRecord(State.CANCELLED, "", b"purged")]
    (told,) = broker.read({reply: "0-0"}, 0)
    assert told.fields == [job.job_id.rpartition(".")[2].encode(), b"X-purged"]
    (receipt,) = broker.publish(slot, [publication(slot, idempotency_digest="key", fingerprint="p")], ROOMY)
    assert (receipt.outcome, receipt.job_id) == ("known", job.job_id)
    assert claim(broker, "w", slot) == []


def test_job_that_was_claimed_meanwhile_goes_on(broker: Broker, slot: str):
    """Between the look and the withdrawal a worker may come: its jobs are not touched, not even asked to stop."""
    published = publish(broker, slot, 3)
    withdrawals = _withdrawals(broker, slot)
    running, given_back = claim(broker, "w", slot, 2)
    broker.release("w", [held(given_back)])
    assert broker.withdraw(slot, Priority.NORMAL, withdrawals, TTL_MS) == 2
    depth = broker.depths(slot)[Priority.NORMAL]
    assert (depth.jobs, depth.running) == (1, 1)
    assert broker.renew("w", [held(running)]).cancelled == frozenset()
    assert settle(broker, "w", commit_of(running)) == [CommitStatus.COMMITTED]
    states = [job_record.state for job_record in broker.job_records(published) if job_record]
    assert states == [State.COMPLETED, State.CANCELLED, State.CANCELLED]
    assert broker.take_over("w2", slot, 0, 8) == []
    assert broker.withdraw(slot, Priority.NORMAL, withdrawals, TTL_MS) == 0


def test_withdrawal_frees_the_tenants_places(brokerage: Brokerage, broker: Broker, slot: str):
    """Also for a job whose record has expired while it waited."""
    limits = Limits(max_depth=10, tenant_max_in_flight=1, job_ttl_ms=60_000)
    for _ in range(2):
        job = publication(slot)
        assert broker.publish(slot, [job], limits)[0].outcome == "accepted"
        assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "tenant-full"
        assert broker.withdraw(slot, Priority.NORMAL, _withdrawals(broker, slot), TTL_MS) == 1
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "accepted"


def test_bytes_that_are_no_job_are_removed(broker: Broker, slot: str):
    """They end nothing: neither with empty names nor when they claim to be another job."""
    victim, _ = publish(broker, slot, 2)
    first, second = broker.waiting(slot, Priority.NORMAL, b"", 9, 1000)
    forged = Withdrawal(second.entry_id, victim, "acme", b"forged")
    assert broker.withdraw(slot, Priority.NORMAL, [forged], TTL_MS) == 1
    assert broker.job_records([victim]) == [JobRecord(State.QUEUED, "acme")]
    assert ids(claim(broker, "w", slot)) == [victim]
    assert broker.withdraw(slot, Priority.NORMAL, [Withdrawal(first.entry_id)], TTL_MS) == 0
    publish(broker, slot, 1)
    (foreign,) = broker.waiting(slot, Priority.NORMAL, b"", 9, 1000)
    assert broker.withdraw(slot, Priority.NORMAL, [Withdrawal(foreign.entry_id)], TTL_MS) == 1
    assert broker.withdraw(slot, Priority.NORMAL, [], TTL_MS) == 0


def test_replayed_dead_letter_is_seen_as_its_job(broker: Broker, brokerage: Brokerage, slot: str):
    """Its entry has the time of its acceptance, too. Its bytes begin as those of any other."""
    job = publication(slot)
    broker.publish(slot, [job], ROOMY)
    (delivery,) = claim(broker, "w", slot)
    accepted_ms = delivery.accepted_ms
    assert broker.dead_letter("w", delivery, "poison", job_id=job.job_id, sealed=b"dead")
    brokerage.elapse(2000)
    (letter,) = broker.dead_letters(slot)
    assert broker.replay(slot, letter.entry, job, 60_000, keeps_acceptance=True) is Replay.REPLAYED
    (found,) = broker.waiting(slot, Priority.NORMAL, b"", 9, 1000)
    assert (found.head, found.accepted_ms) == (job.sealed, accepted_ms)
    withdrawal = Withdrawal(found.entry_id, job.job_id, "acme", b"purged")
    assert broker.withdraw(slot, Priority.NORMAL, [withdrawal], TTL_MS) == 1
    assert broker.job_records([job.job_id]) == [JobRecord(State.CANCELLED, "", b"purged")]


def test_foreign_entry_that_looks_replayed_is_bytes(redis_brokerage: OnRedis, slot: str):
    """Of four fields, the third as of ours. Its fourth is no time: the entry can be read and removed."""
    with closing(redis_brokerage.connect()) as broker, redis_brokerage.server.client() as client:
        fields = {"j": "bytes", "a": "soon"}
        client.xadd(stream_key(slot, Priority.NORMAL), fields)
        (found,) = broker.waiting(slot, Priority.NORMAL, b"", 9, 1000)
        assert (found.head, found.accepted_first_ms) == (b"jbytesasoon", 0)
        assert broker.withdraw(slot, Priority.NORMAL, [Withdrawal(found.entry_id)], TTL_MS) == 1
        assert broker.waiting(slot, Priority.NORMAL, b"", 9, 1000) == []
