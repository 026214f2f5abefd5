"""An application on a real broker, and Celery's tables given back after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from celery.worker import state as worker_state

from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import TensorSpec
from penstock.workers.celery_bridge.remote_control import restored_tables
from tests.servers import RedisServer
from tests.workers.celery_bridge.jobs import application
from tests.workers.celery_bridge.program import Program, program_on


@pytest.fixture
def app(shared_redis: RedisServer) -> Celery:
    """A Celery application on the shared server."""
    return application(shared_redis)


@pytest.fixture(autouse=True)
def _celery_as_found() -> Iterator[None]:
    with restored_tables():
        yield
    worker_state.reset_state()


@pytest.fixture
def broker(shared_redis: RedisServer, slot: str) -> Iterator[RedisStreams]:
    """A broker with the model `slot`: x float32 (batch, 4) -> y."""
    broker = RedisStreams.from_url(shared_redis.url)
    spec = ModelSpec(
        name=slot,
        version="1",
        format="python",
        entrypoint="model:build",
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 4)),),
    )
    broker.put_spec(slot, spec.to_json())
    broker.prepare([slot])
    yield broker
    broker._run(["SREM", "penstock:models", slot])
    broker.close()


@pytest.fixture
def program(shared_redis: RedisServer, broker: RedisStreams, slot: str) -> Iterator[Program]:
    """A Celery program, and the task endpoint that it sends to."""
    with program_on(shared_redis, broker, slot) as program:
        yield program
