"""A reply is a hint: a client whose reply is lost is answered from the record."""

from __future__ import annotations

import asyncio

from penstock import AsyncClient, Client
from penstock.registry.queues import reply_key
from tests.flow.conftest import Fleet
from tests.servers import wait_until

ROW = {"x": [[1, 0, 0, 0]]}


def _reply_streams(fleet: Fleet) -> list[bytes]:
    return list(fleet.server.client().scan_iter(reply_key("double", "*").replace("{", "\\{")))


def test_blocking_client_reads_the_record_after_a_silence(fleet: Fleet):
    """The reply stream vanishes before it was read: the result comes from the record after a silence."""
    with Client(fleet.server.url) as client:
        before = set(_reply_streams(fleet))
        job = client.submit("double", ROW)
        wait_until(lambda: job.id and client.job(job.id).status() == "completed", 30, "the job ends")
        for key in set(_reply_streams(fleet)) - before:
            fleet.server.client().delete(key)
        assert job.result(180)["y"][0, 0] == 2


def test_asyncio_client_reads_the_record_while_others_are_answered(fleet: Fleet):
    """One reply is lost while other jobs of the client go on being answered: its waiter does not wait for ever."""

    async def lose_one() -> None:
        async with AsyncClient(fleet.server.url) as client:
            before = set(_reply_streams(fleet))
            lost = await client.submit("double", ROW)
            while await client.job(lost.id).status() != "completed":
                await asyncio.sleep(0.01)
            for key in set(_reply_streams(fleet)) - before:
                fleet.server.client().delete(key)
            waiting = asyncio.create_task(lost.result(180))
            while not waiting.done():
                await (await client.submit("double", ROW)).result(180)
                await asyncio.sleep(0.02)
            assert (await waiting)["y"][0, 0] == 2

    asyncio.run(lose_one())


def test_many_lost_replies_cost_one_silence(fleet: Fleet):
    """The reply stream of hundreds of jobs vanishes: after one silence the records answer for all.

    A silence for each of them would take longer than a test may.
    """
    with Client(fleet.server.url) as client:
        before = set(_reply_streams(fleet))
        jobs = client.submit_many("double", [{"x": [[index, 0, 0, 0]]} for index in range(300)])
        wait_until(lambda: all(client.job(job.id).status() == "completed" for job in jobs[-4:]), 30, "the jobs end")
        for key in set(_reply_streams(fleet)) - before:
            fleet.server.client().delete(key)
        assert [job.result(180)["y"][0, 0] for job in jobs] == [2 * index for index in range(300)]


def test_many_lost_replies_cost_an_asyncio_client_one_silence(fleet: Fleet):
    """The same for jobs that are awaited one after the other."""

    async def lose_all() -> list[float]:
        async with AsyncClient(fleet.server.url) as client:
            before = set(_reply_streams(fleet))
            jobs = await client.submit_many("double", [{"x": [[index, 0, 0, 0]]} for index in range(300)])
            while await client.job(jobs[-1].id).status() != "completed":
                await asyncio.sleep(0.01)
            for key in set(_reply_streams(fleet)) - before:
                fleet.server.client().delete(key)
            return [(await job.result(180))["y"][0, 0] for job in jobs]

    assert asyncio.run(lose_all()) == [2 * index for index in range(300)]
