"""The asyncio client in memory: the calls of AsyncClient, and the end of every thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Cancelled, ModelError, PenstockError, ResultTimeout, UnknownModel
from penstock.testing.async_client import InMemoryAsyncClient
from tests.servers import wait_until
from tests.testing.models import PATIENCE_S, Gate, declared, double, row
from tests.testing.test_client import counting


def test_every_call_answers():
    """Submit, result, status, info, submit_many, map and stream."""

    async def program() -> None:
        async with AsyncClient.in_memory({"double": declared(), "counting": counting}) as client:
            job = await client.submit("double", row(3.0))
            assert (await job.result(PATIENCE_S))["y"].tolist() == [[6.0] * 4]
            assert await job.status() == "completed"
            assert (await job.info()).version == "1"
            assert (await client.job(job.id).result(PATIENCE_S))["y"][0, 0] == 6.0
            jobs = await client.submit_many("double", [row(number) for number in range(300)])
            answers = await asyncio.gather(*(each.result(PATIENCE_S) for each in jobs))
            assert [answer["y"][0, 0] for answer in answers] == [2.0 * number for number in range(300)]
            rows = await client.map("double", np.ones((5, 4), np.float32))
            assert np.array_equal(rows, np.full((5, 4), 2.0))
            events = [event.type async for event in (await client.submit("counting", {"n": [2]})).stream()]
            assert events == ["queued", "started", *["progress", "chunk"] * 2, "completed"]

    asyncio.run(program())


def test_tasks_submit_at_a_time():
    """Their jobs travel in one call, and each gets its own answer."""

    async def program() -> None:
        async with AsyncClient.in_memory({"double": declared()}) as client:

            async def ask(number: int) -> float:
                job = await client.submit("double", row(number))
                return float((await job.result(PATIENCE_S))["y"][0, 0])

            assert await asyncio.gather(*map(ask, range(1000))) == [2.0 * number for number in range(1000)]

    asyncio.run(program())


def test_errors_are_those_of_a_real_client():
    """A refused job, one that fails, one that is not there in time, and one that is cancelled."""
    gate = Gate()

    async def program() -> None:
        async with AsyncClient.in_memory(
            {"gate": declared(gate, batching={"max_batch_size": 1}), "raises": raises}
        ) as client:
            with pytest.raises(UnknownModel, match="Expected one of: gate, raises"):
                await client.submit("nowhere", row())
            with pytest.raises(PenstockError, match=r"x: shape \(1,\). Expected \(batch, 4\)"):
                await client.submit("gate", {"x": [1.0]})
            with pytest.raises(ModelError, match="ZeroDivisionError"):
                await (await client.submit("raises", row())).result(PATIENCE_S)
            jobs = [await client.submit("gate", row(number)) for number in range(20)]
            with pytest.raises(ResultTimeout):
                await jobs[0].result(0.01)
            await jobs[-1].cancel()
            gate.opened.set()
            assert (await jobs[0].result(PATIENCE_S))["y"][0, 0] == 0.0
            with pytest.raises(Cancelled):
                await jobs[-1].result(PATIENCE_S)

    def raises(inputs: Any) -> Any:
        return 1 / 0

    asyncio.run(program())


def test_aclose_ends_every_thread():
    """Of the worker, and the one that reads; in a loop, and without one that is left."""
    before = set(threading.enumerate())

    async def once(client: AsyncClient) -> None:
        assert (await (await client.submit("double", row())).result(PATIENCE_S))["y"][0, 0] == 2.0

    gate = threading.Event()

    def gated(inputs: Any) -> Any:
        gate.wait(PATIENCE_S)
        return double(inputs)

    async def program() -> None:
        async with AsyncClient.in_memory({"gated": gated}) as client:
            job = await client.submit("gated", row())
            # The thread that reads begins with the first reply that is not there yet.
            with pytest.raises(ResultTimeout):
                await job.result(0.05)
            assert {thread.name for thread in set(threading.enumerate()) - before} >= {"drain", "replies"}
            gate.set()
            assert (await job.result(PATIENCE_S))["y"][0, 0] == 2.0
        assert set(threading.enumerate()) <= before

    asyncio.run(program())
    client = InMemoryAsyncClient({"double": double})
    asyncio.run(once(client))
    client.close_worker()
    assert set(threading.enumerate()) <= before


def test_a_client_that_is_dropped_leaves_no_thread():
    """Neither the worker's nor the one that reads."""
    before = set(threading.enumerate())

    async def program() -> None:
        client = AsyncClient.in_memory({"double": double})
        await (await client.submit("double", row())).result(PATIENCE_S)

    def have_ended() -> bool:
        # A read under way holds the client until it returns.
        gc.collect()
        return set(threading.enumerate()) <= before

    asyncio.run(program())
    wait_until(have_ended, PATIENCE_S, "the threads end")
