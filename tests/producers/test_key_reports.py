"""A client whose signing keys no live worker has: told on submit, without a job and without another round trip."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import closing

import pytest

from penstock import AsyncClient, Client
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Keyring
from penstock.registry.errors import Unauthorized
from penstock.registry.key_reports import key_report
from tests.producers.conftest import announce
from tests.servers import RedisServer

INPUTS = {"x": [[1.0, 2.0, 3.0, 4.0]]}
KEYS = f"mine:{base64.b64encode(b'm' * 32).decode()}"


def _submit(url: str, model: str) -> None:
    with Client(url, signing_keys=KEYS) as client:
        client.submit(model, INPUTS)
        client.submit(model, INPUTS)


def _submit_many(url: str, model: str) -> None:
    with Client(url, signing_keys=KEYS) as client:
        client.submit_many(model, [INPUTS])


def _map(url: str, model: str) -> None:
    with Client(url, signing_keys=KEYS) as client:
        client.map(model, [INPUTS])


def _submit_named(url: str, model: str) -> None:
    with Client(url, signing_keys=KEYS) as client:
        client.submit(model, INPUTS, version="1")


def _submit_async(url: str, model: str) -> None:
    async def submit() -> None:
        async with AsyncClient(url, signing_keys=KEYS) as client:
            await client.submit(model, INPUTS)
            await client.submit(model, INPUTS)

    asyncio.run(submit())


@pytest.mark.parametrize("submit", [_submit, _submit_many, _map, _submit_named, _submit_async])
def test_a_job_that_every_worker_would_refuse_is_not_sent(
    submit: Callable[[str, str], None], shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """Both clients and every way to submit raise the same error, and the queue stays empty."""
    broker.report_keys(parked, key_report("cpu0@vm", Keyring.parse(None)), 60_000)
    with pytest.raises(Unauthorized, match="This process and worker cpu0@vm have different PENSTOCK_SIGNING_KEYS"):
        submit(shared_redis.url, parked)
    assert sum(depth.jobs for depth in broker.depths(parked)) == 0


@pytest.mark.parametrize("submit", [_submit, _submit_async])
def test_the_names_of_the_keys_travel_with_the_spec(submit: Callable[[str, str], None], redis_server: RedisServer):
    """One read for both, once for many jobs: two jobs take three commands."""
    announce(redis_server, "parked")
    with closing(RedisStreams.from_url(redis_server.url)) as broker:
        broker.report_keys("parked", key_report("cpu0@vm", Keyring.parse(KEYS)), 60_000)
    # The first time also loads the scripts.
    submit(redis_server.url, "parked")
    with redis_server.monitor() as commands:
        submit(redis_server.url, "parked")
    asked = [command.split()[0] for command in commands if command.startswith(("MGET", "EVALSHA"))]
    assert asked == ["MGET", "EVALSHA", "EVALSHA"]
