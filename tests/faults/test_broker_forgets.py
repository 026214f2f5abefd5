"""F20: the broker comes back empty (FLUSHALL, no persistence) or with an older snapshot, while clients wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import redis

from penstock import AsyncClient, Client, JobLost
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import Priority, stream_key
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.load import row
from tests.faults.rounds import seeds
from tests.servers import RedisServer, wait_until

ANNOUNCED_S = 5.0
"""From the moment that the broker answers again."""
WAITING = 8
"""Jobs of the clients that wait."""


def _flush(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


def _restart_empty(server: RedisServer) -> None:
    server.kill()
    (server.folder / "dump.rdb").unlink(missing_ok=True)
    server.start()


def _restart_older(server: RedisServer) -> None:
    server.kill()
    server.start()


LOSSES: dict[str, Callable[[RedisServer], None]] = {
    "flushed": _flush,
    "restarted without persistence": _restart_empty,
    "restarted with an older snapshot": _restart_older,
}


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker, on a server that keeps nothing but snapshots."""
    stage = open_stage()
    stage.server.is_persistent = False
    stage.server.restart()
    stage.start_worker()
    return stage


def _inputs(number: float) -> dict[str, Any]:
    return {"x": row(number)}


async def _gathered(url: str, model: str) -> None:
    async with AsyncClient(url, timeout_s=120) as client:
        await client.gather(await client.submit_many(model, [_inputs(-n) for n in (6, 7)]))


def _begin_to_wait(client: Client, stage: Stage, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Clients that wait in each way for jobs that no worker runs."""
    model = stage.model
    ways: list[Callable[[], Any]] = [
        lambda: client.submit(model, _inputs(-1)).result(),
        lambda: list(client.submit(model, _inputs(-2)).stream()),
        lambda: client.gather(client.submit_many(model, [_inputs(-3)])),
        lambda: client.map(model, [_inputs(-n) for n in (4, 5)]),
        lambda: asyncio.run(_gathered(stage.server.url, model)),
        lambda: client.submit(model, _inputs(-8)).info(),
    ]
    return [pool.submit(way) for way in ways]


def _queued(plain: redis.Redis, queue: str, waiting: list[Future[Any]]) -> int:
    """The jobs in the queue. Raises the error of a client that waits no longer."""
    for each in waiting:
        if each.done():
            each.result()
    return int(plain.xlen(queue))


@pytest.mark.parametrize("seed", seeds(ways=len(LOSSES)))
@pytest.mark.parametrize("loss", LOSSES)
def test_work_goes_on_and_waiting_clients_are_told(
    loss: str, seed: int, stage: Stage, start_load: StartLoad, trial: Trial
):
    """Nothing is restarted: models are announced within 5 s, the next jobs are answered, and each lost job is told."""
    server, worker = stage.server, stage.workers[0]
    process = worker.pid
    earlier = start_load(server, stage.forward_log)
    earlier.publish(4 + seed)
    earlier.await_all(120)
    with server.client() as client:
        client.save()
    with Client(server.url, timeout_s=120) as client, ThreadPoolExecutor(8) as pool:
        worker.freeze()
        try:
            waiting = _begin_to_wait(client, stage, pool)
            with server.client() as plain:
                queue = stream_key(stage.model, Priority.NORMAL)
                wait_until(lambda: _queued(plain, queue, waiting) == WAITING, 120, "the jobs wait")
            LOSSES[loss](server)
            is_back = time.monotonic()
        finally:
            worker.thaw()
        for each in waiting:
            with pytest.raises(JobLost):
                each.result(120)
        with closing(RedisStreams.from_url(server.url)) as broker:
            wait_until(lambda: stage.model in broker.models() and broker.spec(stage.model), 120, "it is announced")
            wait_until(lambda: broker.spec(stage.model, "1"), 120, "its version is announced")
        trial.recovered(time.monotonic() - is_back, within=ANNOUNCED_S)
        later = start_load(server, stage.forward_log)
        later.publish(10)
        later.publish(10, version="1")
        trial.check(later.history())
        later.check_answers()
    assert worker.pid == process
    assert worker.is_running
