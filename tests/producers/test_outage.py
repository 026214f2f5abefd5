"""The broker is away: every call ends within its time-out, says so, and a retry never makes a second job."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client, JobHandle
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable, ResultTimeout
from tests.producers.conftest import announce
from tests.servers import RedisServer

INPUTS = {"x": np.ones((1, 4), np.float32)}
TIMEOUT_S = 0.25

_CALLS: dict[str, Callable[[Client, JobHandle], Any]] = {
    "submit": lambda client, job: client.submit("parked", INPUTS),
    "submit_many": lambda client, job: client.submit_many("parked", [INPUTS] * 3),
    "map": lambda client, job: client.map("parked", [INPUTS] * 3),
    "status": lambda client, job: job.status(),
    "result": lambda client, job: job.result(),
    "result with a time-out": lambda client, job: job.result(timeout=30),
    "result from elsewhere": lambda client, job: client.job(job.id).result(),
    "stream": lambda client, job: list(job.stream()),
    "cancel": lambda client, job: job.cancel(),
}


async def _drain_stream(job: Any) -> None:
    async for _ in job.stream():
        pass


_ASYNC_CALLS: dict[str, Callable[[AsyncClient, Any], Any]] = {
    "submit": lambda client, job: client.submit("parked", INPUTS),
    "submit_many": lambda client, job: client.submit_many("parked", [INPUTS] * 3),
    "map": lambda client, job: client.map("parked", [INPUTS] * 3),
    "status": lambda client, job: job.status(),
    "result": lambda client, job: job.result(),
    "stream": lambda client, job: _drain_stream(job),
    "cancel": lambda client, job: job.cancel(),
}


def _break(server: RedisServer, how: str) -> None:
    if how == "killed":
        server.kill()
    else:
        server.pause()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_every_call_ends_within_the_time_out(how, redis_server: RedisServer):
    """Whether the server is gone or accepts connections and says nothing, a call raises BrokerUnavailable in time."""
    announce(redis_server, "parked")
    with Client(redis_server.tcp_url, timeout_s=TIMEOUT_S) as client:
        job = client.submit("parked", INPUTS)
        _break(redis_server, how)
        for call in _CALLS.values():
            with pytest.raises(BrokerUnavailable, match=r"did not answer within 0\.25 s"):
                call(client, job)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_every_asyncio_call_ends_within_the_time_out(how, redis_server: RedisServer):
    """As the blocking client; closing it does not hang either."""

    async def call_all() -> None:
        async with AsyncClient(redis_server.tcp_url, timeout_s=TIMEOUT_S) as client:
            job = await client.submit("parked", INPUTS)
            _break(redis_server, how)
            for call in _ASYNC_CALLS.values():
                with pytest.raises(BrokerUnavailable, match=r"did not answer within 0\.25 s"):
                    await call(client, job)

    announce(redis_server, "parked")
    asyncio.run(asyncio.wait_for(call_all(), 60))


def test_client_goes_on_when_the_broker_is_back(redis_server: RedisServer):
    """A client outlives a restart, and a call that the restart falls into waits for it."""
    announce(redis_server, "parked")
    with Client(redis_server.url, timeout_s=10) as client:
        first = client.submit("parked", INPUTS)
        redis_server.await_writes()
        redis_server.kill()
        restart = threading.Timer(0.3, redis_server.start)
        restart.start()
        try:
            assert first.status() == "queued"
        finally:
            restart.join()
        assert client.submit("parked", INPUTS).id != first.id


def test_short_timeout_is_no_limit_for_slow_jobs(shared_redis: RedisServer, parked: str):
    """`timeout_s` bounds the broker's silence, not the time that a job takes."""
    with Client(shared_redis.url, timeout_s=TIMEOUT_S) as client:
        job = client.submit(parked, INPUTS)
        with pytest.raises(ResultTimeout, match=r"No result within 1\.2 s; the job goes on"):
            job.result(timeout=1.2)
        assert job.cancel() == "cancelled"


class CuttingProxy:
    """A loopback port in front of a server; `cut_next` swallows the answer to the next script call, and hangs up."""

    def __init__(self, target: str) -> None:
        self.cuts = 0
        self._target = target
        self._is_armed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_next(self) -> None:
        """From now on, once."""
        self._is_armed.set()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far, suppress(OSError):
            far.connect(self._target)
            answers = threading.Thread(target=_copy, args=(far, near), daemon=True)
            while request := near.recv(1 << 16):
                if self._is_armed.is_set() and b"EVALSHA" in request:
                    self._is_armed.clear()
                    self.cuts += 1
                    far.sendall(request)
                    # The server has answered, so the jobs are accepted; their client will never hear it.
                    near.shutdown(socket.SHUT_RDWR)
                    return
                if answers.ident is None:
                    answers.start()
                far.sendall(request)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while answer := source.recv(1 << 16):
            target.sendall(answer)


@contextmanager
def _cutting_proxy(server: RedisServer) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(str(server.socket))
    try:
        yield proxy
    finally:
        proxy.close()


def _queued(broker: RedisStreams, model: str) -> int:
    return sum(depth.jobs for depth in broker.depths(model))


def test_retry_after_a_lost_answer_makes_no_second_job(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """The connection breaks between publish and its answer: the client repeats with the same ids."""
    with _cutting_proxy(shared_redis) as proxy, Client(proxy.url) as client:
        jobs = [client.submit(parked, INPUTS)]
        proxy.cut_next()
        jobs.append(client.submit(parked, INPUTS))
        proxy.cut_next()
        jobs += client.submit_many(parked, [INPUTS] * 5)
        assert proxy.cuts == 2
        assert _queued(broker, parked) == len({job.id for job in jobs}) == 7
        assert {job.status() for job in jobs} == {"queued"}


def test_asyncio_retry_after_a_lost_answer_makes_no_second_job(
    shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """As the blocking client."""

    async def submit_twice(proxy: CuttingProxy) -> list[str]:
        async with AsyncClient(proxy.url) as client:
            first = await client.submit(parked, INPUTS)
            proxy.cut_next()
            return [first.id, (await client.submit(parked, INPUTS)).id]

    with _cutting_proxy(shared_redis) as proxy:
        ids = asyncio.run(submit_twice(proxy))
        assert proxy.cuts == 1
    assert _queued(broker, parked) == len(set(ids)) == 2
