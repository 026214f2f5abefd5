"""An AsyncClient in several event loops, one after the other, and in a forked child."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

from penstock import AsyncClient, AsyncJobHandle, ClientUnusable
from penstock.registry.broker.redis_streams import RedisStreams
from tests.producers.answers import claim, end
from tests.servers import RedisServer, wait_until

X = np.ones((1, 4), np.float32)
T = TypeVar("T")


def _run(main: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own, which is closed at the end."""
    return asyncio.run(asyncio.wait_for(main, 180))


def _sockets() -> int:
    """The sockets of this process."""
    gc.collect()
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def open_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that is neither running nor closed."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


async def _submitted(client: AsyncClient, model: str) -> AsyncJobHandle:
    return await client.submit(model, {"x": X})


async def _closed(client: AsyncClient) -> None:
    await client.aclose()


def test_a_client_goes_on_in_the_next_loop(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """As with repeated asyncio.run: submits, results of jobs of an earlier loop, cancels and streams."""
    client = AsyncClient(shared_redis.url)
    early = _run(_submitted(client, parked))
    waiting = _run(_submitted(client, parked))
    end(broker, claim(broker, parked)[0], value=5)

    async def ask() -> tuple[list[float], str, list[str]]:
        result = await early.result(180)
        late = await _submitted(client, parked)
        assert await late.cancel() == "cancelled"
        return result["z"].tolist(), await waiting.status(), [event.type async for event in late.stream()]

    assert _run(ask()) == ([5.0], "running", ["queued", "cancelled"])
    _run(_closed(client))
    with pytest.raises(ClientUnusable, match="was closed"):
        _run(_submitted(client, parked))


def test_no_loop_leaves_a_socket_behind(redis_server: RedisServer, announced: str):
    """The connections of a closed loop are closed, here and at the server, also while a reader was waiting."""
    client = AsyncClient(redis_server.url)

    async def wait_in_vain() -> None:
        job = await _submitted(client, announced)
        waiting = asyncio.create_task(job.result())
        while client._broker._reading._wire is None:
            await asyncio.sleep(0)
        waiting.cancel()

    with redis_server.client() as admin:
        _run(wait_in_vain())
        connections, sockets = len(admin.client_list()), _sockets()
        for _ in range(4):
            _run(wait_in_vain())
        assert _sockets() == sockets
        wait_until(lambda: len(admin.client_list()) == connections, 20, "the server has no more connections")
        _run(_closed(client))
        assert _sockets() == sockets - 2
        wait_until(lambda: len(admin.client_list()) == connections - 2, 20, "the server has none of this client")


def test_an_open_loop_keeps_its_client(shared_redis: RedisServer, parked: str, open_loop: asyncio.AbstractEventLoop):
    """A call from a second loop is refused, and the first loop goes on undisturbed."""
    client = AsyncClient(shared_redis.url)
    job = open_loop.run_until_complete(_submitted(client, parked))

    async def refused() -> None:
        for call in (_submitted(client, parked), job.status(), job.result(), job.cancel(), client.aclose()):
            with pytest.raises(ClientUnusable, match=r"another event loop, which is still open. Expected one"):
                await call
        for events in (job.stream(), client.as_completed([job])):
            with pytest.raises(ClientUnusable, match="another event loop"):
                await anext(events)

    _run(refused())
    assert open_loop.run_until_complete(job.status()) == "queued"
    open_loop.run_until_complete(client.aclose())


def test_two_running_loops_cannot_share_a_client(shared_redis: RedisServer, parked: str):
    """The second thread is refused while the first one's loop runs."""
    client = AsyncClient(shared_redis.url)
    errors: list[Exception] = []

    def other_thread() -> None:
        try:
            _run(_submitted(client, parked))
        except ClientUnusable as error:
            errors.append(error)

    async def main() -> None:
        async with client:
            await _submitted(client, parked)
            thread = threading.Thread(target=other_thread)
            thread.start()
            await asyncio.to_thread(thread.join, 60)
            await _submitted(client, parked)

    _run(main())
    assert len(errors) == 1


# Python 3.12 and later warn of every fork beside threads. The child uses a connection and a loop of its own.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("call", ["result", "gather"])
def test_a_child_awaits_a_job_of_its_parent(
    call: str, shared_redis: RedisServer, parked: str, broker: RedisStreams, open_loop: asyncio.AbstractEventLoop
):
    """The parent gets the reply; the child follows the record and the events, and both have the result."""
    client = AsyncClient(shared_redis.url)
    job = open_loop.run_until_complete(_submitted(client, parked))

    async def ask() -> float:
        if call == "gather":
            (outputs,) = await client.gather([job], timeout=30)
        else:
            outputs = await job.result(180)
        return float(outputs["z"][0])

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if asyncio.run(asyncio.wait_for(ask(), 30)) == 5 else 2
        finally:
            os._exit(status)
    end(broker, *claim(broker, parked), value=5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert open_loop.run_until_complete(ask()) == 5
    open_loop.run_until_complete(client.aclose())
