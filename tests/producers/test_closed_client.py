"""A closed client refuses every call that needs the broker, and opens no connection."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, AsyncJobHandle, Cancelled, Client, ClientUnusable, JobHandle
from penstock.producers.core import _leave_parent
from penstock.producers.replies import ReplyReader
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.broker.redis_streams import RedisStreams
from tests.servers import RedisServer, wait_until

X = np.ones((1, 4), np.float32)
CALLS: dict[str, Callable[[Any, str], Any]] = {
    "submit": lambda client, model: client.submit(model, {"x": X}),
    "submit a bad input": lambda client, model: client.submit(model, {}),
    "submit_many": lambda client, model: client.submit_many(model, [{"x": X}]),
    "submit nothing": lambda client, model: client.submit_many(model, []),
    "map": lambda client, model: client.map(model, [X[0]]),
    "job": lambda client, model: client.job("parked.1"),
    "enter": lambda client, model: client.__enter__() if isinstance(client, Client) else client.__aenter__(),
}
HANDLE_CALLS: dict[str, Callable[[Any], Any]] = {
    "status": lambda job: job.status(),
    "result": lambda job: job.result(1),
    "info": lambda job: job.info(1),
    "cancel": lambda job: job.cancel(),
}


def _connections(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.info("clients")["connected_clients"])


def test_every_call_of_a_closed_client_is_refused(redis_server: RedisServer, announced: str):
    """Also of a model whose spec the client still knows. No connection is opened."""
    client = Client(redis_server.url)
    job, own = client.submit(announced, {"x": X}), _connections(redis_server)
    client.close()
    wait_until(lambda: _connections(redis_server) < own, 20, "the connections are closed")
    before = _connections(redis_server)
    for call in CALLS.values():
        with pytest.raises(ClientUnusable, match=r"This client was closed. Expected an open one"):
            call(client, announced)
    for ask in HANDLE_CALLS.values():
        with pytest.raises(ClientUnusable, match="This client was closed"):
            ask(job)
    with pytest.raises(ClientUnusable, match="This client was closed"):
        next(iter(job.stream()))
    client.close()
    assert _connections(redis_server) == before


def test_every_call_of_a_closed_asyncio_client_is_refused(redis_server: RedisServer, announced: str):
    """The same as for the blocking client."""

    async def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(ClientUnusable, match=r"This client was closed. Expected an open one"):
            await call()

    async def main() -> None:
        client = AsyncClient(redis_server.url)
        job, own = await client.submit(announced, {"x": X}), _connections(redis_server)
        await client.aclose()
        wait_until(lambda: _connections(redis_server) < own, 20, "the connections are closed")
        before = _connections(redis_server)
        for call in CALLS.values():
            await refused(partial(call, client, announced))
        for ask in HANDLE_CALLS.values():
            await refused(partial(ask, job))
        await refused(lambda: anext(job.stream()))
        await client.aclose()
        assert _connections(redis_server) == before

    asyncio.run(main())


def test_a_known_result_outlives_the_client(shared_redis: RedisServer, parked: str):
    """The handle has it already: it asks nobody."""
    with Client(shared_redis.url) as client:
        job = client.submit(parked, {"x": X})
        job.cancel()
        assert job.info(30).status == "cancelled"
    assert job.status() == "cancelled"
    assert list(client.as_completed([job])) == [job]
    with pytest.raises(Cancelled):
        job.result()

    async def main() -> AsyncJobHandle:
        async with AsyncClient(shared_redis.url) as client:
            job = await client.submit(parked, {"x": X})
            await job.cancel()
            await job.info(30)
            return job

    with pytest.raises(Cancelled):
        asyncio.run(asyncio.wait_for(_result(asyncio.run(main())), 30))


async def _result(job: AsyncJobHandle) -> None:
    assert [each async for each in job._client.as_completed([job])] == [job]
    await job.result()


def _waits(job: JobHandle, errors: list[Exception]) -> None:
    try:
        job.result(180)
    except Exception as error:
        errors.append(error)


def test_closing_ends_the_waits_of_other_threads(redis_server: RedisServer, announced: str):
    """The thread that reads and the one that waits for it get the error; neither opens a new connection."""
    client = Client(redis_server.url)
    errors: list[Exception] = []
    jobs = client.submit_many(announced, [{"x": X}] * 2)
    threads = [threading.Thread(target=_waits, args=(job, errors), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    wait_until(lambda: client._reader._reading is not None, 20, "a thread reads")
    client.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in errors] == [ClientUnusable, ClientUnusable]


class MemoryConnection(MemoryBroker):
    """A connection that a closed client could go on reading from."""

    def forget_connections(self) -> None:
        """There is none."""


class MemoryClient(Client):
    """A client of a broker in memory."""

    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        self._broker = MemoryConnection()
        self._reader = ReplyReader(self._broker)


def test_closing_ends_a_wait_that_no_socket_ends():
    """A broker in memory closes no socket under a thread that reads: the reader says that it was closed."""
    client = MemoryClient("redis://nowhere:1")
    errors: list[Exception] = []
    thread = threading.Thread(target=lambda: _wait(client._reader, errors), daemon=True)
    client._reader.address("m")
    thread.start()
    wait_until(lambda: client._reader._reading is not None, 20, "the thread reads")
    client.close()
    thread.join(60)
    assert [str(error) for error in errors] == ["This client was closed. Expected an open one"]


def _wait(reader: ReplyReader, errors: list[Exception]) -> None:
    try:
        reader.wait(lambda: False, 10)
    except ClientUnusable as error:
        errors.append(error)


def test_a_closed_connection_stays_closed(redis_server: RedisServer):
    """A call that was repeating itself meanwhile opens no new connection either."""
    broker = RedisStreams.from_url(redis_server.url)
    assert broker.spec("any") is None
    broker.close()
    broker.close()
    with pytest.raises(ClientUnusable, match="The connection to the broker was closed"):
        broker.spec("any")


# Python 3.12 and later warn of every fork beside threads. This child only asks a closed client.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_leaves_closed_clients_closed(shared_redis: RedisServer):
    """The child gives no new connection to a client that was closed before."""
    client, asyncio_client = Client(shared_redis.url), AsyncClient(shared_redis.url)
    client.close()
    asyncio.run(asyncio_client.aclose())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # Python has called it already, and only prints its errors.
            _leave_parent()
            with pytest.raises(ClientUnusable):
                client.job("parked.1")
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
