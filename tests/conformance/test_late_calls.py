"""A call that lies in a socket while the server is paused, and is executed when it wakes, which only Redis has; and a
call that is repeated, because its answer was lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.registry.broker import redis_scripts
from penstock.registry.broker.base import Broker, CommitStatus, Rating
from penstock.registry.broker.redis_streams import RedisStreams
from tests.conformance.conftest import OnRedis
from tests.conformance.jobs import claim, commit_of, held, publish, settle


@pytest.mark.parametrize(
    ("lease_ms", "late_ms", "is_obeyed"),
    [(1000, 100, True), (1000, 300, False), (5000, 1000, True), (5000, 1300, False), (200, 100, True)],
)
def test_late_take_over_takes_nothing(
    redis_brokerage: OnRedis, slot: str, lease_ms: int, late_ms: int, is_obeyed: bool
):
    """A late call does nothing: while the broker was paused no worker could renew, so every lease may have lapsed."""
    broker = redis_brokerage.connect()
    assert isinstance(broker, RedisStreams)
    publish(broker, slot)
    (delivery,) = claim(broker, "w1", slot)
    broker.release("w1", [held(delivery)])
    call = redis_scripts.take_over("w2", slot, lease_ms, 8, broker.now_ms() - late_ms)
    assert len(redis_scripts.taken_over(slot, broker._run(call))) == is_obeyed
    broker.close()


def test_repeated_commit_is_known_though_its_job_was_rated(broker: Broker, slot: str):
    """The answer to the first one was lost, and the client was faster: the record notes the rating in one byte."""
    publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    commit = commit_of(delivery)
    assert settle(broker, "w", commit) == [CommitStatus.COMMITTED]
    assert broker.rate(commit.job_id, "e", "1", 1.0) is Rating.COUNTED
    assert settle(broker, "w", commit) == [CommitStatus.COMMITTED]
    assert settle(broker, "w", replace(commit, sealed=b"another")) == [CommitStatus.FENCED]
