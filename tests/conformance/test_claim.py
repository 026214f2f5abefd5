"""Claiming: priority order, ageing, credit, and the armed claim of an idle worker."""

from __future__ import annotations

import re
import select
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from msgspec import structs

from penstock.registry.broker import redis_scripts
from penstock.registry.broker.base import Broker, Claim
from penstock.registry.broker.incidents import timeout_incident
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import Priority, new_job_id, stream_key
from tests.conformance.conftest import Brokerage, InMemory, OnRedis
from tests.conformance.jobs import LEASE_MS, TTL_MS, claim, commit_of, held, ids, publish, queued, settle


@pytest.fixture
def worker(brokerage: Brokerage) -> Iterator[Broker]:
    """A worker's own end: the armed claim belongs to it."""
    end = brokerage.connect()
    yield end
    end.close()


def is_readable(broker: Broker, timeout_s: float = 30.0) -> bool:
    """Whether the armed claim has an answer within the time."""
    return bool(select.select([broker.fileno()], [], [], timeout_s)[0])


def test_claimed_job_is_the_published_one(broker: Broker, slot: str):
    """A delivery carries the sealed bytes, its queue, the first attempt and the broker's time of acceptance."""
    (job_id,) = publish(broker, slot, priority=Priority.LOW)
    (delivery,) = claim(broker, "w", slot)
    assert (delivery.slot, delivery.priority, delivery.sealed) == (slot, Priority.LOW, job_id.encode())
    assert delivery.attempt == 1
    minutes_ago = round((broker.now_ms() - delivery.accepted_ms) / 60_000)
    assert minutes_ago == 0
    job_record = broker.job_record(job_id)
    assert job_record is not None
    assert (job_record.is_claimed, job_record.deliveries) == (True, 1)


def test_the_answer_to_a_claim_has_no_table_for_a_plain_job(redis_brokerage: OnRedis, slot: str):
    """Its entry and its bytes lie in one list with those of its neighbours; other entries have all of their fields."""
    url = redis_brokerage.server.url
    with closing(RedisStreams.from_url(url)) as streams, redis_brokerage.server.client() as client:
        streams.prepare([slot])
        one, two = publish(streams, slot, 2)
        client.xadd(stream_key(slot, Priority.NORMAL), {"name": "value", "other": "thing"})
        call = redis_scripts.claim("w", Claim(slot, 8, 0, 60_000))
        band, jobs = streams._run(call)[4:6]
        assert band == 1 + Priority.NORMAL
        assert jobs[1::2] == [one.encode(), two.encode(), [b"name", b"value", b"other", b"thing"]]
        assert all(re.fullmatch(rb"\d+-\d+", entry_id) for entry_id in jobs[::2])


def test_jobs_of_one_priority_are_claimed_in_order(broker: Broker, slot: str):
    """First published, first claimed, and never more than the credit."""
    published = publish(broker, slot, 10)
    assert ids(claim(broker, "w", slot, credit=4)) == published[:4]
    assert ids(claim(broker, "w", slot, credit=40)) == published[4:]


def test_two_consumers_never_share_a_job(brokerage: Brokerage, slot: str):
    """What one consumer was handed the other is not."""
    one, other = brokerage.connect(), brokerage.connect()
    published = publish(one, slot, 20)
    first, second = ids(claim(one, "w1", slot, credit=8)), ids(claim(other, "w2", slot, credit=20))
    assert first + second == published
    one.close()
    other.close()


def test_urgent_job_overtakes_a_thousand_low_ones(broker: Broker, slot: str):
    """Jobs are claimed most urgent first, however many others were there before."""
    low = publish(broker, slot, 1000, Priority.LOW)
    (normal,), (high,), (critical,) = (
        publish(broker, slot, 1, priority) for priority in (Priority.NORMAL, Priority.HIGH, Priority.CRITICAL)
    )
    assert ids(claim(broker, "w", slot, credit=5)) == [critical, high, normal, *low[:2]]


def test_aged_lower_band_gets_its_share(brokerage: Brokerage, broker: Broker, slot: str):
    """Under a flood of urgent jobs the reserve goes to the lower band whose head has waited longest."""
    low = publish(broker, slot, 5, Priority.LOW)
    brokerage.elapse(30)
    normal = publish(broker, slot, 5, Priority.NORMAL)
    high = publish(broker, slot, 20, Priority.HIGH)
    assert ids(claim(broker, "w", slot, credit=4, reserve=1, ageing_ms=10_000)) == high[:4]
    brokerage.elapse(60)
    assert ids(claim(broker, "w", slot, credit=4, reserve=1, ageing_ms=50)) == [*high[4:7], low[0]]
    assert ids(claim(broker, "w", slot, credit=4, reserve=2, ageing_ms=50)) == [*high[7:9], *low[1:3]]
    assert ids(claim(broker, "w", slot, credit=6, reserve=4, ageing_ms=50)) == [*high[9:11], *low[3:], *high[11:13]]
    assert ids(claim(broker, "w", slot, credit=2, reserve=1, ageing_ms=0)) == [high[13], normal[0]]


