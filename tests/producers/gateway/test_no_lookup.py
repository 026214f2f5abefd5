"""`cache.producer_lookup` beside a gateway: every id that it answers with is known to every gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from penstock.producers.gateway.application import Gateway
from tests.producers.test_cached_answers import INPUTS, Fleet
from tests.servers import RedisServer


@pytest.fixture
def fleet(shared_redis: RedisServer, slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A model in production, whose answer to INPUTS is in the shared cache. It has no worker."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    with closing(Fleet(shared_redis, slot)) as fleet:
        fleet.promote()
        fleet.answer()
        yield fleet


def test_a_cached_answer_is_a_job_of_the_broker(fleet: Fleet):
    """The job is queued, and another gateway shows it: a client without a gateway would have its answer at once."""

    async def run() -> None:
        gateways = [Gateway(fleet.settings(redis_url=fleet.server.url)) for _ in range(2)]
        first, second = (
            httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://gateway") for gateway in gateways
        )
        body = {"model": fleet.model, "inputs": {name: values.tolist() for name, values in INPUTS.items()}}
        accepted = await first.post("/v1/jobs", json=body)
        assert (accepted.status_code, accepted.json()["status"]) == (202, "queued")
        found = await second.get(accepted.headers["location"])
        assert (found.status_code, found.json()["status"]) == (200, "queued")
        for gateway in gateways:
            await gateway.aclose()

    asyncio.run(run())
    assert fleet.queued == 1
