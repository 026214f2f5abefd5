"""Cancelling: in every state of a job, and with everyone told who needs to know."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import Broker, CancelOutcome, JobRecord, Renewal, State
from penstock.registry.queues import reply_key
from tests.conformance.conftest import Brokerage
from tests.conformance.jobs import ROOMY, claim, commit_of, held, ids, publication, publish, queued, settle


def test_waiting_job_is_withdrawn(broker: Broker, slot: str):
    """A waiting job that is cancelled is never claimed. Its result is that of the caller."""
    first, second = publish(broker, slot, 2)
    assert broker.cancel(first, "acme", b"cancelled") is CancelOutcome.CANCELLED
    assert broker.job_record(first) == JobRecord(State.CANCELLED, "", b"cancelled")
    assert ids(claim(broker, "w", slot)) == [second]
    assert queued(broker, slot) == 1


def test_running_job_is_asked_to_stop(broker: Broker, slot: str):
    """The holder hears of it with its next renewal, and what it commits is the end."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    assert broker.renew("w", [held(delivery)]).cancelled == frozenset()
    assert broker.cancel(job_id, "acme", b"cancelled") is CancelOutcome.REQUESTED
    assert broker.cancel(job_id, "acme", b"cancelled") is CancelOutcome.REQUESTED
    job_record = broker.job_record(job_id)
    assert job_record is not None
    assert (job_record.state, job_record.tenant, job_record.cancel_requested) == (State.QUEUED, "acme", True)
    renewal = broker.renew("w", [held(delivery)])
    assert renewal == Renewal(lost=frozenset(), cancelled=frozenset({job_id}))
    settle(broker, "w", commit_of(delivery, b"stopped", state=State.CANCELLED))
    assert broker.job_record(job_id) == JobRecord(State.CANCELLED, "", b"stopped")


def test_asked_job_that_still_finishes_is_completed(broker: Broker, slot: str):
    """A request to stop that came too late for the worker changes nothing about the result."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    broker.cancel(job_id, "acme", b"cancelled")
    settle(broker, "w", commit_of(delivery, b"done"))
    assert broker.job_record(job_id) == JobRecord(State.COMPLETED, "", b"done")


def test_request_survives_the_worker(brokerage: Brokerage, broker: Broker, slot: str):
    """The next holder of a job whose cancellation was asked for hears of it too."""
    (job_id,) = publish(broker, slot)
    claim(broker, "w1", slot)
    broker.cancel(job_id, "acme", b"cancelled")
    brokerage.elapse(60)
    (delivery,) = broker.take_over("w2", slot, 50, 8)
    assert broker.renew("w2", [held(delivery)]).cancelled == {job_id}


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.CANCELLED, State.EXPIRED, State.DEAD])
def test_finished_job_answers_with_its_record(broker: Broker, slot: str, state: State):
    """Too late: the result stays, and the caller needs no second call to learn how the job ended."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    settle(broker, "w", commit_of(delivery, b"result", state=state))
    assert broker.cancel(job_id, "acme", b"cancelled") == JobRecord(state, "", b"result")
    assert broker.job_record(job_id) == JobRecord(state, "", b"result")


def test_released_job_is_withdrawn(broker: Broker, slot: str):
    """A released job waits again. After its cancellation no worker takes it over."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    broker.release("w1", [held(delivery)])
    assert broker.cancel(job_id, "acme", b"cancelled") is CancelOutcome.CANCELLED
    assert broker.take_over("w2", slot, 0, 8) == []
    assert queued(broker, slot) == 0


def test_unknown_job_and_another_tenants_look_the_same(broker: Broker, slot: str):
    """A refusal does not tell whether a job exists. Another tenant's job continues."""
    (job_id,) = publish(broker, slot)
    assert broker.cancel(job_id, "rival", b"cancelled") is CancelOutcome.UNKNOWN
    assert broker.cancel(publication(slot).job_id, "acme", b"cancelled") is CancelOutcome.UNKNOWN
    claim(broker, "w", slot)
    assert broker.cancel(job_id, "rival", b"cancelled") is CancelOutcome.UNKNOWN
    assert broker.job_records([job_id]) == [JobRecord(State.QUEUED, "acme")]


def test_submitter_hears_of_a_cancellation(broker: Broker, slot: str):
    """The client that waits for the job is told, also when another client cancelled it."""
    reply = reply_key(slot, "client")
    (job_id,) = publish(broker, slot, reply=reply)
    broker.cancel(job_id, "acme", b"cancelled")
    (entry,) = broker.read({reply: "0-0"}, 0)
    assert entry.fields == [job_id.rpartition(".")[2].encode(), b"X-cancelled"]


def test_cancelled_job_still_answers_for_its_idempotency_key(broker: Broker, slot: str):
    """Cancelling does not free the key: the same request again is the cancelled job."""
    job = publication(slot, idempotency_digest="k", fingerprint="p")
    broker.publish(slot, [job], ROOMY)
    broker.cancel(job.job_id, "acme", b"cancelled")
    (receipt,) = broker.publish(slot, [publication(slot, idempotency_digest="k", fingerprint="p")], ROOMY)
    assert (receipt.outcome, receipt.job_id) == ("known", job.job_id)


def test_a_followed_job_is_not_abandoned(brokerage: Brokerage, broker: Broker, slot: str):
    """Its submitter leaves it while another process waits for it, whether a worker holds it or not."""
    waiting, running = publish(broker, slot, 2)
    (delivery,) = claim(broker, "w", slot, 1)
    assert ids([delivery]) == [waiting]
    waiting, running = running, waiting
    for job_id in (waiting, running):
        broker.follow([job_id], "one", 1000)
        broker.follow([job_id], "other", 1000)
        assert broker.abandon(job_id, "acme", b"cancelled") is CancelOutcome.FOLLOWED
        broker.unfollow([job_id], "one")
        assert broker.abandon(job_id, "acme", b"cancelled") is CancelOutcome.FOLLOWED
        assert broker.abandon(job_id, "zeta", b"cancelled") is CancelOutcome.UNKNOWN
        broker.unfollow([job_id], "other")
    assert broker.renew("w", [held(delivery)]).cancelled == frozenset()
    assert broker.abandon(waiting, "acme", b"cancelled") is CancelOutcome.CANCELLED
    assert broker.abandon(running, "acme", b"cancelled") is CancelOutcome.REQUESTED
    assert broker.abandon(waiting, "acme", b"cancelled") == JobRecord(State.CANCELLED, "", b"cancelled")


def test_a_follower_that_is_silent_lapses(brokerage: Brokerage, broker: Broker, slot: str):
    """A process that died waits for nothing. One that follows again stays, whatever another one does."""
    first, second = publish(broker, slot, 2)
    for job_id in (first, second):
        broker.follow([job_id], "died", 500)
    broker.follow([second], "lives", 100)
    broker.follow([second], "lives", 60_000)
    brokerage.elapse(600)
    assert broker.abandon(first, "acme", b"cancelled") is CancelOutcome.CANCELLED
    broker.unfollow([second], "died")
    assert broker.abandon(second, "acme", b"cancelled") is CancelOutcome.FOLLOWED


def test_a_request_of_a_user_cancels_a_followed_job(broker: Broker, slot: str):
    """Only a submitter that waits no longer leaves it to its followers."""
    (job_id,) = publish(broker, slot)
    broker.follow([job_id], "one", 1000)
    assert broker.cancel(job_id, "acme", b"cancelled") is CancelOutcome.CANCELLED