def test_reserve_is_not_wasted(broker: Broker, slot: str):
    """A reserve that no aged band claims goes to the most urgent jobs there are."""
    normal, low = publish(broker, slot, 3), publish(broker, slot, 3, Priority.LOW)
    assert ids(claim(broker, "w", slot, credit=5, reserve=2)) == [*normal, *low[:2]]
    assert ids(claim(broker, "w", slot, credit=1, reserve=1)) == low[2:]


def test_one_exchange_commits_and_claims_for_several_models(broker: Broker, slot: str):
    """Verdicts come in the order of the commits, deliveries in that of the claims, in one call."""
    other = slot + "-b"
    publish(broker, slot, 2)
    publish(broker, other, 2)
    mine, theirs = claim(broker, "w", slot, credit=1), claim(broker, "w", other, credit=1)
    stranger = commit_of(structs.replace(mine[0], entry_id=b"1-1"))
    commits = [commit_of(theirs[0]), stranger, commit_of(mine[0])]
    statuses, deliveries = broker.exchange("w", commits, [Claim(slot, 4, 0, 0), Claim(other, 4, 0, 0)], TTL_MS)
    assert [verdict.value for verdict in statuses] == ["committed", "fenced", "committed"]
    assert [delivery.slot for delivery in deliveries] == [slot, other]


def test_preparing_again_changes_nothing(broker: Broker, slot: str):
    """A second worker that prepares the same queues neither loses nor repeats a job."""
    published = publish(broker, slot, 3)
    assert ids(claim(broker, "w", slot, credit=1)) == published[:1]
    broker.prepare([slot])
    assert ids(claim(broker, "w", slot)) == published[1:]


def test_depths_tell_waiting_from_running(brokerage: Brokerage, broker: Broker, slot: str):
    """A queue's depth counts both, `running` the claimed ones, and the age is that of the oldest that waits."""
    publish(broker, slot, 3)
    claim(broker, "w", slot, credit=1)
    brokerage.elapse(200)
    claim(broker, "w", slot, credit=1)
    depth = broker.depths(slot)[Priority.NORMAL]
    assert (depth.slot, depth.priority, depth.jobs, depth.running) == (slot, Priority.NORMAL, 3, 2)
    assert 0.19 <= depth.oldest_waiting_s < 60
    claim(broker, "w", slot)
    assert broker.depths(slot)[Priority.NORMAL].oldest_waiting_s == 0
    assert [depth.jobs for depth in broker.depths(slot + "-unheard-of")] == [0, 0, 0, 0]


def test_armed_claim_is_answered_by_the_next_job(broker: Broker, worker: Broker, slot: str):
    """An idle worker is woken by a job of any of its models and priorities, and then holds it."""
    worker.prepare([slot, slot + "-b"])
    worker.arm("w", [slot, slot + "-b"], 8, 5000)
    assert not is_readable(worker, 0.02)
    (job_id,) = publish(broker, slot + "-b", priority=Priority.LOW)
    assert is_readable(worker)
    (delivery,) = worker.collect()
    assert (delivery.slot, delivery.priority, ids([delivery])) == (slot + "-b", Priority.LOW, [job_id])
    assert broker.renew("w", [held(delivery)]).lost == frozenset()
    assert claim(broker, "w2", slot + "-b") == []


def test_armed_claim_is_answered_at_once_when_jobs_wait(broker: Broker, worker: Broker, slot: str):
    """Jobs that were there before are handed over, up to the count per queue."""
    published = publish(broker, slot, 5)
    worker.prepare([slot])
    worker.arm("w", [slot], 3, 5000)
    assert is_readable(worker)
    assert ids(worker.collect()) == published[:3]
    worker.arm("w", [slot], 3, 5000)
    assert is_readable(worker)
    assert ids(worker.collect()) == published[3:]
    worker.arm("w", [slot], 3, 5000)
    assert not is_readable(worker, 0.02)


