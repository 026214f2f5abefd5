"""A deadline is kept without a worker: the client that waits ends the job at its time, and so does one that asks later.

A silence lasts for minutes here, so that only the deadline can wake a client that waits.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock import AsyncClient, Client, JobHandle
from penstock.producers import async_client, job_state
from penstock.producers import client as blocking
from penstock.registry.broker.base import Claim, State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Keyring, open_result
from penstock.registry.errors import Expired, ResultTimeout
from penstock.registry.queues import Priority, slot_of
from penstock.registry.settings import Settings
from tests.servers import RedisServer, wait_until

INPUTS = {"x": np.ones((1, 4), np.float32)}
SOON_S = 0.2
PATIENCE_S = 180.0
LEASE_MS = 150


@pytest.fixture(autouse=True)
def _long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "SILENCE_S", 600.0)
    monkeypatch.setattr(blocking, "_LONGEST_WATCH_S", 600.0)
    monkeypatch.setattr(async_client, "SILENCE_S", 600.0)


def depth(broker: RedisStreams, model: str) -> int:
    """Jobs of the model in its queues."""
    return sum(each.jobs for each in broker.depths(model))


def test_result_raises_at_the_deadline(client: Client, parked: str, broker: RedisStreams):
    """No worker lives: the job expires, its input leaves the queue, and no ResultTimeout hides it."""
    job = client.submit(parked, INPUTS, deadline_s=SOON_S)
    with pytest.raises(Expired, match="deadline or lifetime had passed"):
        job.result(PATIENCE_S)
    assert job.status() == "expired"
    assert depth(broker, parked) == 0


def test_result_without_a_time_out_ends_too(client: Client, parked: str):
    """result() without a time-out does not wait for a worker that never comes."""
    with pytest.raises(Expired):
        client.submit(parked, INPUTS, deadline_s=SOON_S).result()


def test_result_timeout_before_the_deadline_is_one(client: Client, parked: str):
    """A time-out that comes first says that the job goes on."""
    job = client.submit(parked, INPUTS, deadline_s=3600)
    with pytest.raises(ResultTimeout):
        job.result(0.05)
    assert job.status() == "queued"


def test_later_asker_ends_the_job(client: Client, parked: str, broker: RedisStreams, shared_redis: RedisServer):
    """Without a client that waits, the first status() or result() after the deadline ends the job, by its id alone."""
    jobs = client.submit_many(parked, [INPUTS] * 3, deadline_s=SOON_S)

    def is_overdue() -> bool:
        return all((record := broker.job_record(job.id)) and (record.left_ms or 0) < 0 for job in jobs)

    wait_until(is_overdue, PATIENCE_S, "the deadline passes")
    assert depth(broker, parked) == 3
    with Client(shared_redis.url) as other:
        assert other.job(jobs[0].id).status() == "expired"
        with pytest.raises(Expired):
            other.job(jobs[1].id).result()
        assert [event.type for event in other.job(jobs[2].id).stream()] == ["queued", "expired"]
    assert depth(broker, parked) == 0
    assert [job.status() for job in jobs] == ["expired"] * 3


def test_waiting_by_id_ends_at_the_deadline(client: Client, parked: str, shared_redis: RedisServer):
    """A handle from an id learns of the deadline from the record, before it has passed."""
    job_id = client.submit(parked, INPUTS, deadline_s=SOON_S).id
    with Client(shared_redis.url) as other, pytest.raises(Expired):
        other.job(job_id).result(PATIENCE_S)


def test_stream_ends_at_the_deadline(client: Client, parked: str):
    """The last event says why."""
    events = list(client.submit(parked, INPUTS, deadline_s=SOON_S).stream())
    assert [event.type for event in events] == ["queued", "expired"]
    assert isinstance(events[-1].data, Expired)


def test_map_raises_the_first_expiry(client: Client, parked: str, broker: RedisStreams):
    """A map without a worker ends, too."""
    with pytest.raises(Expired):
        client.map(parked, [np.ones(4, np.float32)] * 3, deadline_s=SOON_S, outputs=["y"])
    assert depth(broker, parked) == 0


def test_lifetime_is_a_deadline(parked: str, broker: RedisStreams, shared_redis: RedisServer):
    """A job without a deadline expires with the lifetime of jobs."""
    settings = Settings.load(overrides={"queue.job_ttl_s": SOON_S})
    with Client(shared_redis.url, settings=settings) as client, pytest.raises(Expired):
        client.submit(parked, INPUTS).result(PATIENCE_S)
    assert depth(broker, parked) == 0


def test_end_is_signed(parked: str, broker: RedisStreams, shared_redis: RedisServer):
    """With signing keys, the end that the client writes is signed like every other."""
    keys = "k:" + "A" * 44
    with Client(shared_redis.url, signing_keys=keys) as client:
        job = client.submit(parked, INPUTS, deadline_s=SOON_S)
        with pytest.raises(Expired):
            job.result(PATIENCE_S)
        record = broker.job_record(job.id)
        assert record is not None
        assert record.state is State.EXPIRED
        header, _ = open_result(record.result, Keyring.parse(keys))
        assert (header.id, header.key) == (job.id, "k")


def test_running_job_is_left_alone(client: Client, parked: str, broker: RedisStreams):
    """A worker that holds the job began in time: the client waits on, and does not end it."""
    broker.prepare([parked])
    job = client.submit(parked, INPUTS, deadline_s=SOON_S)
    (delivery,) = broker.exchange("w", [], [Claim(parked, 8, 0, 60_000)], 60_000)[1]
    assert delivery.priority is Priority.NORMAL
    with pytest.raises(ResultTimeout):
        job.result(3 * SOON_S)
    assert job.status() == "running"


@pytest.fixture
def abandoned(client: Client, parked: str, broker: RedisStreams, monkeypatch: pytest.MonkeyPatch) -> list[JobHandle]:
    """Overdue jobs that a dead worker holds."""
    monkeypatch.setattr(job_state, "_LOOK_AGAIN_S", 0.05)
    broker.prepare([parked])
    broker.take_over("other", parked, LEASE_MS, 8)
    jobs = client.submit_many(parked, [INPUTS] * 3, deadline_s=SOON_S)
    assert len(broker.exchange("dead", [], [Claim(parked, 8, 0, 60_000)], 60_000)[1]) == 3
    return jobs


def test_client_that_waits_outlives_a_dead_worker(
    client: Client, abandoned: list[JobHandle], broker: RedisStreams, shared_redis: RedisServer
):
    """It asks again until no living worker can hold the job: with its reply, by the job's id, and in a group."""
    with pytest.raises(Expired):
        abandoned[0].result(PATIENCE_S)
    with Client(shared_redis.url) as other, pytest.raises(Expired):
        other.job(abandoned[1].id).result(PATIENCE_S)
    assert [job.status() for job in client.as_completed(abandoned[2:])] == ["expired"]
    assert depth(broker, slot_of(abandoned[0].id)) == 0


