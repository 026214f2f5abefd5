"""What only Redis has: a limit of memory. Publishing stops before it, so that commits keep room, and nothing is torn
at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from penstock.registry.broker.base import Broker, CommitStatus, JobRecord, State
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import Priority
from tests.conformance.conftest import OnRedis
from tests.conformance.jobs import LEASE_MS, ROOMY, TTL_MS, claim, commit_of, held, publication, publish, queued, settle
from tests.servers import wait_until


@pytest.fixture
def broker(redis_brokerage: OnRedis) -> Iterator[Broker]:
    """An end of the broker under test."""
    end = redis_brokerage.connect()
    yield end
    end.close()


@contextmanager
def filled(redis_brokerage: OnRedis, share: float) -> Iterator[None]:
    """The server holds `share` of the memory that it may use, inside the block."""
    with redis_brokerage.server.client() as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / share))
        try:
            yield
        finally:
            client.config_set("maxmemory", 0)


def _outcome(broker: Broker, slot: str) -> str:
    return broker.publish(slot, [publication(slot)], ROOMY)[0].outcome


@pytest.mark.parametrize("share", [0.85, 1.2], ids=["beyond the mark", "beyond the limit"])
def test_publishing_stops_before_memory_ends(redis_brokerage: OnRedis, broker: Broker, slot: str, share: float):
    """Refused with a time after which to retry, and nothing is written; after relief jobs are accepted again."""
    job = publication(slot, idempotency_digest="key", fingerprint="p")
    broker.publish(slot, [job], ROOMY)
    redis_brokerage.elapse(110)
    with filled(redis_brokerage, share):
        (receipt,) = broker.publish(slot, [publication(slot)], ROOMY)
        assert receipt.outcome == "memory"
        assert receipt.retry_after_s > 0
        (again,) = broker.publish(slot, [job], ROOMY)
        assert (again.outcome, again.job_id) == ("known", job.job_id)
        assert queued(broker, slot) == 1
    redis_brokerage.let_time_run()
    wait_until(lambda: _outcome(broker, slot) == "accepted", 2, "jobs are accepted again")


def test_half_full_is_fine(redis_brokerage: OnRedis, broker: Broker, slot: str):
    """Below the mark, as without a limit, everything is accepted."""
    with filled(redis_brokerage, 0.5):
        publish(broker, slot, 3)
    redis_brokerage.elapse(110)
    publish(broker, slot, 3)


def test_commit_at_the_limit_is_whole_or_nothing(redis_brokerage: OnRedis, broker: Broker, slot: str):
    """A result that the server cannot take leaves the job with its holder, who commits it after relief."""
    ids = publish(broker, slot, 3)
    deliveries = claim(broker, "w", slot)
    commits = [commit_of(delivery, b"result" * 1000) for delivery in deliveries]
    with filled(redis_brokerage, 1.2):
        with pytest.raises(BrokerUnavailable, match="out of memory"):
            settle(broker, "w", *commits)
        assert broker.job_records(ids) == [JobRecord(State.QUEUED, "acme")] * 3
        assert broker.renew("w", [held(delivery) for delivery in deliveries]).lost == frozenset()
        assert queued(broker, slot) == 3
    assert settle(broker, "w", *commits) == [CommitStatus.COMMITTED] * 3
    assert queued(broker, slot) == 0


def test_other_steps_at_the_limit_lose_nothing(redis_brokerage: OnRedis, broker: Broker, slot: str):
    """Taking over and giving back need no memory; a dead letter without room leaves the job where it was."""
    (job_id,) = publish(broker, slot)
    claim(broker, "w1", slot)
    redis_brokerage.elapse(LEASE_MS + 10)
    with filled(redis_brokerage, 1.2):
        (delivery,) = broker.take_over("w2", slot, LEASE_MS, 8)
        with pytest.raises(BrokerUnavailable, match="out of memory"):
            broker.dead_letter("w2", delivery, "poison", job_id=job_id, sealed=b"dead")
        broker.release("w2", [held(delivery)])
        (delivery,) = broker.take_over("w3", slot, LEASE_MS, 8)
    assert broker.dead_letter("w3", delivery, "poison", job_id=job_id, sealed=b"dead")
    (letter,) = broker.dead_letters(slot)
    with filled(redis_brokerage, 1.2):
        with pytest.raises(BrokerUnavailable, match="out of memory"):
            broker.replay(slot, letter.entry, publication(slot, job_id=job_id), TTL_MS)
        assert broker.dead_letters(slot) == [letter]
        assert broker.waiting(slot, Priority.NORMAL, b"", 8, 64) == []


def test_webhooks_at_the_limit_stay(redis_brokerage: OnRedis, slot: str):
    """A deliverer that looks for due ones meets the error of the server. None of them is taken for a foreign key."""
    with closing(redis_brokerage.connect()) as broker:
        jobs = [publication(slot, webhook="https://example.com/hook") for _ in range(3)]
        broker.publish(slot, jobs, ROOMY)
        settle(broker, "w", *map(commit_of, claim(broker, "w", slot)))
        with filled(redis_brokerage, 1.2):
            for _ in range(2):
                with pytest.raises(BrokerUnavailable, match="out of memory"):
                    broker.take_webhooks(slot, 8, 60_000)
            assert broker.count_webhooks(slot).waiting == 3
        assert {each.job_id for each in broker.take_webhooks(slot, 8, 60_000)} == {job.job_id for job in jobs}