def test_armed_claim_of_urgent_jobs_leaves_the_others(broker: Broker, worker: Broker, slot: str):
    """Jobs of other priorities do not end it. A slot that names no bands is claimed as a whole."""
    other = slot + "-b"
    worker.prepare([slot, other])
    (normal,) = publish(broker, slot)
    worker.arm("w", [slot, other], 8, 5000, {slot: int(Priority.NORMAL)})
    publish(broker, slot, priority=Priority.LOW)
    assert not is_readable(worker, 0.02)
    (urgent,) = publish(broker, slot, priority=Priority.HIGH)
    assert is_readable(worker)
    assert ids(worker.collect()) == [urgent]
    worker.arm("w", [slot, other], 8, 5000, {slot: int(Priority.NORMAL)})
    (low,) = publish(broker, other, priority=Priority.LOW)
    assert is_readable(worker)
    assert ids(worker.collect()) == [low]
    assert ids(claim(broker, "w2", slot))[0] == normal


def test_armed_claim_whose_time_ran_out_is_empty(brokerage: Brokerage, broker: Broker, worker: Broker, slot: str):
    """When the time of a blocking claim is over, its answer is empty, and later jobs wait."""
    worker.prepare([slot])
    brokerage.let_time_run()
    worker.arm("w", [slot], 3, 50)
    if isinstance(brokerage, InMemory):
        brokerage.elapse(80)
    else:
        assert is_readable(worker, 30.0)
    published = publish(broker, slot)
    assert worker.collect() == []
    assert ids(claim(broker, "w2", slot)) == published


def test_disarmed_claim_takes_nothing_more(broker: Broker, worker: Broker, slot: str):
    """A withdrawn claim returns the jobs that it had claimed. Another worker can claim later jobs."""
    worker.prepare([slot])
    worker.arm("w", [slot], 3, 5000)
    assert worker.disarm() == []
    worker.arm("w", [slot], 3, 5000)
    handed = publish(broker, slot)
    assert is_readable(worker)
    assert ids(worker.disarm()) == handed
    later = publish(broker, slot)
    assert ids(claim(broker, "w2", slot)) == later


def unblock_elsewhere(worker: Broker) -> None:
    """As the thread does that stops a worker: the one that owns the claim is busy."""
    thread = threading.Thread(target=worker.unblock)
    thread.start()
    thread.join()


def test_an_unblocked_claim_takes_no_later_job(broker: Broker, worker: Broker, slot: str):
    """Another worker can claim it. The answer is empty, and the next armed claim works."""
    worker.prepare([slot])
    worker.arm("w", [slot], 3, 60_000)
    unblock_elsewhere(worker)
    later = publish(broker, slot)
    assert ids(claim(broker, "w2", slot)) == later
    assert worker.collect() == []
    worker.arm("w", [slot], 3, 60_000)
    handed = publish(broker, slot)
    assert is_readable(worker)
    assert ids(worker.collect()) == handed


@pytest.mark.parametrize("withdraws", [True, False])
def test_an_unblocked_claim_keeps_the_jobs_that_it_has_taken(
    withdraws: bool, broker: Broker, worker: Broker, slot: str
):
    """Whichever way they are fetched; it is unblocked twice here."""
    worker.prepare([slot])
    worker.arm("w", [slot], 3, 60_000)
    handed = publish(broker, slot)
    assert is_readable(worker)
    unblock_elsewhere(worker)
    later = publish(broker, slot)
    unblock_elsewhere(worker)
    assert ids(worker.disarm() if withdraws else worker.collect()) == handed
    assert ids(claim(broker, "w2", slot)) == later


def test_unblocking_without_an_armed_claim_is_harmless(broker: Broker, worker: Broker, slot: str):
    """Before the first claim was armed, and after an answer was collected; the next claim waits as ever."""
    worker.prepare([slot])
    unblock_elsewhere(worker)
    for _ in range(2):
        worker.arm("w", [slot], 3, 60_000)
        published = publish(broker, slot)
        assert is_readable(worker)
        assert ids(worker.collect()) == published
        unblock_elsewhere(worker)


def test_disarming_without_an_armed_claim_is_harmless(worker: Broker, slot: str):
    """Before the first claim was armed, and after an answer was collected, there is nothing to withdraw."""
    assert worker.disarm() == []
    publish(worker, slot)
    worker.prepare([slot])
    worker.arm("w", [slot], 3, 5000)
    assert is_readable(worker)
    assert len(worker.collect()) == 1
    assert worker.disarm() == []


def test_two_armed_workers_share_what_comes(brokerage: Brokerage, broker: Broker, slot: str):
    """Two idle workers, two bursts: each job goes to exactly one of them."""
    workers = {name: brokerage.connect() for name in ("w1", "w2")}
    broker.prepare([slot])
    for name, end in workers.items():
        end.arm(name, [slot], 1, 5000)
    published = publish(broker, slot) + publish(broker, slot)
    assert all(is_readable(end) for end in workers.values())
    assert sorted(job for end in workers.values() for job in ids(end.collect())) == sorted(published)
    assert queued(broker, slot) == 2
    for end in workers.values():
        end.close()


