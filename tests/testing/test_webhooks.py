"""Webhooks of a client in memory: queued for a test to read, and never sent."""

from __future__ import annotations

import asyncio

import pytest

from penstock import AsyncClient, Client, InvalidInput, ModelError
from penstock.testing.webhooks import queued_webhooks
from tests.receiver import Receiver
from tests.servers import RedisServer

URL = "https://example.com/hook"
X = {"x": [[1.0]]}


def _double(inputs):
    if inputs["x"][0, 0] < 0:
        raise ValueError("negative")
    return {"y": inputs["x"] * 2}


def test_ended_jobs_have_theirs():
    """In the order of their ends, with the URL and the event of each; nothing is sent."""
    with Receiver() as receiver, Client.in_memory({"double": _double}) as client:
        good = client.submit("double", X, webhook=receiver.url())
        good.result(180)
        bad = client.submit("double", {"x": [[-1.0]]}, webhook=URL)
        with pytest.raises(ModelError):
            bad.result(180)
        client.submit("double", X).result(180)
        found = queued_webhooks(client)
        assert [each.url for each in found] == [receiver.url(), URL]
        assert [each.event["type"] for each in found] == ["job.completed", "job.failed"]
        assert [each.event["data"]["id"] for each in found] == [good.id, bad.id]
    assert receiver.calls == []


def test_asyncio_client_has_them_too():
    """submit, submit_many and map."""

    async def run() -> list[str]:
        async with AsyncClient.in_memory({"double": _double}) as client:
            await (await client.submit("double", X, webhook=URL)).result(180)
            for job in await client.submit_many("double", [X, X], webhook=URL):
                await job.result(180)
            await client.map("double", [X], webhook=URL)
            return [each.event["type"] for each in queued_webhooks(client)]

    assert asyncio.run(run()) == ["job.completed"] * 4


def test_bad_url_queues_nothing():
    """As with a broker."""
    with Client.in_memory({"double": _double}) as client:
        with pytest.raises(InvalidInput, match="is not encrypted"):
            client.submit("double", X, webhook="http://example.com/")
        assert queued_webhooks(client) == []


def test_client_of_a_server_is_refused(shared_redis: RedisServer):
    """Its webhooks are delivered."""
    with Client(shared_redis.url) as client, pytest.raises(TypeError, match=r"Expected one of Client\.in_memory"):
        queued_webhooks(client)
