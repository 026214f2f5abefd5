"""The end of a job whose deadline or lifetime has passed: by the first caller that touches it, once."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import (
    Broker,
    CommitStatus,
    Delivery,
    JobRecord,
    Limits,
    Renewal,
    Replay,
    State,
    Withdrawal,
)
from penstock.registry.queues import events_key, reply_key
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

DEADLINE_MS = 40
EXPIRED = JobRecord(State.EXPIRED, "", b"expired")


def urgent(broker: Broker, slot: str, count: int = 1, *, reply: str = "") -> list[str]:
    """Publishes jobs with a deadline; returns their ids."""
    jobs = [publication(slot, reply=reply, deadline_ms=DEADLINE_MS) for _ in range(count)]
    assert {receipt.outcome for receipt in broker.publish(slot, jobs, ROOMY)} == {"accepted"}
    return [job.job_id for job in jobs]


def test_overdue_job_is_ended_once(brokerage: Brokerage, broker: Broker, slot: str):
    """The first call ends the job, empties its place in the queue, and the second one does nothing."""
    overdue, other = urgent(broker, slot)[0], publish(broker, slot)[0]
    brokerage.elapse(2 * DEADLINE_MS)
    assert broker.expire(overdue, "acme", b"expired")
    assert not broker.expire(overdue, "acme", b"again")
    assert broker.job_record(overdue) == EXPIRED
    assert queued(broker, slot) == 1
    assert ids(claim(broker, "w", slot)) == [other]


def test_job_lives_until_its_deadline(broker: Broker, slot: str):
    """Before its time no call can end a job as expired; the record tells how much of the time is left."""
    job = publication(slot, deadline_ms=60_000)
    broker.publish(slot, [job], Limits(100, 0, 3_600_000))
    assert not broker.expire(job.job_id, "acme", b"expired")
    record = broker.job_record(job.job_id)
    assert record is not None
    assert record.state is State.QUEUED
    assert record.left_ms is not None
    assert 0 < record.left_ms <= 60_000


def test_lifetime_ends_a_job_without_a_deadline(brokerage: Brokerage, broker: Broker, slot: str):
    """The lifetime of the limits is the latest deadline, also of a job that names a later one."""
    limits = Limits(100, 0, DEADLINE_MS)
    jobs = [publication(slot), publication(slot, deadline_ms=3_600_000)]
    broker.publish(slot, jobs, limits)
    brokerage.elapse(2 * DEADLINE_MS)
    assert [broker.expire(job.job_id, "acme", b"expired") for job in jobs] == [True, True]
    assert queued(broker, slot) == 0


def test_reader_learns_that_the_time_has_passed(brokerage: Brokerage, broker: Broker, slot: str):
    """A record that is not ended yet shows a negative rest."""
    (job_id,) = urgent(broker, slot)
    brokerage.elapse(2 * DEADLINE_MS)
    record = broker.job_record(job_id)
    assert record is not None
    assert record.left_ms is not None
    assert record.left_ms < 0


def test_held_job_is_left_to_its_worker(brokerage: Brokerage, broker: Broker, slot: str):
    """A worker that began in time finishes: no other process ends the job while its lease counts."""
    (job_id,) = urgent(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    brokerage.elapse(2 * DEADLINE_MS)
    assert not broker.expire(job_id, "acme", b"expired")
    assert settle(broker, "w", commit_of(delivery, b"done")) == [CommitStatus.COMMITTED]
    assert broker.job_record(job_id) == JobRecord(State.COMPLETED, "", b"done")


def _held_and_lapsed(brokerage: Brokerage, broker: Broker, slot: str, *, for_ms: float) -> tuple[str, Delivery]:
    """An overdue job, and the delivery of a worker that has not renewed its lease for so long."""
    broker.prepare([slot])
    # A worker that looks for jobs tells the length of its leases.
    broker.take_over("other", slot, LEASE_MS, 8)
    (job_id,) = urgent(broker, slot)
    (delivery,) = claim(broker, "dead", slot)
    brokerage.elapse(for_ms)
    return job_id, delivery


def _ask(brokerage: Brokerage, broker: Broker, job_id: str, times: int, *, every_ms: float) -> list[bool]:
    """What `times` calls answered, each after a pause."""
    answers = []
    for _ in range(times):
        brokerage.elapse(every_ms)
        answers.append(broker.expire(job_id, "acme", b"expired"))
    return answers


def test_job_of_a_dead_worker_expires_after_a_lease_of_calls(brokerage: Brokerage, broker: Broker, slot: str):
    """The first call finds the lease lapsed. When calls have come for another lease, no worker holds the job."""
    job_id, delivery = _held_and_lapsed(brokerage, broker, slot, for_ms=LEASE_MS + 10)
    assert not broker.expire(job_id, "acme", b"expired")
    assert _ask(brokerage, broker, job_id, 4, every_ms=LEASE_MS / 4 + 1) == [False, False, False, True]
    assert settle(broker, "dead", commit_of(delivery, b"late")) == [CommitStatus.FENCED]
    assert broker.renew("dead", [held(delivery)]) == Renewal(frozenset({held(delivery)}), frozenset())
    assert broker.take_over("other", slot, 0, 8) == []
    assert broker.job_record(job_id) == EXPIRED


@pytest.mark.parametrize("pauses", [1, 2])
def test_pause_of_the_broker_leaves_a_living_worker_its_job(
    brokerage: Brokerage, broker: Broker, slot: str, pauses: int
):
    """However long the broker was paused, clients whose calls come before the renewal do not end the job."""
    job_id, delivery = _held_and_lapsed(brokerage, broker, slot, for_ms=0)
    for _ in range(pauses):
        brokerage.elapse(8 * LEASE_MS)
        assert not any(broker.expire(job_id, "acme", b"expired") for _ in range(2))
    assert broker.renew("dead", [held(delivery)]).lost == frozenset()
    assert not broker.expire(job_id, "acme", b"expired")
    assert settle(broker, "dead", commit_of(delivery, b"done")) == [CommitStatus.COMMITTED]


def test_long_gap_between_calls_counts_a_quarter_of_a_lease(brokerage: Brokerage, broker: Broker, slot: str):
    """Clients that ask seldom end the job, too: a call counts something, however long the gap before it was."""
    job_id, _ = _held_and_lapsed(brokerage, broker, slot, for_ms=8 * LEASE_MS)
    assert not broker.expire(job_id, "acme", b"expired")
    assert _ask(brokerage, broker, job_id, 4, every_ms=3 * LEASE_MS) == [False, False, False, True]


def test_renewal_begins_the_count_anew(brokerage: Brokerage, broker: Broker, slot: str):
    """What was counted before the worker was heard of again does not shorten its next lease."""
    job_id, delivery = _held_and_lapsed(brokerage, broker, slot, for_ms=LEASE_MS + 10)
    every_ms = LEASE_MS / 4 + 1
    assert _ask(brokerage, broker, job_id, 4, every_ms=every_ms) == [False] * 4
    broker.renew("dead", [held(delivery)])
    brokerage.elapse(LEASE_MS + 10)
    assert _ask(brokerage, broker, job_id, 5, every_ms=every_ms) == [False, False, False, False, True]


def test_next_holder_begins_the_count_anew(brokerage: Brokerage, broker: Broker, slot: str):
    """A worker that takes the job over holds it for a lease of its own."""
    job_id, _ = _held_and_lapsed(brokerage, broker, slot, for_ms=LEASE_MS + 10)
    every_ms = LEASE_MS / 4 + 1
    assert _ask(brokerage, broker, job_id, 4, every_ms=every_ms) == [False] * 4
    (again,) = broker.take_over("other", slot, LEASE_MS, 8)
    brokerage.elapse(LEASE_MS + 10)
    assert _ask(brokerage, broker, job_id, 3, every_ms=every_ms) == [False] * 3
    assert settle(broker, "other", commit_of(again, b"done")) == [CommitStatus.COMMITTED]


@pytest.mark.parametrize("version", ["", "2"])
def test_released_job_expires(brokerage: Brokerage, broker: Broker, slot: str, version: str):
    """No worker holds a job that was given back, whether for any worker or for those with a version."""
    (job_id,) = urgent(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    broker.release("w", [held(delivery)], version=version)
    brokerage.elapse(2 * DEADLINE_MS)
    assert broker.expire(job_id, "acme", b"expired")
    assert broker.take_over("other", slot, 0, 8) == broker.adopt("other", slot, ["2"], 8) == []


def test_client_and_subscriber_are_told(brokerage: Brokerage, broker: Broker, slot: str):
    """The reply stream brings the record, the event stream the end."""
    reply = reply_key(slot, "c1")
    (job_id,) = urgent(broker, slot, reply=reply)
    broker.job_record(job_id, subscribe=True)
    brokerage.elapse(2 * DEADLINE_MS)
    broker.expire(job_id, "acme", b"expired")
    told, end = (broker.read({key: "0-0"}, 0) for key in (reply, events_key(job_id)))
    assert [entry.fields for entry in told] == [[job_id.rpartition(".")[2].encode(), b"E-expired"]]
    assert [entry.fields[:2] for entry in end] == [[b"t", b"E"]]


def test_other_tenant_cannot_end_it(brokerage: Brokerage, broker: Broker, slot: str):
    """The job of another tenant, and an unknown one, are left alone."""
    (job_id,) = urgent(broker, slot)
    brokerage.elapse(2 * DEADLINE_MS)
    assert not broker.expire(job_id, "globex", b"expired")
    assert not broker.expire(f"{slot}.00000000-0000-7000-8000-000000000000", "acme", b"expired")
    assert queued(broker, slot) == 1


def test_expired_jobs_are_no_longer_in_flight(brokerage: Brokerage, broker: Broker, slot: str):
    """Their tenant may submit as many again."""
    limits = Limits(100, 2, TTL_MS)
    jobs = [publication(slot, deadline_ms=DEADLINE_MS) for _ in range(2)]
    broker.publish(slot, jobs, limits)
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "tenant-full"
    brokerage.elapse(2 * DEADLINE_MS)
    assert all([broker.expire(job.job_id, "acme", b"expired") for job in jobs])
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "accepted"


def test_idempotency_key_outlives_the_end(brokerage: Brokerage, broker: Broker, slot: str):
    """The same request under the same key is the expired job, as long as its result is kept."""
    job = publication(slot, deadline_ms=DEADLINE_MS, idempotency_digest="d", fingerprint="f")
    broker.publish(slot, [job], ROOMY)
    brokerage.elapse(2 * DEADLINE_MS)
    broker.expire(job.job_id, "acme", b"expired")
    again = publication(slot, idempotency_digest="d", fingerprint="f")
    (receipt,) = broker.publish(slot, [again], ROOMY)
    assert (receipt.outcome, receipt.job_id) == ("known", job.job_id)


@pytest.mark.parametrize("keeps_acceptance", [True, False])
def test_replayed_letter_keeps_its_deadline(brokerage: Brokerage, broker: Broker, slot: str, keeps_acceptance: bool):
    """A replay that keeps the acceptance keeps the time that is left; any other begins anew."""
    job = publication(slot, deadline_ms=60_000)
    broker.publish(slot, [job], ROOMY)
    (delivery,) = claim(broker, "w", slot)
    brokerage.elapse(100)
    assert broker.dead_letter("w", delivery, "why", job_id=job.job_id, sealed=b"dead")
    (letter,) = broker.dead_letters(slot)
    outcome = broker.replay(slot, letter.entry, job, TTL_MS, keeps_acceptance=keeps_acceptance)
    assert outcome is Replay.REPLAYED
    record = broker.job_record(job.job_id)
    assert record is not None
    assert record.left_ms is not None
    assert (record.left_ms <= 60_000 - 100) is keeps_acceptance


def test_withdrawn_job_can_end_as_expired(broker: Broker, slot: str):
    """A sweep of the queue gives the state with the result."""
    (job_id,) = publish(broker, slot)
    (waiting,) = broker.waiting(slot, publication(slot).priority, b"", 8, 64)
    withdrawal = Withdrawal(waiting.entry_id, job_id, "acme", b"expired", State.EXPIRED)
    assert broker.withdraw(slot, publication(slot).priority, [withdrawal], TTL_MS) == 1
    assert broker.job_record(job_id) == EXPIRED
