"""A broker that comes back empty or with an older copy of its data: a client that waits is told that its job is lost.

No worker runs: the jobs wait. Each way of waiting looks at the record after a second of silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.registry.errors import JobFailed, JobLost, ResultGone, UnknownJob
from penstock.registry.queues import Priority, stream_key
from penstock.registry.settings import Settings
from tests.producers.conftest import announce
from tests.servers import RedisServer, let_pass, wait_until

X = np.ones((1, 4), np.float32)
JOBS = 5


def _forget(server: RedisServer, model: str) -> None:
    """The server has no data, and the model is announced again."""
    with server.client() as client:
        client.flushall()
    announce(server, model)


def _go_back(server: RedisServer, model: str) -> None:
    """The server has older data: its jobs are missing, and other keys of the model are there."""
    with server.client() as client:
        for key in client.scan_iter(f"*{{{model}}}*"):
            if key.rpartition(b"}")[2] not in (b":spec", b":specs"):
                client.delete(key)
        client.xgroup_create(stream_key(model, Priority.NORMAL), "penstock", mkstream=True)


LOSSES = {"empty": _forget, "older": _go_back}
WAITS: dict[str, Callable[[Client, str], object]] = {
    "result": lambda client, model: client.submit(model, {"x": X}).result(180),
    "info": lambda client, model: client.submit(model, {"x": X}).info(60),
    "stream": lambda client, model: list(client.submit(model, {"x": X}).stream()),
    "gather": lambda client, model: client.gather(client.submit_many(model, [{"x": X}] * JOBS), timeout=180),
    "as_completed": lambda client, model: [
        job.result() for job in client.as_completed(client.submit_many(model, [{"x": X}] * JOBS), 60)
    ],
    "map": lambda client, model: client.map(model, [{"x": X}] * JOBS),
}


async def _stream(client: AsyncClient, model: str) -> None:
    async for _ in (await client.submit(model, {"x": X})).stream():
        pass


async def _completed(client: AsyncClient, model: str) -> None:
    async for job in client.as_completed(await client.submit_many(model, [{"x": X}] * JOBS), 60):
        await job.result()


async def _result(client: AsyncClient, model: str) -> Any:
    return await (await client.submit(model, {"x": X})).result(180)


async def _gather(client: AsyncClient, model: str) -> Any:
    return await client.gather(await client.submit_many(model, [{"x": X}] * JOBS), timeout=180)


async def _map(client: AsyncClient, model: str) -> Any:
    return await client.map(model, [{"x": X}] * JOBS)


ASYNC_WAITS: dict[str, Callable[[AsyncClient, str], Awaitable[Any]]] = {
    "result": _result,
    "stream": _stream,
    "gather": _gather,
    "as_completed": _completed,
    "map": _map,
}


def _await_jobs(server: RedisServer, model: str) -> None:
    with server.client() as client:
        wait_until(lambda: client.xlen(stream_key(model, Priority.NORMAL)), 30, "the jobs wait")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", WAITS)
def test_a_waiting_client_is_told(way: str, loss: str, redis_server: RedisServer, announced: str):
    """JobLost, whichever way it waits; it names the job and says what to do."""
    with Client(redis_server.url) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(WAITS[way], client, announced)
        _await_jobs(redis_server, announced)
        LOSSES[loss](redis_server, announced)
        with pytest.raises(JobLost, match=rf"^The broker lost job {announced}\..* Submit the job again$") as lost:
            waiting.result(180)
        assert isinstance(lost.value, LookupError)
        assert not isinstance(lost.value, JobFailed)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", ASYNC_WAITS)
def test_a_waiting_task_is_told(way: str, loss: str, redis_server: RedisServer, announced: str):
    """As a thread is."""

    async def wait() -> None:
        async with AsyncClient(redis_server.url) as client:
            waiting = asyncio.ensure_future(ASYNC_WAITS[way](client, announced))
            await asyncio.to_thread(_await_jobs, redis_server, announced)
            await asyncio.to_thread(LOSSES[loss], redis_server, announced)
            with pytest.raises(JobLost):
                await asyncio.wait_for(waiting, 180)

    asyncio.run(wait())


def test_every_lost_job_of_a_map_has_its_error(redis_server: RedisServer, announced: str):
    """With on_error="return", an error takes the place of each result; gather with return_exceptions does the same."""
    with Client(redis_server.url) as client, ThreadPoolExecutor(2) as pool:
        mapping = pool.submit(client.map, announced, [{"x": X}] * JOBS, on_error="return")
        jobs = client.submit_many(announced, [{"x": X}] * JOBS)
        gathering = pool.submit(client.gather, jobs, return_exceptions=True)
        with redis_server.client() as server:
            queue = stream_key(announced, Priority.NORMAL)
            wait_until(lambda: server.xlen(queue) == 2 * JOBS, 30, "the jobs wait")
        _forget(redis_server, announced)
        for waiting in (mapping, gathering):
            assert [type(each) for each in waiting.result(180)] == [JobLost] * JOBS


def test_every_question_about_a_lost_job_says_so(redis_server: RedisServer, announced: str):
    """A handle that has seen its job knows it. An id alone does not tell a lost job from one that never was."""
    with Client(redis_server.url) as client:
        job = client.submit(announced, {"x": X})
        seen, named = client.job(job.id, tenant="default"), Client(redis_server.url)
        again = named.job(job.id)
        assert again.status() == seen.status() == "queued"
        _forget(redis_server, announced)
        for handle in (job, seen, again):
            for ask in (handle.status, handle.result, handle.info, handle.cancel):
                with pytest.raises(JobLost):
                    ask()
            with pytest.raises(JobLost):
                list(handle.stream())
        with pytest.raises(UnknownJob, match="that the broker has not lost"):
            named.job(job.id).status()
        named.close()


def test_after_the_retention_a_lost_job_is_gone(redis_server: RedisServer, announced: str):
    """Its result may have expired: the text says both."""
    settings = Settings.load(overrides={"queue.result_ttl_s": 0.2})
    with Client(redis_server.url, settings=settings) as client:
        job = client.submit(announced, {"x": X})
        _forget(redis_server, announced)
        let_pass(0.3)
        with pytest.raises(ResultGone, match="or the broker lost it"):
            job.status()


def test_the_next_jobs_go_to_the_broker_that_is_there(redis_server: RedisServer, announced: str):
    """The same client submits again and is told of the end: its reply streams begin anew."""
    with Client(redis_server.url) as client:
        first = client.submit(announced, {"x": X})
        _forget(redis_server, announced)
        with pytest.raises(JobLost):
            first.result(180)
        again = client.submit(announced, {"x": X})
        assert again.cancel() == "cancelled"
        with pytest.raises(JobFailed):
            again.result(180)
