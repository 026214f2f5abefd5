"""as_completed and gather: the order of the ends, the errors, the time-out, and what they ask the broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock import AsyncClient, Client, InvalidInput, ModelError, ResultTimeout, UnknownJob
from penstock.producers.gathering import FOLLOW_TTL_MS, MOST_FOLLOWED, Awaited, Follower
from penstock.registry.broker.base import JobRecord, State
from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import new_job_id, record_key
from tests.producers.answers import claim, end
from tests.servers import RedisServer, wait_until

X = np.ones((1, 4), np.float32)
KINDS = ("blocking", "asyncio")
Act = Callable[[Any, list[Any]], Any]


def _with_jobs(kind: str, url: str, model: str, count: int, act: Act, between: Callable[[], None]) -> Any:
    """`act` with a client and the handles of its jobs, after `between`. The answer is awaited where it must be."""
    if kind == "blocking":
        with Client(url) as client:
            jobs = client.submit_many(model, [{"x": X}] * count)
            between()
            return act(client, jobs)

    async def run() -> Any:
        async with AsyncClient(url) as client:
            jobs = await client.submit_many(model, [{"x": X}] * count)
            between()
            found = act(client, jobs)
            return await found if hasattr(found, "__await__") else [job async for job in found]

    return asyncio.run(asyncio.wait_for(run(), 60))


def _listed(found: Any) -> Any:
    return found if hasattr(found, "__aiter__") else list(found)


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_come_in_the_order_of_their_ends(kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """Also when the last job ends first; a failed job comes like the others, and no result waits any more."""
    order: list[str] = []

    def end_backwards() -> None:
        for job in reversed(claim(broker, parked)):
            order.append(job.header.id)
            end(broker, job, state=State.FAILED if len(order) == 2 else State.COMPLETED)

    jobs = _with_jobs(
        kind, shared_redis.url, parked, 4, lambda client, jobs: _listed(client.as_completed(jobs, 60)), end_backwards
    )
    assert [job.id for job in jobs] == order
    assert [job._state.record.state.name for job in jobs] == ["COMPLETED", "FAILED", "COMPLETED", "COMPLETED"]


@pytest.mark.parametrize("kind", KINDS)
def test_ends_are_told_while_others_run(kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """The first end is yielded before the second job has ended; one handle is given twice and comes twice."""
    seen: list[str] = []

    def each(client: Client, jobs: Sequence[Any]) -> list[str]:
        claimed = {job.header.id: job for job in claim(broker, parked)}
        end(broker, claimed[jobs[1].id])
        for job in client.as_completed([jobs[0], jobs[1], jobs[1]], 60):
            seen.append(job.id)
            if len(seen) == 2:
                end(broker, claimed[jobs[0].id])
        return [jobs[1].id, jobs[1].id, jobs[0].id]

    async def each_awaited(client: AsyncClient, jobs: Sequence[Any]) -> list[str]:
        claimed = {job.header.id: job for job in claim(broker, parked)}
        end(broker, claimed[jobs[1].id])
        async for job in client.as_completed([jobs[0], jobs[1], jobs[1]], 60):
            seen.append(job.id)
            if len(seen) == 2:
                end(broker, claimed[jobs[0].id])
        return [jobs[1].id, jobs[1].id, jobs[0].id]

    act: Act = each if kind == "blocking" else each_awaited
    assert _with_jobs(kind, shared_redis.url, parked, 2, act, lambda: None) == seen


@pytest.mark.parametrize("kind", KINDS)
def test_gather_gives_outputs_in_the_order_of_the_handles(
    kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """return_exceptions puts an error in its place; without it the error is raised."""

    def end_all() -> None:
        first, second, third = claim(broker, parked)
        end(broker, third, value=3)
        end(broker, second, state=State.FAILED)
        end(broker, first, value=1)

    def gather(**options: Any) -> Any:
        return _with_jobs(
            kind, shared_redis.url, parked, 3, lambda client, jobs: client.gather(jobs, **options), end_all
        )

    first, second, third = gather(return_exceptions=True, timeout=180)
    assert (first["z"].tolist(), third["z"].tolist()) == ([1.0], [3.0])
    assert isinstance(second, ModelError)
    with pytest.raises(ModelError, match="KeyError"):
        gather()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_failure_is_raised_while_others_run(
    kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """gather does not wait for the jobs before the failed one."""

    def end_one() -> None:
        end(broker, claim(broker, parked)[1], state=State.FAILED)

    with pytest.raises(ModelError):
        _with_jobs(kind, shared_redis.url, parked, 2, lambda client, jobs: client.gather(jobs, timeout=180), end_one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout", [0, 0.05])
def test_jobs_that_have_not_ended_in_time_are_counted(
    timeout: float, kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """Those that ended come first, and no job is cancelled."""
    seen: list[str] = []

    def each(client: Client, jobs: Sequence[Any]) -> None:
        seen.extend(job.id for job in client.as_completed(jobs, timeout))

    async def each_awaited(client: AsyncClient, jobs: Sequence[Any]) -> None:
        async for job in client.as_completed(jobs, timeout):
            seen.append(job.id)

    act: Act = each if kind == "blocking" else each_awaited
    with pytest.raises(ResultTimeout, match=f"^2 of 3 jobs have not ended within {timeout:g} s; they go on$"):
        _with_jobs(kind, shared_redis.url, parked, 3, act, lambda: end(broker, claim(broker, parked)[0]))
    assert len(seen) == 1
    assert sum(depth.jobs for depth in broker.depths(parked)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_of_another_process_are_followed(kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """No reply of theirs comes to this client. One has ended, one is unknown, the others end later."""
    with Client(shared_redis.url) as other:
        ids = [job.id for job in other.submit_many(parked, [{"x": X}] * 3)]
    claimed = claim(broker, parked)
    end(broker, claimed[0], value=1)
    missing = new_job_id(parked)

    def gather(client: Any, _: list[Any]) -> Any:
        return client.gather([client.job(job_id) for job_id in (*ids, missing)], return_exceptions=True, timeout=180)

    def end_the_rest() -> None:
        end(broker, claimed[1], value=2)
        with shared_redis.client() as client:
            wait_until(lambda: client.getrange(record_key(ids[2]), 1, 1) == b"s", 60, "its events are followed")
        end(broker, claimed[2], value=3)

    ending = threading.Thread(target=end_the_rest)
    ending.start()
    *outputs, error = _with_jobs(kind, shared_redis.url, parked, 1, gather, lambda: None)
    ending.join(60)
    assert [each["z"].tolist() for each in outputs] == [[1.0], [2.0], [3.0]]
    assert isinstance(error, UnknownJob)


def test_a_lost_reply_is_found_in_the_record(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """The reply stream is a hint: without it, the records are read after a second of silence."""
    with Client(shared_redis.url) as client:
        jobs = client.submit_many(parked, [{"x": X}] * 3)
        unheard = [job._replace(header=replace(job.header, reply="")) for job in claim(broker, parked)]
        end(broker, *unheard)
        assert {job.id for job in client.as_completed(jobs, 60)} == {job.id for job in jobs}


class CountingStreams(RedisStreams):
    """A connection that counts its calls."""

    calls = 0

    def _run(self, command: Any) -> Any:
        self.calls += 1
        return super()._run(command)


def test_many_jobs_cost_few_calls(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """A thousand jobs that have ended cost calls by the hundred jobs, not one each."""
    with Client(shared_redis.url) as client:
        jobs = client.submit_many(parked, [{"x": X}] * 1000)
        while claimed := claim(broker, parked, 256):
            end(broker, *claimed)
        counting = CountingStreams.from_url(shared_redis.url)
        client._broker = client._reader._broker = counting
        assert len(client.gather(jobs, timeout=180)) == 1000
        assert counting.calls < 30
        counting.close()


class CountingAsyncStreams(AsyncRedisStreams):
    """A connection that counts its calls."""

    calls = 0

    async def _run(self, command: Any, connection: Any = None) -> Any:
        self.calls += 1
        return await super()._run(command, connection)


@pytest.mark.parametrize("kind", KINDS)
def test_a_silence_costs_a_call_and_not_one_for_each_job(kind: str, shared_redis: RedisServer, parked: str):
    """Jobs of another client: one call each to follow its events, then one call in a second for all of them."""
    with Client(shared_redis.url) as other:
        ids = [job.id for job in other.submit_many(parked, [{"x": X}] * 100)]
    if kind == "blocking":
        with Client(shared_redis.url) as client:
            counting = CountingStreams.from_url(shared_redis.url)
            client._broker = client._reader._broker = counting
            with pytest.raises(ResultTimeout):
                client.gather(map(client.job, ids), timeout=4)
            counting.close()
            assert 100 < counting.calls < 150
        return

    async def gather() -> int:
        async with AsyncClient(shared_redis.url) as client:
            counting = CountingAsyncStreams.from_url(shared_redis.url)
            assert isinstance(counting, CountingAsyncStreams)
            client._broker = client._reader._broker = counting
            with pytest.raises(ResultTimeout):
                await client.gather(map(client.job, ids), timeout=4)
            return counting.calls

    assert 100 < asyncio.run(gather()) < 150


@pytest.mark.parametrize("kind", KINDS)
def test_more_jobs_than_are_followed_at_once(kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """The event streams of a bounded number of jobs are read; the next ones follow as those end."""
    count = MOST_FOLLOWED + 20
    if kind == "asyncio":
        asyncio.run(asyncio.wait_for(_follow_many(shared_redis.url, parked, broker, count), 60))
        return
    with Client(shared_redis.url) as client, Client(shared_redis.url) as other:
        ids = [job.id for job in client.submit_many(parked, [{"x": X}] * count)]
        claimed = claim(broker, parked, count)

        def end_all() -> None:
            wait_until(lambda: len(other._reader._router._subscriptions) == MOST_FOLLOWED, 60, "as many are followed")
            for job in claimed:
                end(broker, job)

        ending = threading.Thread(target=end_all)
        ending.start()
        found = list(other.as_completed(map(other.job, ids), 60))
        ending.join(60)
        assert sorted(job.id for job in found) == sorted(ids)
        assert other._reader._router._subscriptions == {}
        assert other._reader._router.on_replies is None


async def _follow_many(url: str, model: str, broker: RedisStreams, count: int) -> None:
    async with AsyncClient(url) as client, AsyncClient(url) as other:
        ids = [job.id for job in await client.submit_many(model, [{"x": X}] * count)]
        claimed = claim(broker, model, count)

        async def gather() -> list[str]:
            return [job.id async for job in other.as_completed(map(other.job, ids))]

        found = asyncio.create_task(gather())
        while len(other._reader._router._subscriptions) < MOST_FOLLOWED:
            await asyncio.sleep(0)
        for job in claimed:
            end(broker, job)
        assert sorted(await found) == sorted(ids)
        assert other._reader._router._subscriptions == {}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_only_handles_of_this_client_are_taken(kind: Any):
    """The error says what to do with handles of another client, and with ids."""
    client, other = kind("redis://nowhere:1"), kind("redis://nowhere:1")
    job_id = new_job_id("m")
    with pytest.raises(InvalidInput, match=r"^Job 1 is a handle of another client. .*client\.job\(handle\)"):
        client.as_completed([client.job(job_id), other.job(job_id)])
    with pytest.raises(InvalidInput, match=r"^Job 0 is a str. Expected a handle of this client"):
        client.as_completed([job_id])
    with pytest.raises(InvalidInput, match="timeout is 'soon'"):
        client.as_completed([], timeout="soon")


def test_nothing_to_wait_for_asks_nobody():
    """No jobs, no connection."""
    with Client("redis://nowhere:1", timeout_s=0.1) as client:
        assert list(client.as_completed([])) == []
        assert client.gather([]) == []


def test_samples_take_turns():
    """Each job comes to its reading of the record, also behind many that run for long."""
    with Client("redis://nowhere:1") as client:
        ids = [new_job_id("m") for _ in range(5)]
        awaited = Awaited(client, map(client.job, ids), None)
        assert awaited.sample(2) + awaited.sample(2) + awaited.sample(2) == [*ids, ids[0]]
        assert awaited.settle([(ids[0], JobRecord(State.QUEUED, "default"))]) == []
        assert [job.id for job in awaited.settle([(ids[1], None)])] == [ids[1]]
        assert len(awaited) == 4


def test_the_broker_is_told_at_once_and_before_it_forgets():
    """Two renewals may fail. A job that comes later does not wait for the renewal of the others."""
    follower = Follower(["m.a", "m.b"])
    assert follower.due(5.0) == ["m.a", "m.b"]
    follower.told(["m.a", "m.b"], 5.0)
    assert not follower.is_due(5.0)
    follower.add("m.c")
    assert follower.is_due(5.0)
    assert follower.due(5.0) == ["m.c"]
    assert follower.due(5.0 + FOLLOW_TTL_MS / 3000) == ["m.a", "m.b", "m.c"]


def test_only_jobs_that_the_broker_knows_of_are_withdrawn():
    """A job that has ended needs no call, nor does one of which the broker was never told."""
    follower = Follower(["m.a", "m.b"])
    follower.told(["m.a", "m.b"], 5.0)
    follower.add("m.c")
    follower.drop("m.a")
    assert follower.take_told() == ["m.b"]
    assert follower.take_told() == []
    assert Follower().id != Follower().id
