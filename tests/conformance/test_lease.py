"""Leases, the fence and the commit: one holder at a time, one effect per job."""

from __future__ import annotations

import pytest
from msgspec import structs

from penstock.registry.broker.base import (
    Broker,
    CancelOutcome,
    CommitStatus,
    Delivery,
    JobRecord,
    Limits,
    Renewal,
    State,
)
from penstock.registry.queues import Priority, reply_key
from tests.conformance.conftest import Brokerage
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

NOTHING = Renewal(frozenset(), frozenset())


def test_lapsed_lease_passes_to_the_worker_that_asks(brokerage: Brokerage, broker: Broker, slot: str):
    """A job whose holder fell silent is taken over after the lease, not before, as the next attempt."""
    (job_id,) = publish(broker, slot)
    (first,) = claim(broker, "w1", slot)
    assert broker.take_over("w2", slot, 60_000, 8) == []
    brokerage.elapse(LEASE_MS + 10)
    (second,) = broker.take_over("w2", slot, LEASE_MS, 8)
    assert second == structs.replace(first, attempt=2)
    assert broker.take_over("w3", slot, LEASE_MS, 8) == []
    job_record = broker.job_record(job_id)
    assert job_record is not None
    assert (job_record.is_claimed, job_record.deliveries) == (True, 2)


