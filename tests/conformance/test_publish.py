"""Publishing: one step, exact limits, one job per id and per idempotency key."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from penstock.registry.broker.base import Broker, CancelOutcome, JobRecord, Limits, State
from penstock.registry.queues import Priority
from tests.conformance.conftest import Brokerage
from tests.conformance.jobs import ROOMY, claim, commit_of, ids, publication, publish, queued, settle


def test_accepted_job_waits_in_its_queue(broker: Broker, slot: str):
    """An accepted job has a record that says so, and stands in the queue of its priority alone."""
    (job_id,) = publish(broker, slot, priority=Priority.HIGH)
    record = broker.job_record(job_id)
    assert record is not None
    assert (record.state, record.tenant, record.is_claimed) == (State.QUEUED, "acme", False)
    assert [depth.jobs for depth in broker.depths(slot)] == [0, 1, 0, 0]


def test_jobs_can_be_looked_at_before_any_worker_existed(broker: Broker, slot: str):
    """A model without a worker has jobs that wait: every look at them works."""
    waiting, withdrawn = publish(broker, slot, 2)
    record = broker.job_record(waiting, subscribe=True)
    assert record is not None
    assert (record.state, record.is_claimed, record.deliveries) == (State.QUEUED, False, 0)
    assert broker.cancel(withdrawn, "acme", b"cancelled") is CancelOutcome.CANCELLED
    assert ids(claim(broker, "w", slot)) == [waiting]


def test_an_unknown_job_has_no_record(broker: Broker, slot: str):
    """A job that was never published is None, alone and in a list."""
    (job_id,) = publish(broker, slot)
    stranger = publication(slot).job_id
    assert broker.job_record(stranger) is None
    assert broker.job_records([stranger, job_id]) == [None, JobRecord(State.QUEUED, "acme")]
    assert broker.job_records([]) == []


def test_publishing_an_id_again_changes_nothing(broker: Broker, slot: str):
    """A client that did not hear the first answer may repeat itself: waiting, running or finished, it is one job."""
    job = publication(slot)
    for _ in range(2):
        (receipt,) = broker.publish(slot, [job], ROOMY)
        assert (receipt.outcome, receipt.job_id) == ("accepted", job.job_id)
    (delivery,) = claim(broker, "w", slot)
    broker.publish(slot, [job], ROOMY)
    assert claim(broker, "w", slot) == []
    settle(broker, "w", commit_of(delivery, b"answer"))
    broker.publish(slot, [job], ROOMY)
    assert queued(broker, slot) == 0
    assert broker.job_records([job.job_id]) == [JobRecord(State.COMPLETED, "", b"answer")]


def test_repeated_id_is_accepted_by_a_full_queue(broker: Broker, slot: str):
    """The repeat of an accepted job is no new job, so there is always room for it."""
    job, limits = publication(slot), Limits(1, 1, 60_000)
    broker.publish(slot, [job], limits)
    assert [receipt.outcome for receipt in broker.publish(slot, [job], limits)] == ["accepted"]
    assert queued(broker, slot) == 1


def test_an_id_from_an_earlier_process_exists(broker: Broker, slot: str):
    """Whoever derives ids may publish a job again. It is one job, and its reply goes where it was to go at first."""
    job_id = publication(slot).job_id
    mine, others, strange = (
        publication(slot, job_id=job_id, reply=f"{{{slot}}}:reply:{client}", tenant=tenant)
        for client, tenant in (("a", "acme"), ("b", "acme"), ("a", "globex"))
    )

    def outcomes(limits: Limits = ROOMY) -> list[str]:
        receipts = broker.publish(slot, [mine, others, strange], limits)
        assert {receipt.job_id for receipt in receipts} == {job_id}
        return [receipt.outcome for receipt in receipts]

    assert outcomes() == ["accepted", "exists", "exists"]
    assert outcomes(Limits(1, 0, 60_000)) == ["accepted", "exists", "exists"]
    (delivery,) = claim(broker, "w", slot)
    assert outcomes() == ["accepted", "exists", "exists"]
    settle(broker, "w", commit_of(delivery, b"answer"))
    # The reply has gone out: whoever publishes now reads the record.
    assert outcomes() == ["exists"] * 3
    assert queued(broker, slot) == 0
    assert broker.job_records([job_id]) == [JobRecord(State.COMPLETED, "", b"answer")]


def test_full_queue_refuses_exactly_what_is_too_much(broker: Broker, slot: str):
    """Depth counts per priority; a refused job leaves no trace, and its answer says when to come back."""
    jobs = [publication(slot) for _ in range(5)]
    receipts = broker.publish(slot, [*jobs, publication(slot, Priority.LOW)], Limits(3, 0, 60_000))
    assert [receipt.outcome for receipt in receipts] == ["accepted"] * 3 + ["full"] * 2 + ["accepted"]
    assert [receipt.retry_after_s > 0 for receipt in receipts] == [False] * 3 + [True] * 2 + [False]
    assert broker.job_records([job.job_id for job in jobs])[3:] == [None, None]
    assert [depth.jobs for depth in broker.depths(slot)] == [0, 0, 3, 1]


def test_running_jobs_count_towards_the_depth(broker: Broker, slot: str):
    """A queue is as deep with its jobs in a worker's hands as with them waiting; a commit makes room."""
    limits = Limits(2, 0, 60_000)
    broker.publish(slot, [publication(slot), publication(slot)], limits)
    delivery, _ = claim(broker, "w", slot)
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "full"
    settle(broker, "w", commit_of(delivery))
    assert broker.publish(slot, [publication(slot)], limits)[0].outcome == "accepted"