def test_dropped_armed_claim_can_be_armed_again(broker: Broker, worker: Broker, slot: str):
    """After an error a worker starts over with a claim that works."""
    worker.prepare([slot])
    worker.arm("w", [slot], 3, 50)
    worker.drop_armed()
    published = publish(broker, slot)
    worker.arm("w", [slot], 3, 5000)
    assert is_readable(worker)
    assert ids(worker.collect()) == published


def test_commit_of_an_armed_claims_job_counts(broker: Broker, worker: Broker, slot: str):
    """A job that came through an armed claim is held like any other."""
    publish(broker, slot)
    worker.prepare([slot])
    worker.arm("w", [slot], 3, 5000)
    assert is_readable(worker)
    (delivery,) = worker.collect()
    assert [verdict.value for verdict in settle(broker, "w", commit_of(delivery))] == ["committed"]


def test_the_queue_entry_of_a_job_can_be_read_until_it_ends(broker: Broker, slot: str):
    """Waiting, claimed and taken over, with its incidents and its holder; reading claims nothing."""
    (job_id,) = publish(broker, slot, 1, Priority.HIGH)
    waiting = broker.queued_job(job_id)
    assert waiting is not None
    assert (waiting.priority, waiting.sealed, waiting.crashes) == (Priority.HIGH, job_id.encode(), 0)
    (delivery,) = claim(broker, "w1:boot", slot)
    assert broker.queued_job(job_id) == structs.replace(waiting, entry_id=delivery.entry_id)
    record = broker.job_record(job_id)
    assert record is not None
    assert (record.is_claimed, record.holder, record.deliveries) == (True, "w1:boot", 1)
    broker.suspect(slot, [held(delivery)], timeout_incident("w1:boot", 2.0), TTL_MS)
    suspect = broker.queued_job(job_id)
    assert suspect is not None
    assert (suspect.crashes, suspect.exceeded_s) == (1, 2.0)
    broker.release("w1:boot", [held(delivery)])
    record = broker.job_record(job_id)
    assert record is not None
    assert (record.is_claimed, record.holder) == (False, "")
    (again,) = broker.take_over("w2:boot", slot, LEASE_MS, 8)
    settle(broker, "w2:boot", commit_of(again))
    assert broker.queued_job(job_id) is None
    assert broker.queued_job(new_job_id(slot)) is None


def test_claim_of_urgent_jobs_leaves_the_others(worker: Broker, slot: str):
    """A worker whose seats are taken asks for the priorities above those of its running jobs only."""
    queued = {priority: publish(worker, slot, priority=priority)[0] for priority in reversed(Priority)}

    def claimed(bands: int, reserve: int = 0) -> list[bytes]:
        return [each.sealed for each in worker.exchange("w", [], [Claim(slot, 3, reserve, 0, bands=bands)], TTL_MS)[1]]

    assert claimed(0) == []
    assert claimed(2, reserve=1) == [queued[Priority.CRITICAL].encode(), queued[Priority.HIGH].encode()]
    assert claimed(2) == []
    assert claimed(4) == [queued[Priority.NORMAL].encode(), queued[Priority.LOW].encode()]


def test_a_worker_works_on_while_the_broker_answers(broker: Broker, slot: str):
    """What it does meanwhile is done once, with and without jobs."""
    done: list[str] = []
    broker.prepare([slot])
    one, two = publish(broker, slot, 2)
    claims = [Claim(slot, 8, 0, 60_000)]
    assert ids(broker.exchange("w", [], claims, TTL_MS, lambda: done.append("first"))[1]) == [one, two]
    assert broker.exchange("w", [], claims, TTL_MS, lambda: done.append("second")) == ([], [])
    assert done == ["first", "second"]


def test_an_error_meanwhile_leaves_no_answer_behind(broker: Broker, slot: str):
    """It is raised. The next exchange reads its own answers."""

    def fail() -> None:
        raise ValueError("meanwhile")

    broker.prepare([slot])
    claims = [Claim(slot, 8, 0, 60_000)]
    (lost,) = publish(broker, slot)
    with pytest.raises(ValueError, match="meanwhile"):
        broker.exchange("w", [], claims, TTL_MS, fail)
    # Where the claim was on its way, its job is held until the lease lapses.
    found = ids(broker.exchange("w", [], claims, TTL_MS)[1])
    assert found in ([], [lost])
    (job_id,) = publish(broker, slot)
    assert ids(broker.exchange("w", [], claims, TTL_MS)[1]) == [job_id]