def test_renewed_lease_does_not_lapse(brokerage: Brokerage, broker: Broker, slot: str):
    """A lease counts from its last renewal, and renewing counts as no attempt."""
    publish(broker, slot, 2)
    kept, silent = claim(broker, "w1", slot)
    for _ in range(3):
        brokerage.elapse(LEASE_MS // 2)
        assert broker.renew("w1", [held(kept)]) == NOTHING
    taken = broker.take_over("w2", slot, LEASE_MS, 8)
    assert taken == [structs.replace(silent, attempt=2)]
    brokerage.elapse(LEASE_MS + 10)
    assert broker.take_over("w2", slot, LEASE_MS, 1) == [structs.replace(kept, attempt=2)]


def test_renewal_names_what_was_lost(brokerage: Brokerage, broker: Broker, slot: str):
    """A consumer learns which of its jobs belong to another or to none, and does not get them back."""
    publish(broker, slot, 3)
    taken, finished, kept = claim(broker, "w1", slot)
    settle(broker, "w1", commit_of(finished))
    brokerage.elapse(LEASE_MS + 10)
    assert broker.renew("w1", [held(kept)]) == NOTHING
    assert broker.take_over("w2", slot, LEASE_MS, 8) == [structs.replace(taken, attempt=2)]
    lost = broker.renew("w1", [held(taken), held(finished), held(kept)]).lost
    assert lost == {held(taken), held(finished)}
    assert broker.renew("w2", [held(taken)]) == NOTHING


def test_late_commit_has_no_effect(brokerage: Brokerage, broker: Broker, slot: str):
    """A worker that woke up after its lease is fenced, before and after the new holder's commit: one effect."""
    (job_id,) = publish(broker, slot)
    (first,) = claim(broker, "w1", slot)
    brokerage.elapse(LEASE_MS + 10)
    (second,) = broker.take_over("w2", slot, LEASE_MS, 8)
    assert settle(broker, "w1", commit_of(first, b"late")) == [CommitStatus.FENCED]
    assert settle(broker, "w2", commit_of(second, b"in time")) == [CommitStatus.COMMITTED]
    assert settle(broker, "w1", commit_of(first, b"later")) == [CommitStatus.FENCED]
    assert broker.job_records([job_id]) == [JobRecord(State.COMPLETED, "", b"in time")]


def test_lapsed_lease_still_commits_while_no_worker_took_over(brokerage: Brokerage, broker: Broker, slot: str):
    """A late commit counts while its consumer holds the job: no worker has repeated the work."""
    publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    brokerage.elapse(LEASE_MS + 10)
    assert settle(broker, "w1", commit_of(delivery)) == [CommitStatus.COMMITTED]


def test_first_commit_wins(broker: Broker, slot: str):
    """A commit that is repeated, since its answer was lost, is recognised and changes nothing; another is fenced."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    assert settle(broker, "w", commit_of(delivery, b"1")) == [CommitStatus.COMMITTED]
    assert settle(broker, "w", commit_of(delivery, b"1")) == [CommitStatus.COMMITTED]
    assert settle(broker, "w", commit_of(delivery, b"2")) == [CommitStatus.FENCED]
    assert broker.job_records([job_id]) == [JobRecord(State.COMPLETED, "", b"1")]


def test_repeated_commit_sends_no_second_reply(broker: Broker, slot: str):
    """The client has one reply per result, however often the worker repeats a commit that was not answered."""
    reply = reply_key(slot, "me")
    publish(broker, slot, reply=reply)
    (delivery,) = claim(broker, "w", slot)
    for _ in range(2):
        assert settle(broker, "w", commit_of(delivery, reply=reply)) == [CommitStatus.COMMITTED]
    assert len(broker.read({reply: "0-0"}, 0)) == 1


def test_repetition_of_an_ended_job_frees_no_place(broker: Broker, slot: str):
    """An entry whose job had ended before says nothing about the tenant's jobs in flight, nor changes the result."""
    ended, running = publish(broker, slot, 2)
    first, second = claim(broker, "w", slot)
    settle(broker, "w", commit_of(first, b"result"))
    repeated = structs.replace(commit_of(second, b"another"), job_id=ended)
    assert settle(broker, "w", repeated) == [CommitStatus.GONE]
    assert broker.job_records([ended]) == [JobRecord(State.COMPLETED, "", b"result")]
    limits = Limits(max_depth=10, tenant_max_in_flight=1, job_ttl_ms=60_000)
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "tenant-full"
    assert broker.job_records([running]) == [JobRecord(State.QUEUED, "acme")]


def test_another_boot_of_a_worker_is_another_consumer(broker: Broker, slot: str):
    """The consumer's name carries its boot: a restarted worker holds nothing of what it held before."""
    publish(broker, slot)
    (delivery,) = claim(broker, "gpu0@host:boot1", slot)
    assert settle(broker, "gpu0@host:boot2", commit_of(delivery)) == [CommitStatus.FENCED]
    assert broker.renew("gpu0@host:boot2", [held(delivery)]).lost == {held(delivery)}


def test_released_job_is_taken_over_at_once(broker: Broker, slot: str):
    """Giving a job back is no failed attempt: the next holder's has the same number, and it does not wait."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    broker.release("w1", [held(delivery)])
    job_record = broker.job_record(job_id)
    assert job_record is not None
    assert (job_record.state, job_record.is_claimed) == (State.QUEUED, False)
    assert settle(broker, "w1", commit_of(delivery)) == [CommitStatus.FENCED]
    assert broker.take_over("w2", slot, 60_000, 8) == [delivery]
    assert settle(broker, "w2", commit_of(delivery)) == [CommitStatus.COMMITTED]


def test_job_that_is_handed_over_goes_to_those_who_have_its_version(brokerage: Brokerage, broker: Broker, slot: str):
    """At once, as no failed attempt, most urgent first; others find it when it has waited for a lease."""
    publish(broker, slot, 2, Priority.LOW)
    publish(broker, slot)
    deliveries = normal, low, late = claim(broker, "w1", slot)
    broker.release("w1", [held(delivery) for delivery in deliveries], version="2")
    assert settle(broker, "w1", commit_of(normal)) == [CommitStatus.FENCED]
    assert broker.take_over("w2", slot, 60_000, 8) == []
    assert broker.adopt("w2", slot, ["1", "3"], 8) == []
    assert broker.adopt("w2", slot, ["1", "2"], 2) == [normal, low]
    assert settle(broker, "w2", commit_of(normal)) == [CommitStatus.COMMITTED]
    brokerage.elapse(LEASE_MS + 10)
    assert broker.renew("w2", [held(low)]) == NOTHING
    assert broker.take_over("w3", slot, LEASE_MS, 8) == [late]
    assert broker.adopt("w2", slot, ["2"], 8) == []


def test_a_worker_without_the_claim_hands_nothing_over(broker: Broker, slot: str):
    """There is nothing to adopt of a model without claims, or whose jobs are gone."""
    assert broker.adopt("w", slot, ["1"], 8) == []
    publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    broker.release("w2", [held(delivery)], version="1")
    assert broker.adopt("w2", slot, ["1"], 8) == []
    assert settle(broker, "w1", commit_of(delivery)) == [CommitStatus.COMMITTED]
    broker.release("w1", [held(delivery)], version="1")
    assert broker.adopt("w2", slot, ["1"], 8) == []


def test_a_job_that_is_handed_over_keeps_its_crashes_and_its_cancellation(broker: Broker, slot: str):
    """An adopted job keeps its crashes, and its new worker learns that it was cancelled."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    broker.suspect(slot, [held(delivery)], "incident", TTL_MS)
    broker.release("w1", [held(delivery)], version="1")
    assert broker.cancel(job_id, "acme", b"") is CancelOutcome.REQUESTED
    assert broker.adopt("w2", slot, ["1"], 8) == [structs.replace(delivery, crashes=1)]
    assert broker.renew("w2", [held(delivery)]).cancelled == {job_id}


def test_only_the_holder_can_release(brokerage: Brokerage, broker: Broker, slot: str):
    """A release by another consumer, or of a job that is gone, does nothing."""
    publish(broker, slot, 2)
    mine, finished = claim(broker, "w1", slot)
    settle(broker, "w1", commit_of(finished))
    broker.release("w2", [held(mine)])
    broker.release("w1", [held(finished)])
    assert broker.take_over("w3", slot, 60_000, 8) == []
    assert broker.renew("w1", [held(mine)]) == NOTHING


def test_take_over_keeps_to_its_count_and_to_urgency(brokerage: Brokerage, broker: Broker, slot: str):
    """Lapsed jobs come most urgent first, oldest first, and no more than asked for."""
    low, high = publish(broker, slot, 12, Priority.LOW), publish(broker, slot, 3, Priority.HIGH)
    claim(broker, "w1", slot)
    brokerage.elapse(LEASE_MS + 10)
    assert ids(broker.take_over("w2", slot, LEASE_MS, 4)) == [*high, low[0]]
    assert ids(broker.take_over("w2", slot, LEASE_MS, 20)) == low[1:]


def test_take_over_of_an_idle_model_finds_nothing(broker: Broker, slot: str):
    """Neither waiting jobs nor an empty queue have anything to take over."""
    broker.prepare([slot])
    assert broker.take_over("w", slot, 0, 8) == []
    publish(broker, slot)
    assert broker.take_over("w", slot, 0, 8) == []


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.CANCELLED, State.EXPIRED, State.DEAD])
def test_commit_turns_the_record_into_the_result(broker: Broker, slot: str, state: State):
    """Every terminal state keeps its result and leaves the queue empty."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    assert settle(broker, "w", commit_of(delivery, b"result\x00\n\xff", state=state)) == [CommitStatus.COMMITTED]
    assert broker.job_record(job_id) == JobRecord(state, "", b"result\x00\n\xff")
    assert queued(broker, slot) == 0


def test_result_is_readable_until_its_expiry(brokerage: Brokerage, broker: Broker, slot: str):
    """A result lives for the time that its commit gave, counted from the commit."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    settle(broker, "w", commit_of(delivery), result_ttl_ms=100)
    assert broker.job_record(job_id) is not None
    brokerage.elapse(120)
    assert broker.job_record(job_id) is None


