"""The copy of the keys: never a second old, one read at a time, no request that waits while it is young, restores."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from penstock.producers.gateway.key_copy import KeyCopy
from penstock.registry.api_keys import ApiKey, new_api_key
from penstock.registry.catalog.api_keys import SqlApiKeys
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
    rows_read: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.copy = KeyCopy(self.read, lambda: self.now_s)

    def read(self, revision: int) -> list[ApiKey]:
        """The changes after a revision."""
        self.asked.append(revision)
        self.gate.wait(180)
        if self.error is not None:
            raise self.error
        found = [key for key in self.keys if key.revision > revision]
        self.rows_read += len(found)
        return found

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


def _other(revision: int) -> ApiKey:
    return structs.replace(KEY, id=f"{revision:012x}", revision=revision)


def test_a_copy_of_a_second_is_not_used():
    """A key that was revoked a second ago is read again before anything is answered."""

    async def scenario(registry: Registry) -> None:
        registry.keys = [_key(1)]
        assert (await registry.copy.fresh())[KEY.id].revoked_at is None
        registry.keys = [_key(2, revoked_at=5)]
        registry.now_s += 1.0
        assert (await registry.copy.fresh())[KEY.id].revoked_at == 5

    ran(scenario)


def test_a_read_costs_the_changes():
    """Beside the last row that it has, however many keys there are."""

    async def scenario(registry: Registry) -> None:
        registry.keys = [_other(revision) for revision in range(1, 501)]
        assert len(await registry.copy.fresh()) == 500
        for revision in (501, 502, 502):
            registry.keys = [*registry.keys[:500], *map(_other, range(501, revision + 1))]
            registry.now_s += 1.0
            assert len(await registry.copy.fresh()) == revision

    registry = ran(scenario)
    assert registry.asked == [0, 499, 500, 501]
    assert registry.rows_read == 500 + 2 + 2 + 1


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


async def _read_again(copy: KeyCopy) -> Mapping[str, ApiKey]:
    copy.expire()
    return await copy.fresh()


@pytest.mark.parametrize("changes_after", [0, 1, 2, 3, 4])
def test_a_registry_that_was_restored_is_read_as_a_whole(tmp_path: Path, changes_after: int):
    """Changes after the backup are gone, also where as many new ones came: none of their revisions hides another."""
    file, backup = tmp_path / "registry.db", tmp_path / "backup.db"
    registry = SqlApiKeys(f"sqlite:///{file}")
    kept = registry.add(new_api_key("kept", now=1).key)
    revoked = registry.add(new_api_key("revoked", now=1).key)
    _copy_database(file, backup)
    copy = KeyCopy(registry.since)

    async def scenario() -> None:
        lost = [registry.add(new_api_key(f"lost {place}", now=2).key) for place in range(3)]
        assert (await copy.fresh()).keys() == {key.id for key in (kept, revoked, *lost)}
        _copy_database(backup, file)
        new = []
        for place in range(changes_after):
            if place:
                new.append(registry.add(new_api_key(f"new {place}", now=3).key))
            else:
                registry.revoke(revoked.id, 3)
        found = await _read_again(copy)
        assert found.keys() == {key.id for key in (kept, revoked, *new)}
        assert found[revoked.id].revoked_at == (3 if changes_after else None)
        # From here on the copy follows the restored registry.
        registry.revoke(kept.id, 4)
        assert (await _read_again(copy))[kept.id].revoked_at == 4

    asyncio.run(scenario())


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as written:
        read.backup(written)
