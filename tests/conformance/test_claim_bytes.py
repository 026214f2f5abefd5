"""A claim's credit in bytes: it ends when the credit is reached, and always gets at least one job."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import Broker, Claim, Delivery, Publication
from penstock.registry.queues import Priority, new_job_id
from tests.conformance.jobs import ROOMY, TTL_MS

KIB = 1024
MIB = 1024 * KIB


def publish(broker: Broker, slot: str, *sizes: int, priority: Priority = Priority.NORMAL) -> list[str]:
    """Jobs whose sealed bytes have these sizes; their ids, which the bytes begin with."""
    broker.prepare([slot])
    ids = [new_job_id(slot) for _ in sizes]
    for job_id, size in zip(ids, sizes, strict=True):
        job = Publication(job_id, priority, job_id.encode().ljust(size), "acme")
        assert broker.publish(slot, [job], ROOMY)[0].outcome == "accepted"
    return ids


def claim(
    broker: Broker, slot: str, credit_bytes: int, *, credit: int = 64, reserve: int = 0, ageing_ms: int = 60_000
) -> list[str]:
    """The ids of the jobs that this credit gets."""
    request = Claim(slot, credit, reserve, ageing_ms, credit_bytes)
    return [_id_of(delivery) for delivery in broker.exchange("w", [], [request], TTL_MS)[1]]


def _id_of(delivery: Delivery) -> str:
    return delivery.sealed.rstrip().decode()


@pytest.mark.parametrize("expected_bytes", [1, 5 * MIB, 100 * MIB])
def test_one_claim_hands_out_a_bounded_number_of_bytes(broker: Broker, slot: str, expected_bytes: int):
    """Whatever the credit is and the worker expects: the broker does nothing else meanwhile."""
    jobs = publish(broker, slot, *[5 * MIB] * 5, *[10] * 30)
    request = Claim(slot, 64, 0, 60_000, 1 << 40, expected_bytes)
    found = [[_id_of(each) for each in broker.exchange("w", [], [request], TTL_MS)[1]] for _ in range(2)]
    if expected_bytes > 1:
        assert found == [jobs[:4], jobs[4:]]
    else:
        assert [*found[0], *found[1]] == jobs, "a wrong guess claims more at once, within the credit"


def test_a_claim_ends_when_its_bytes_are_reached(broker: Broker, slot: str):
    """The job that reaches them is the last one, and the next claim goes on behind it."""
    jobs = publish(broker, slot, *[100 * KIB] * 8)
    assert claim(broker, slot, 250 * KIB) == jobs[:3]
    assert claim(broker, slot, 300 * KIB) == jobs[3:6]
    assert claim(broker, slot, 100 * MIB) == jobs[6:]


@pytest.mark.parametrize("credit_bytes", [1, KIB, 2 * MIB])
def test_a_job_larger_than_the_credit_is_claimed_alone(broker: Broker, slot: str, credit_bytes: int):
    """Any credit gets one job, or the job would wait for ever."""
    large, small = publish(broker, slot, 3 * MIB, KIB)
    assert claim(broker, slot, credit_bytes) == [large]
    assert claim(broker, slot, credit_bytes) == [small]


def test_no_credit_gets_no_job(broker: Broker, slot: str):
    """The job stays in the queue."""
    (job,) = publish(broker, slot, KIB)
    assert claim(broker, slot, 0) == []
    assert claim(broker, slot, 1) == [job]


def test_both_credits_bound_a_claim(broker: Broker, slot: str):
    """Whichever is used up first."""
    jobs = publish(broker, slot, *[KIB] * 40)
    assert claim(broker, slot, 100 * MIB, credit=30) == jobs[:30]
    assert claim(broker, slot, 5 * KIB, credit=30) == jobs[30:35]
    assert claim(broker, slot, 100 * MIB, credit=30) == jobs[35:]


def test_more_jobs_than_surely_fit_are_claimed_when_they_are_small(broker: Broker, slot: str):
    """25 of the largest jobs would fill this credit; of small ones it gets all, in order and over priorities."""
    urgent = publish(broker, slot, *[200] * 60, priority=Priority.CRITICAL)
    calm = publish(broker, slot, *[200] * 60, priority=Priority.LOW)
    assert claim(broker, slot, 256 * MIB, credit=100) == [*urgent, *calm[:40]]


def test_bytes_of_urgent_jobs_leave_room_for_an_aged_one(broker: Broker, slot: str):
    """The reserve gets one job, also when more urgent ones have used up the bytes; without an aged one it gets none."""
    urgent = publish(broker, slot, *[MIB] * 4, priority=Priority.HIGH)
    assert claim(broker, slot, MIB, reserve=8, ageing_ms=0) == urgent[:1]
    aged = publish(broker, slot, MIB, MIB, priority=Priority.LOW)
    assert claim(broker, slot, MIB, reserve=8, ageing_ms=60_000) == urgent[1:2]
    assert claim(broker, slot, MIB, reserve=8, ageing_ms=0) == [urgent[2], aged[0]]
    assert claim(broker, slot, MIB, reserve=0, ageing_ms=0) == urgent[3:]


def test_two_claims_of_one_exchange_have_their_own_credits(broker: Broker, slot: str):
    """Large jobs of one model use up nothing of the other one's."""
    other = f"{slot}-other"
    large, small = publish(broker, slot, MIB, MIB), publish(broker, other, KIB, KIB)
    claims = [Claim(slot, 64, 0, 60_000, KIB), Claim(other, 64, 0, 60_000, KIB + 1)]
    assert [_id_of(each) for each in broker.exchange("w", [], claims, TTL_MS)[1]] == [large[0], *small]
