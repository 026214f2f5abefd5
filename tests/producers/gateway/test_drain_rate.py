"""Retry-After of jobs that wait: what is in the queue, by the rate at which the fleet drains it."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from penstock.producers.gateway.drain_rate import DrainRate, Queues
from penstock.registry.broker.base import Backlog
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.naps import naps_before
from tests.servers import wait_until

NAPPER_S = 0.3
"""One job of `napper`, which has no batches."""
JOBS = 40


def noted(*readings: tuple[float, int, int]) -> list[float | None]:
    """What a rate says after each reading of (time, jobs in the queue, jobs committed)."""
    rate = DrainRate()
    return [rate.note(Backlog(waiting, done), at) for at, waiting, done in readings]


@pytest.mark.parametrize(
    ("readings", "last"),
    [
        ([(0, 100, 0)], None),
        ([(0, 100, 0), (2, 80, 20)], 8.0),
        # A single job is the one that was just submitted: nothing says how fast a queue would drain.
        ([(0, 1, 0), (1, 1, 5)], None),
        ([(0, 100, 0), (2, 80, 20), (3, 1, 99)], None),
        ([(0, 1, 0), (1, 50, 0)], None),
        # The rate outlives an empty queue, and follows what changes.
        ([(0, 100, 0), (2, 80, 20), (9, 0, 100), (99, 50, 100)], 5.0),
        ([(0, 100, 0), (2, 80, 20), (3, 60, 50)], 3.0),
        ([(0, 100, 0), (31, 100, 5)], None),
        # Nothing drains: a pause, or no worker.
        ([(0, 100, 0), (1, 100, 0)], float("inf")),
        # The broker has lost its data.
        ([(0, 100, 9_000), (1, 100, 10)], float("inf")),
    ],
)
def test_a_rate_is_that_of_a_queue_in_which_jobs_waited(readings, last):
    """Else it would be the rate at which jobs came."""
    assert noted(*readings)[-1] == last


def test_a_queue_is_read_once_for_many_requests():
    """Those of one second share a reading; without an answer the last one stands."""
    reads = []

    async def read(model: str) -> Backlog:
        reads.append(model)
        await asyncio.sleep(0)
        raise BrokerUnavailable("away")

    async def ask() -> set[float | None]:
        queues = Queues(read)
        return {*await asyncio.gather(*(queues.wait_s(f"model{number % 2}") for number in range(100)))}

    assert asyncio.run(ask()) == {None}
    assert sorted(reads) == ["model0", "model1"]


def test_retry_after_follows_the_measured_rate(stack: GatewayStack, start_gateway: StartGateway):
    """While a model is paused its queue is long, and its rate is known from before: no job has waited for an answer,
    so that no earlier duration is. The queue drains for a minute: a slow machine reads it late."""
    gateway = start_gateway()
    locations: list[str] = []
    with gateway.client() as http, closing(RedisStreams.from_url(stack.server.url)) as broker:

        def submit() -> int:
            """A further job; its Retry-After."""
            accepted = http.post("/v1/jobs", json={"model": "napper", "inputs": {"x": [[len(locations), 7, 7, 7]]}})
            locations.append(accepted.headers["location"])
            return int(accepted.headers["retry-after"])

        assert submit() == 1
        try:
            with naps_before(stack):
                submit()
                last = locations[-1]
                wait_until(lambda: int(http.get(last).headers.get("retry-after", 0)) > 1, 30, "the rate is known")
                broker.pause("napper")
                for _ in range(JOBS):
                    submit()
                # One job takes at least its nap, and a reading may count one that had begun before.
                fastest = 1 + 1 / NAPPER_S
                wait_until(
                    lambda: JOBS / fastest <= int(http.get(locations[-1]).headers["retry-after"]) <= 60,
                    30,
                    "it is read",
                )
                assert JOBS / fastest <= submit() <= 60
        finally:
            for location in locations:
                http.delete(location)
            broker.resume("napper")
