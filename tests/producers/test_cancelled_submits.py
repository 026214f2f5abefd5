"""A task that is cancelled while it submits: its job is taken back, because nobody knows its id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient
from penstock.producers.asgi import model
from penstock.producers.async_replies import SubmitCoalescer
from penstock.registry.broker.base import Limits
from penstock.registry.broker.redis_streams import RedisStreams
from tests.servers import RedisServer

X = np.ones((1, 4), np.float32)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """In a loop of its own. A wait that never ends fails the test."""
    return asyncio.run(asyncio.wait_for(main, 180))


async def cancelled(submit: Coroutine[Any, Any, Any], turns: int) -> None:
    """Cancels a task after so many turns of the loop, in which it has built its job."""
    task = asyncio.create_task(submit)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def states(server: RedisServer, slot: str) -> list[str]:
    """The states of all jobs of a slot, sorted. A client that closes has ended what it takes back."""
    with server.client() as redis:
        ids = [f"{slot}.{key.decode().rpartition(':')[2]}" for key in redis.scan_iter(f"{{{slot}}}:job:*")]
    broker = RedisStreams.from_url(server.url)
    try:
        return sorted(record.state.name for record in broker.job_records(ids) if record is not None)
    finally:
        broker.close()


@pytest.mark.parametrize("turns", [1, 2])
def test_its_job_is_cancelled(shared_redis: RedisServer, parked: str, turns: int):
    """Whether the call was sent already or not. The job of another task in the same call goes on."""

    async def main() -> None:
        async with AsyncClient(shared_redis.url) as client:
            await client.submit(parked, {"x": X})
            kept = asyncio.create_task(client.submit(parked, {"x": X}))
            await cancelled(client.submit(parked, {"x": X}), turns)
            assert await (await kept).status() == "queued"

    run(main())
    assert states(shared_redis, parked) == ["CANCELLED", "QUEUED", "QUEUED"]


def test_a_receipt_that_came_in_the_same_turn(shared_redis: RedisServer, parked: str, monkeypatch: pytest.MonkeyPatch):
    """The task is cancelled when the answer is there and the task has not run yet."""
    answered = SubmitCoalescer._answer

    async def main() -> None:
        async with AsyncClient(shared_redis.url) as client:
            await client.submit(parked, {"x": X})
            task = asyncio.create_task(client.submit(parked, {"x": X}))

            def answer(self: SubmitCoalescer, waiting: Any, receipts: Any) -> None:
                answered(self, waiting, receipts)
                task.cancel()

            monkeypatch.setattr(SubmitCoalescer, "_answer", answer)
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
    assert states(shared_redis, parked) == ["CANCELLED", "QUEUED"]


def test_an_answer_that_comes_in_the_turn_of_the_cancellation(shared_redis: RedisServer, parked: str):
    """The loop was busy: the task that cancels is ready before the socket, whose answer is read in the same turn."""

    async def main() -> None:
        async with AsyncClient(shared_redis.url) as client:
            await client.submit(parked, {"x": X})
            task = asyncio.create_task(client.submit(parked, {"x": X}))
            for _ in range(2):
                await asyncio.sleep(0)
            time.sleep(0.1)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
    assert states(shared_redis, parked) == ["CANCELLED", "QUEUED"]


def test_a_map_that_waits_for_room_leaves_no_job(shared_redis: RedisServer, parked: str):
    """Those that the queue had room for are cancelled, as with any map that ends early."""

    async def main() -> None:
        async with AsyncClient(shared_redis.url) as client:
            client._limits = Limits(3, 0, 60_000)
            task = asyncio.create_task(client.map(parked, [X[0]] * 40, window=160))
            while len(states(shared_redis, parked)) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
    assert states(shared_redis, parked) == ["CANCELLED"] * 3


def test_a_job_with_a_key_goes_on(shared_redis: RedisServer, parked: str):
    """Its submitter may come again with the key."""

    async def main() -> None:
        async with AsyncClient(shared_redis.url) as client:
            await client.submit(parked, {"x": X})
            await cancelled(client.submit(parked, {"x": X}, idempotency_key="k"), 1)
            again = await client.submit(parked, {"x": X}, idempotency_key="k")
            assert await again.status() == "queued"

    run(main())
    assert states(shared_redis, parked) == ["QUEUED", "QUEUED"]


def test_a_route_whose_request_ends(shared_redis: RedisServer, parked: str):
    """`Depends(model(...))`: predict is cancelled before its job is published."""

    async def main() -> None:
        async with AsyncClient(shared_redis.url) as client:
            await client.submit(parked, {"x": X})
            found = await model(parked, client=client)()
            await cancelled(found.predict({"x": X}), 1)

    run(main())
    assert states(shared_redis, parked) == ["CANCELLED", "QUEUED"]