def test_concurrent_publishers_share_the_last_room_exactly(brokerage: Brokerage, slot: str):
    """Admission is one step: four publishers at once get exactly as many jobs in as there is room for."""

    def offer(_: int) -> int:
        end = brokerage.connect()
        receipts = [end.publish(slot, [publication(slot)], Limits(70, 0, 60_000))[0] for _ in range(40)]
        end.close()
        return sum(receipt.outcome == "accepted" for receipt in receipts)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(offer, range(4))) == 70


def test_tenant_has_its_own_limit(broker: Broker, slot: str):
    """A tenant at its limit is refused while another is not; a finished and a cancelled job both make room."""
    limits = Limits(100, 2, 60_000)

    def offer(tenant: str) -> str:
        return broker.publish(slot, [publication(slot, tenant=tenant)], limits)[0].outcome

    first = publication(slot, tenant="noisy")
    broker.publish(slot, [first], limits)
    assert [offer("noisy"), offer("noisy"), offer("quiet")] == ["accepted", "tenant-full", "accepted"]
    (delivery,) = claim(broker, "w", slot, credit=1)
    settle(broker, "w", commit_of(delivery, tenant="noisy"))
    assert [offer("noisy"), offer("noisy")] == ["accepted", "tenant-full"]
    second = ids(claim(broker, "w", slot, credit=1))
    assert broker.cancel(second[0], "noisy", b"") is CancelOutcome.REQUESTED
    third = publication(slot, tenant="other")
    broker.publish(slot, [third], limits)
    assert [offer("other"), offer("other")] == ["accepted", "tenant-full"]
    assert broker.cancel(third.job_id, "other", b"") is CancelOutcome.CANCELLED
    assert [offer("other"), offer("other")] == ["accepted", "tenant-full"]


def test_retry_after_follows_the_drain_rate(brokerage: Brokerage, broker: Broker, slot: str):
    """A refused client is told to come back sooner from a queue that drains, and later the more were refused."""
    limits = Limits(60, 0, 60_000)
    broker.publish(slot, [publication(slot) for _ in range(60)], limits)
    assert broker.publish(slot, [publication(slot)], limits)[0].retry_after_s == 1.0
    settle(broker, "w", *(commit_of(delivery) for delivery in claim(broker, "w", slot, credit=60)))
    broker.publish(slot, [publication(slot) for _ in range(60)], limits)
    brokerage.elapse(600)
    receipts = broker.publish(slot, [publication(slot) for _ in range(50)], limits)
    assert receipts[0].retry_after_s < 1.0
    assert receipts[0].retry_after_s < receipts[-1].retry_after_s


def test_idempotency_key_answers_with_its_first_job(broker: Broker, slot: str):
    """The same key with the same payload is the first job again; with another payload it is a conflict."""
    first = publication(slot, idempotency_digest="k", fingerprint="p")
    broker.publish(slot, [first], ROOMY)
    again, other = (
        publication(slot, idempotency_digest="k", fingerprint="p"),
        publication(slot, idempotency_digest="k", fingerprint="q"),
    )
    known, conflict = broker.publish(slot, [again, other], ROOMY)
    assert (known.outcome, known.job_id) == ("known", first.job_id)
    assert conflict.outcome == "conflict"
    assert broker.job_records([again.job_id, other.job_id]) == [None, None]
    assert queued(broker, slot) == 1


def test_idempotency_key_holds_inside_one_call(broker: Broker, slot: str):
    """Two jobs of one call that share a key are one job."""
    pair = [publication(slot, idempotency_digest="k", fingerprint="p") for _ in range(2)]
    receipts = broker.publish(slot, pair, ROOMY)
    assert [receipt.outcome for receipt in receipts] == ["accepted", "known"]
    assert {receipt.job_id for receipt in receipts} == {pair[0].job_id}


def test_idempotency_key_of_a_refused_job_stays_free(broker: Broker, slot: str):
    """A job that found no room has not used its key."""
    publish(broker, slot)
    job = publication(slot, idempotency_digest="k", fingerprint="p")
    assert broker.publish(slot, [job], Limits(1, 0, 60_000))[0].outcome == "full"
    assert broker.publish(slot, [job], ROOMY)[0].outcome == "accepted"


def test_idempotency_key_lives_as_long_as_the_result(brokerage: Brokerage, broker: Broker, slot: str):
    """After the result has expired, its key begins anew."""
    job = publication(slot, idempotency_digest="k", fingerprint="p")
    broker.publish(slot, [job], ROOMY)
    (delivery,) = claim(broker, "w", slot)
    settle(broker, "w", commit_of(delivery, idempotency_digest="k"), result_ttl_ms=100)
    assert (
        broker.publish(slot, [publication(slot, idempotency_digest="k", fingerprint="p")], ROOMY)[0].outcome == "known"
    )
    brokerage.elapse(110)
    assert broker.job_record(job.job_id) is None
    assert (
        broker.publish(slot, [publication(slot, idempotency_digest="k", fingerprint="other")], ROOMY)[0].outcome
        == "accepted"
    )


def test_specs_are_published_and_listed(broker: Broker, slot: str):
    """A model's spec is what was last put; its name is listed."""
    assert broker.spec(slot) is None
    broker.put_spec(slot, b"{}")
    broker.put_spec(slot, b'{"name": 1}')
    assert broker.spec(slot) == b'{"name": 1}'
    assert slot in broker.models()