def test_async_client_outlives_a_dead_worker(
    abandoned: list[JobHandle], broker: RedisStreams, shared_redis: RedisServer
):
    """The same, awaited."""
    asyncio.run(_by_id(shared_redis.url, abandoned[0].id))
    assert depth(broker, slot_of(abandoned[0].id)) == 2


def test_jobs_in_a_group_end_at_their_deadlines(
    client: Client, parked: str, broker: RedisStreams, shared_redis: RedisServer
):
    """as_completed and gather, over own jobs and over those of another client."""
    own = client.submit_many(parked, [INPUTS] * 3, deadline_s=SOON_S)
    assert {job.status() for job in client.as_completed(own)} == {"expired"}
    with Client(shared_redis.url) as other:
        jobs = [other.job(job.id) for job in client.submit_many(parked, [INPUTS] * 3, deadline_s=SOON_S)]
        found = other.gather(jobs, return_exceptions=True)
    assert {type(each) for each in found} == {Expired}
    assert depth(broker, parked) == 0


async def _gathered(url: str, model: str) -> None:
    async with AsyncClient(url) as client:
        jobs = await client.submit_many(model, [INPUTS] * 5, deadline_s=SOON_S)
        async with AsyncClient(url) as other:
            ended = [job async for job in other.as_completed([other.job(job.id) for job in jobs])]
        assert len(ended) == 5
        late = await client.submit_many(model, [INPUTS] * 5, deadline_s=SOON_S)
        found = await client.gather([*jobs, *late], return_exceptions=True)
    assert {type(each) for each in found} == {Expired}


def test_async_group_ends_at_its_deadlines(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """The same, awaited."""
    asyncio.run(_gathered(shared_redis.url, parked))
    assert depth(broker, parked) == 0


async def _results(url: str, model: str) -> list[BaseException | object]:
    async with AsyncClient(url) as client:
        jobs = [await client.submit(model, INPUTS, deadline_s=SOON_S) for _ in range(50)]
        patient = await client.submit(model, INPUTS, deadline_s=3600)
        with pytest.raises(ResultTimeout):
            await patient.result(0.05)
        events = [event.type async for event in (await client.submit(model, INPUTS, deadline_s=SOON_S)).stream()]
        assert events == ["queued", "expired"]
        found = await asyncio.gather(*(job.result(PATIENCE_S) for job in jobs), return_exceptions=True)
        assert {await job.status() for job in jobs} == {"expired"}
        assert await patient.cancel() == "cancelled"
        return list(found)


def test_async_client_keeps_deadlines(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """Fifty tasks that wait at a time all get Expired, and the queue is empty."""
    found = asyncio.run(_results(shared_redis.url, parked))
    assert {type(each) for each in found} == {Expired}
    assert depth(broker, parked) == 0


async def _by_id(url: str, job_id: str) -> None:
    async with AsyncClient(url) as client:
        with pytest.raises(Expired):
            await client.job(job_id).result(PATIENCE_S)


def test_async_handle_from_an_id_keeps_the_deadline(client: Client, parked: str, shared_redis: RedisServer):
    """Also in another process, which knows nothing but the id."""
    job = client.submit(parked, INPUTS, deadline_s=SOON_S)
    asyncio.run(_by_id(shared_redis.url, job.id))
    assert job.status() == "expired"
