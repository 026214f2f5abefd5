"""A model that is registered and has no worker: its jobs wait, so that a test can look at them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock import Client
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.package import ModelSpec
from tests.servers import RedisServer


def announce(server: RedisServer, model: str) -> None:
    """Register `model`: `x` float32 (batch, 4) and an optional `label` int64 (batch,) 0 to 9 -> `y` and `z`."""
    spec = ModelSpec.model_validate(
        {
            "name": model,
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "inputs": [
                {"name": "x", "dtype": "float32", "shape": ["batch", 4]},
                {"name": "label", "dtype": "int64", "shape": ["batch"], "optional": True, "min": 0, "max": 9},
            ],
            "outputs": [
                {"name": "y", "dtype": "float32", "shape": ["batch", 4]},
                {"name": "z", "dtype": "float32", "shape": ["batch"]},
            ],
            "policy": {"endpoints": {"bulk": {}}},
        }
    )
    broker = RedisStreams.from_url(server.url)
    broker.put_spec(model, spec.to_json())
    broker.close()


@pytest.fixture
def parked(shared_redis: RedisServer, slot: str) -> str:
    """A model without a worker."""
    announce(shared_redis, slot)
    return slot


@pytest.fixture
def broker(shared_redis: RedisServer) -> Iterator[RedisStreams]:
    """The shared server as an operator sees it."""
    broker = RedisStreams.from_url(shared_redis.url)
    yield broker
    broker.close()


@pytest.fixture
def client(shared_redis: RedisServer) -> Iterator[Client]:
    """A client of the shared server."""
    with Client(shared_redis.url) as client:
        yield client


@pytest.fixture
def announced(redis_server: RedisServer, slot: str) -> str:
    """A model without a worker, on a server of the test's own."""
    announce(redis_server, slot)
    return slot
