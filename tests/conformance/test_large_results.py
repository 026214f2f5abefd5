"""Results larger than one call to the broker may be: written and read whole, each on its own."""

from __future__ import annotations

from contextlib import closing

import pytest

from penstock.registry.broker import redis_scripts
from penstock.registry.broker.base import Broker, CommitStatus, State
from penstock.registry.broker.limits import CALL_BYTES
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import new_job_id, reply_key
from tests.conformance.conftest import OnRedis
from tests.conformance.jobs import TTL_MS, claim, commit_of, publish, settle


def _result(index: int, size: int) -> bytes:
    return bytes([index]) * (size - 1) + b"."


@pytest.mark.parametrize("size", [CALL_BYTES - 2, CALL_BYTES - 1, CALL_BYTES, 2 * CALL_BYTES + 7])
def test_a_large_result_is_read_whole(broker: Broker, slot: str, size: int):
    """At the bound of one call, and above it; with its state."""
    (job_id,) = publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    assert settle(broker, "w", commit_of(delivery, _result(1, size), state=State.FAILED)) == [CommitStatus.COMMITTED]
    for record in (broker.job_record(job_id), *broker.job_records([job_id])):
        assert record is not None
        assert (record.state, record.result) == (State.FAILED, _result(1, size))


def test_records_that_no_call_could_hold_together_are_all_read(broker: Broker, slot: str):
    """Small, large, missing and live ones, in the order in which they were asked for."""
    sizes = [10, CALL_BYTES // 2, CALL_BYTES // 2, 20, CALL_BYTES + 30, CALL_BYTES // 2]
    ids = publish(broker, slot, len(sizes) + 1)
    deliveries = claim(broker, "w", slot)
    sealed = [_result(at, size) for at, size in enumerate(sizes)]
    commits = [commit_of(each, result) for each, result in zip(deliveries, sealed, strict=False)]
    assert settle(broker, "w", *commits) == [CommitStatus.COMMITTED] * len(sizes)
    *ended, live, missing = broker.job_records([*ids, new_job_id(slot)])
    assert [record and record.result for record in ended] == sealed
    assert live is not None
    assert (live.state, missing) == (State.QUEUED, None)


def test_commits_that_no_call_could_hold_together_count_each_for_itself(broker: Broker, slot: str):
    """A job that has ended is fenced, the large ones beside it are committed, and the client is told of each once."""
    reply = reply_key(slot, "me")
    publish(broker, slot, 4, reply=reply)
    deliveries = claim(broker, "w", slot)
    settle(broker, "w", commit_of(deliveries[1], b"first", reply=reply))
    commits = [commit_of(each, _result(at, CALL_BYTES // 2), reply=reply) for at, each in enumerate(deliveries)]
    statuses = settle(broker, "w", *commits)
    assert statuses == [CommitStatus.COMMITTED, CommitStatus.FENCED, *[CommitStatus.COMMITTED] * 2]
    told = [local for entry in broker.read({reply: "0-0"}, 0) for local in entry.fields[::2]]
    assert sorted(told) == sorted(each.sealed.rpartition(b".")[2] for each in deliveries)


def test_a_repeated_large_commit_is_confirmed(broker: Broker, slot: str):
    """Its first answer was lost: the record has these very bytes."""
    publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    commit = commit_of(delivery, _result(1, CALL_BYTES + 1))
    assert broker.exchange("w", [commit], [], TTL_MS)[0] == [CommitStatus.COMMITTED]
    assert broker.exchange("w", [commit], [], TTL_MS)[0] == [CommitStatus.COMMITTED]


def test_one_call_reads_a_bounded_number_of_bytes(redis_brokerage: OnRedis, slot: str):
    """Of records beyond it, it tells the sizes; of a large one, it has the first piece."""
    with closing(redis_brokerage.connect()) as broker:
        assert isinstance(broker, RedisStreams)
        ids = publish(broker, slot, 3)
        sizes = (CALL_BYTES // 2, CALL_BYTES + 5, CALL_BYTES // 2)
        for delivery, size in zip(claim(broker, "w", slot), sizes, strict=True):
            settle(broker, "w", commit_of(delivery, _result(1, size)))
        answers = broker._run(redis_scripts.job_records(ids))
        assert [answer if isinstance(answer, int) else len(answer) for answer in answers] == [
            CALL_BYTES // 2 + 2,
            CALL_BYTES + 7,
            CALL_BYTES // 2 + 2,
        ]
        assert [isinstance(answer, int) for answer in answers] == [False, True, True]
        first, size = broker._run(redis_scripts.job_record(ids[1], subscribe=False))
        assert (len(first), size) == (CALL_BYTES, CALL_BYTES + 7)


def test_one_call_commits_a_bounded_number_of_bytes(redis_brokerage: OnRedis, slot: str):
    """Three results of half a call each, and one above a call: three calls of one round trip."""
    with closing(redis_brokerage.connect()) as broker:
        publish(broker, slot, 4)
        sizes = (CALL_BYTES // 2, CALL_BYTES // 2, CALL_BYTES + 5, 10)
        commits = [
            commit_of(delivery, _result(1, size))
            for delivery, size in zip(claim(broker, "w", slot), sizes, strict=True)
        ]
        broker.exchange("w", [], [], TTL_MS)
        with redis_brokerage.server.client() as client:
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert settle(broker, "w", *commits) == [CommitStatus.COMMITTED] * 4
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 3
