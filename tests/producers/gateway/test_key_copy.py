"""The copy of the keys: never a second old, one read at a time, and no request that waits while it is young."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from penstock.producers.gateway.key_copy import KeyCopy
from penstock.registry.api_keys import ApiKey, new_api_key
from penstock.registry.errors import RegistryUnavailable

KEY = new_api_key("test", now=0).key


@dataclass
class Registry:
    """Keys, a clock that the test moves, and what was read. A closed gate holds reads up."""

    keys: list[ApiKey] = field(default_factory=list)
    now_s: float = 100.0
    asked: list[int] = field(default_factory=list)
    error: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.copy = KeyCopy(self.read, lambda: self.now_s)

    def read(self, revision: int) -> list[ApiKey]:
        """The changes after a revision."""
        self.asked.append(revision)
        self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return [key for key in self.keys if key.revision > revision]

    async def idle(self) -> None:
        """Waits until no read is under way."""
        while self.copy._reading is not None:
            await asyncio.sleep(0)


def ran(scenario: Callable[[Registry], object]) -> Registry:
    """Runs a scenario."""
    registry = Registry()
    asyncio.run(scenario(registry))  # type: ignore[arg-type]
    return registry


def _key(revision: int, revoked_at: int | None = None) -> ApiKey:
    return structs.replace(KEY, revision=revision, revoked_at=revoked_at)


def test_a_copy_of_a_second_is_not_used():
    """A key that was revoked a second ago is read again before anything is answered."""

    async def scenario(registry: Registry) -> None:
        registry.keys = [_key(1)]
        assert (await registry.copy.fresh())[KEY.id].revoked_at is None
        registry.keys = [_key(2, revoked_at=5)]
        registry.now_s += 1.0
        assert (await registry.copy.fresh())[KEY.id].revoked_at == 5

    assert ran(scenario).asked == [0, 1]


def test_a_young_copy_is_used_at_once():
    """No read, however many requests come."""

    async def scenario(registry: Registry) -> None:
        for _ in range(100):
            await registry.copy.fresh()
            registry.now_s += 0.004

    assert ran(scenario).asked == [0]


def test_a_middle_aged_copy_is_renewed_beside_the_requests():
    """The request has the old copy without a wait; the read goes on, and the next request has the new one."""

    async def scenario(registry: Registry) -> None:
        await registry.copy.fresh()
        registry.keys = [_key(1)]
        registry.now_s += 0.6
        registry.gate.clear()
        assert KEY.id not in await registry.copy.fresh()
        assert KEY.id not in await registry.copy.fresh()
        registry.gate.set()
        await registry.idle()
        assert KEY.id in await registry.copy.fresh()

    assert ran(scenario).asked == [0, 0]


def test_many_requests_share_one_read():
    """Those that come while the copy is too old wait for the same read, also when one of them is cancelled."""

    async def scenario(registry: Registry) -> None:
        registry.gate.clear()
        waiting = [asyncio.create_task(registry.copy.fresh()) for _ in range(50)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        registry.gate.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1:] == [{}] * 49

    assert ran(scenario).asked == [0]


def test_a_read_that_began_long_ago_is_not_enough():
    """The answer of a slow read is as old as its begin: a request that comes at its end has another one."""

    async def scenario(registry: Registry) -> None:
        await registry.copy.fresh()
        registry.now_s += 0.6
        registry.gate.clear()
        await registry.copy.fresh()
        while len(registry.asked) < 2:
            await asyncio.sleep(0)
        registry.now_s += 5
        registry.keys = [_key(1)]
        waiting = asyncio.create_task(registry.copy.fresh())
        await asyncio.sleep(0)
        registry.gate.set()
        assert KEY.id in await waiting

    assert len(ran(scenario).asked) == 3


def test_keys_that_cannot_be_read_open_nothing():
    """The error reaches every waiting request, and the next one reads again."""

    async def scenario(registry: Registry) -> None:
        registry.error = RegistryUnavailable("away")
        for _ in range(2):
            with pytest.raises(RegistryUnavailable):
                await registry.copy.fresh()
        registry.error = None
        assert await registry.copy.fresh() == {}

    assert len(ran(scenario).asked) == 3


class _Late(Registry):
    """A registry whose keys came after the second read."""

    def read(self, revision: int) -> list[ApiKey]:
        """As before; nothing until then."""
        found = super().read(revision)
        return found if len(self.asked) > 2 else []


def test_an_expired_copy_is_not_used():
    """A key that this process has made opens at once, also where a read had begun before."""

    async def scenario(registry: Registry) -> None:
        await registry.copy.fresh()
        registry.now_s += 0.6
        registry.gate.clear()
        assert KEY.id not in await registry.copy.fresh()
        while len(registry.asked) < 2:
            await asyncio.sleep(0)
        registry.now_s += 0.1
        registry.copy.expire()
        waiting = asyncio.create_task(registry.copy.fresh())
        await asyncio.sleep(0)
        registry.gate.set()
        assert KEY.id in await waiting

    registry = _Late(keys=[_key(1)])
    asyncio.run(scenario(registry))
    assert registry.asked == [0, 0, 0]