def test_job_that_outlives_its_lifetime_while_it_runs_is_answered(brokerage: Brokerage, broker: Broker, slot: str):
    """A forward that began in time finds its record: the result stands, and the tenant's place is free."""
    limits = Limits(max_depth=10, tenant_max_in_flight=1, job_ttl_ms=100)
    broker.publish(slot, [publication(slot)], limits)
    (delivery,) = claim(broker, "w", slot)
    brokerage.elapse(120)
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "tenant-full"
    assert settle(broker, "w", commit_of(delivery)) == [CommitStatus.COMMITTED]
    assert queued(broker, slot) == 0
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "accepted"


def test_large_commit_is_one_step(broker: Broker, slot: str):
    """A batch far above the usual size commits as a whole, in the order of its verdicts."""
    published = publish(broker, slot, 1500)
    deliveries = claim(broker, "w", slot, credit=1500)
    stranger = Delivery(slot, Priority.NORMAL, b"1-1", publication(slot).job_id.encode())
    statuses = settle(broker, "w", *(commit_of(delivery) for delivery in [*deliveries, stranger]))
    assert statuses == [CommitStatus.COMMITTED] * 1500 + [CommitStatus.FENCED]
    assert queued(broker, slot) == 0
    assert all(job_record and job_record.result == b"result" for job_record in broker.job_records(published))


