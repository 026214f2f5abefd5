"""Handles as values: equality, sets, copies, and pickles that hold no secret."""

from __future__ import annotations

import asyncio
import copy
import pickle

import numpy as np
import pytest

from penstock import AsyncClient, Client, ClientUnusable, InvalidInput
from penstock.producers.client import JobHandle
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import new_job_id
from tests.producers.answers import claim, end
from tests.servers import RedisServer

X = np.ones((1, 4), np.float32)
KEY = "k1:" + "S" * 43 + "="


def test_handles_of_one_job_are_equal():
    """Of both clients, and by id only: a set keeps one of them. A handle is no equal of its id."""
    first, second = new_job_id("m"), new_job_id("m")
    with Client("redis://nowhere:1") as client:
        handles = [client.job(first), AsyncClient("redis://nowhere:1").job(first), client.job(second)]
        assert handles[0] == handles[1] != handles[2]
        assert len(set(handles)) == 2
        assert client.job(handles[0]) is handles[0]
        assert client.job(handles[0], tenant="other") is not handles[0]
        assert handles[0] != first
        assert copy.deepcopy({"job": handles[0]})["job"] is copy.copy(handles[0]) is handles[0]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_has_neither_password_nor_key(kind: type[Client] | type[AsyncClient], protocol: int):
    """Id and tenant are all that it has."""
    client = kind("redis://user:hidden@nowhere:1", tenant="acme", signing_keys=KEY)
    job = client.job(new_job_id("m"))
    packed = pickle.dumps(job, protocol)
    assert b"hidden" not in packed
    assert b"SSSS" not in packed
    assert b"nowhere" not in packed
    again = pickle.loads(packed)  # noqa: S301 - the bytes are our own
    assert type(again) is type(job)
    assert (again, again.id, again.tenant, again.model) == (job, job.id, "acme", "m")


def test_an_unpickled_handle_says_how_to_bind_it():
    """Every question of it names client.job(handle)."""
    with Client("redis://nowhere:1") as client:
        job: JobHandle = pickle.loads(pickle.dumps(client.job(new_job_id("m"))))  # noqa: S301 - the bytes are our own
    for ask in (job.status, job.result, job.info, job.cancel, lambda: next(iter(job.stream()))):
        with pytest.raises(ClientUnusable, match=r"comes from a pickle and has no client. Expected client.job\(handle"):
            ask()


def test_an_unpickled_handle_is_bound_by_another_client(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """The tenant comes with the handle; either client binds the handles of both."""
    with Client(shared_redis.url, tenant="acme") as client:
        job = client.submit(parked, {"x": X})
        packed = pickle.dumps(job)
        end(broker, *claim(broker, parked), value=3)
    with Client(shared_redis.url) as other:
        bound = other.job(pickle.loads(packed))  # noqa: S301 - the bytes are our own
        assert bound.result(180)["z"].tolist() == [3.0]

    async def read() -> list[float]:
        async with AsyncClient(shared_redis.url) as client:
            outputs = await client.job(job).result(180)
            return list(outputs["z"].tolist())

    assert asyncio.run(read()) == [3.0]


def test_a_handle_of_no_job_id_is_refused():
    """A pickle that was changed has no way around the check of an id."""
    with Client("redis://nowhere:1") as client, Client("redis://nowhere:1") as other:
        job = client.job(new_job_id("m"))
        job._state.id = "not an id"
        with pytest.raises(InvalidInput):
            other.job(job)
