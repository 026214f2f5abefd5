"""A pause: no job of the model is handed out until the end of it, and nothing else changes."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import Broker, Claim, CommitStatus
from tests.conformance.conftest import Brokerage, OnRedis
from tests.conformance.jobs import LEASE_MS, TTL_MS, claim, commit_of, held, ids, publish, queued, settle


def test_paused_model_hands_out_nothing(brokerage: Brokerage, broker: Broker, slot: str):
    """Jobs are accepted and wait. Claims find none until an operator resumes the model."""
    waiting = publish(broker, slot, 2)
    operator = brokerage.connect()
    operator.pause(slot)
    waiting += publish(broker, slot, 1)
    assert claim(broker, "w", slot) == []
    assert queued(broker, slot) == 3
    operator.resume(slot)
    assert ids(claim(broker, "w", slot)) == waiting
    operator.close()


def test_running_jobs_go_on(brokerage: Brokerage, broker: Broker, slot: str):
    """During a pause leases are renewed and results committed."""
    publish(broker, slot, 1)
    (delivery,) = claim(broker, "w", slot)
    broker.pause(slot)
    assert broker.renew("w", [held(delivery)]).lost == frozenset()
    assert settle(broker, "w", commit_of(delivery)) == [CommitStatus.COMMITTED]
    assert queued(broker, slot) == 0


def test_lapsed_and_released_jobs_wait_for_the_end_of_the_pause(brokerage: Brokerage, broker: Broker, slot: str):
    """What a dead worker left, or a living one gave back, is not started either."""
    publish(broker, slot, 3)
    lapsed, released, handed_over = claim(broker, "w1", slot)
    broker.release("w1", [held(released)])
    broker.pause(slot)
    brokerage.elapse(LEASE_MS + 10)
    broker.release("w1", [held(handed_over)], version="1")
    assert broker.take_over("w2", slot, LEASE_MS, 8) == []
    assert broker.adopt("w2", slot, ["1"], 8) == []
    broker.resume(slot)
    assert ids(broker.adopt("w2", slot, ["1"], 8)) == ids([handed_over])
    assert ids(broker.take_over("w2", slot, LEASE_MS, 8)) == ids([lapsed, released])


def test_pause_is_one_models_own(broker: Broker, slot: str):
    """Another model's jobs are handed out, in the same round trip."""
    busy = f"{slot}-b"
    broker.pause(slot)
    publish(broker, slot)
    expected = publish(broker, busy)
    broker.prepare([slot, busy])
    _, deliveries = broker.exchange("w", [], [Claim(slot, 8, 0, 0), Claim(busy, 8, 0, 0)], TTL_MS)
    assert ids(deliveries) == expected
    assert broker.paused([slot, busy]) == {slot}
    broker.resume(slot)
    assert broker.paused([slot, busy]) == frozenset()


@pytest.mark.parametrize("looked", ["by asking", "by claiming"])
def test_blocking_claim_leaves_a_paused_model_out(broker: Broker, slot: str, looked: str):
    """A worker that has heard of the pause waits for its other models only."""
    busy = f"{slot}-b"
    broker.prepare([slot, busy])
    publish(broker, slot)
    broker.pause(slot)
    if looked == "by asking":
        broker.paused([slot, busy])
    else:
        assert claim(broker, "w", slot) == []
    broker.arm("w", [slot, busy], 8, 1000)
    expected = publish(broker, busy)
    assert ids(broker.collect()) == expected
    broker.arm("w", [slot], 8, 1000)
    assert broker.disarm() == []
    broker.resume(slot)
    broker.paused([slot, busy])
    broker.arm("w", [slot, busy], 8, 1000)
    assert len(broker.collect()) == 1


def test_pause_survives_a_restart(redis_brokerage: OnRedis, slot: str):
    """It lies in the broker, with its append-only file."""
    server = redis_brokerage.server
    broker = redis_brokerage.connect()
    broker.pause(slot)
    server.await_writes()
    server.restart()
    assert broker.paused([slot]) == {slot}
    broker.close()