def test_commit_spans_moments_of_acceptance(brokerage: Brokerage, broker: Broker, slot: str):
    """A batch of jobs accepted at several moments, many of them at the same one, is held as a whole."""
    publish(broker, slot, 12)
    brokerage.elapse(5)
    publish(broker, slot, 1)
    deliveries = claim(broker, "w", slot)
    statuses = settle(broker, "w", *(commit_of(delivery) for delivery in reversed(deliveries)))
    assert statuses == [CommitStatus.COMMITTED] * 13


def test_undecodable_bytes_go_to_the_dead_letters(broker: Broker, slot: str):
    """Bytes that no worker can open leave the queue, with the reason and as they were; only their holder may."""
    publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    assert not broker.dead_letter("w2", delivery, "not mine")
    assert broker.dead_letter("w1", delivery, "not an envelope")
    assert not broker.dead_letter("w1", delivery, "again")
    (letter,) = broker.dead_letters(slot)
    kept = broker.read_dead_letter(slot, letter.entry)
    assert kept is not None
    assert (kept.reason, kept.sealed) == ("not an envelope", delivery.sealed)
    assert queued(broker, slot) == 0


def test_a_dead_letter_ends_the_job_that_the_bytes_were_accepted_as(broker: Broker, slot: str):
    """Its client reads why; bytes that claim to be another queue's job under the same entry id end nothing."""
    jobs = [publication(slot, priority) for priority in (Priority.NORMAL, Priority.LOW)]
    broker.publish(slot, jobs, ROOMY)
    normal, low = (job.job_id for job in jobs)
    mine, other = claim(broker, "w", slot)
    assert broker.dead_letter("w", other, "bad", job_id=normal, sealed=b"forged")
    assert broker.job_records([normal, low]) == [JobRecord(State.QUEUED, "acme")] * 2
    assert broker.dead_letter("w", mine, "bad", job_id=normal, sealed=b"why")
    assert broker.job_records([normal]) == [JobRecord(State.DEAD, "", b"why")]


def test_entries_of_two_priorities_are_two_jobs(brokerage: Brokerage, broker: Broker, slot: str):
    """Accepted in one step they have the same entry id, each in its own queue: both leases are renewed."""
    jobs = [publication(slot, Priority.HIGH), publication(slot, Priority.LOW)]
    broker.publish(slot, jobs, ROOMY)
    deliveries = claim(broker, "w1", slot)
    brokerage.elapse(LEASE_MS * 2)
    assert broker.renew("w1", [held(delivery) for delivery in deliveries]) == NOTHING
    assert broker.take_over("w2", slot, LEASE_MS, 8) == []


def test_answered_jobs_are_counted(broker: Broker, slot: str):
    """The count goes up by every result, not by what was fenced, and begins at nothing."""
    assert broker.committed(slot) == 0
    publish(broker, slot, 3)
    first, second, _ = claim(broker, "w", slot)
    settle(broker, "w", commit_of(first), commit_of(second, state=State.FAILED))
    settle(broker, "w2", commit_of(second, b"late"))
    assert broker.committed(slot) == 2


def test_workers_are_listed_while_they_report(brokerage: Brokerage, broker: Broker, slot: str):
    """A report lives for its time; an empty one withdraws it."""
    broker.report(f"{slot}-a", b'{"n": "a"}', 60_000)
    broker.report(f"{slot}-b", b'{"n": "b"}', 100)
    assert [report for report in broker.workers() if report in (b'{"n": "a"}', b'{"n": "b"}')] == [
        b'{"n": "a"}',
        b'{"n": "b"}',
    ]
    brokerage.elapse(120)
    assert b'{"n": "b"}' not in broker.workers()
    broker.report(f"{slot}-a", b"", 60_000)
    assert b'{"n": "a"}' not in broker.workers()


def test_holding_nothing_is_fine(broker: Broker, slot: str):
    """Empty lists are no calls at all."""
    broker.prepare([])
    broker.release("w", [])
    assert broker.exchange("w", [], [], 1000) == ([], [])
    assert broker.renew("w", []) == NOTHING
