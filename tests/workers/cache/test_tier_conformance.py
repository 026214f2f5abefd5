"""What each tier promises that outlives a process: entries, lifetimes, groups, tenants, seals (CF-019, CF-048, AR-059).

A tier is added by a class beside SharedPlace and a line in PLACES.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import pytest

from penstock.safety.cache_entry import EntryKey, stored_name
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.cache.l2_rows import FORMAT, group_number, name_of
from penstock.workers.cache.l3 import L3Cache, L3CacheConfig
from penstock.workers.cache.tier import Put, Tier
from tests.servers import RedisServer, let_pass
from tests.workers.cache.l2_files import Clock, run_sql

KEYS: Final = DataKeys([b"1" * 32])
OTHER_KEYS: Final = DataKeys([b"2" * 32])
KEY: Final = EntryKey("a" * 64, b"0123456789abcdef", "acme")
VALUE: Final = b"the answer"


class Place(Protocol):
    """Where one cache is kept. Several tiers may be open on it, as those of several processes."""

    def open(self, data_keys: DataKeys | None) -> Tier:
        """A tier on this place."""

    def other(self) -> Place:
        """The place of another cache, on the same disk or server."""

    def let_pass(self, seconds: float) -> None:
        """Time passes, for this cache at least."""

    def read(self, key: EntryKey) -> bytes:
        """What is stored for an entry, as it lies there."""

    def write(self, key: EntryKey, stored: bytes) -> None:
        """Store these bytes as they are for an entry."""


class SharedPlace:
    """A prefix of its own in a real Redis."""

    def __init__(self, server: RedisServer, prefix: str = "") -> None:
        self._server = server
        self._prefix = prefix or f"{secrets.token_hex(6)}*:"

    def open(self, data_keys: DataKeys | None) -> Tier:
        config = L3CacheConfig(redis_url=self._server.url, key_prefix=self._prefix, socket_timeout=30)
        return L3Cache(config, data_keys)

    def other(self) -> Place:
        # The one prefix begins the other: the hardest case.
        return SharedPlace(self._server, f"{self._prefix}tenant_b:")

    def let_pass(self, seconds: float) -> None:
        let_pass(seconds)

    def read(self, key: EntryKey) -> bytes:
        with self._server.client() as client:
            found: bytes | None = client.get(stored_name(self._prefix, key))
        assert found is not None
        return found

    def write(self, key: EntryKey, stored: bytes) -> None:
        with self._server.client() as client:
            client.set(stored_name(self._prefix, key), stored, ex=3600)


class DiskPlace:
    """A file in a folder of its own, with a clock of its own."""

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._clock = folder, clock or Clock()

    def open(self, data_keys: DataKeys | None) -> Tier:
        config = L2CacheConfig(db_path=self._folder / "cache.db", encryption_key=data_keys, write_wait_ms=30_000)
        return L2Cache(config, clock=self._clock)

    def other(self) -> Place:
        return DiskPlace(self._folder / "tenant_b", self._clock)

    def let_pass(self, seconds: float) -> None:
        self._clock.now += seconds

    def read(self, key: EntryKey) -> bytes:
        ((front, data),) = self._run("SELECT front, data FROM entries WHERE name = ?", name_of(key)[0])
        return bytes(front + data)

    def write(self, key: EntryKey, stored: bytes) -> None:
        name, bound = name_of(key)
        self._run("DELETE FROM entries WHERE name = ?", name)
        now = int(self._clock.now * 1000)
        row = (now, now + 3_600_000, group_number(key.group), name, bound[len(FORMAT) :], stored[:32], stored[32:])
        insert = "INSERT INTO entries (stored, expires, grp, name, bound, front, data) VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._run(insert, *row)

    def _run(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return run_sql(self._folder / "cache.db", sql, values)


def _shared(request: pytest.FixtureRequest) -> Place:
    return SharedPlace(request.getfixturevalue("shared_redis"))


def _on_disk(request: pytest.FixtureRequest) -> Place:
    return DiskPlace(request.getfixturevalue("tmp_path"))


PLACES: Final[dict[str, Callable[[pytest.FixtureRequest], Place]]] = {"l2": _on_disk, "l3": _shared}


class Opened(NamedTuple):
    """A place, and a sealing tier on it."""

    place: Place
    tier: Tier

    def find(self, key: EntryKey) -> bytes | None:
        """The value under one key."""
        (found,) = self.tier.get_many([key])
        return None if found is None else found.value


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place without entries."""
    return PLACES[request.param](request)


@pytest.fixture
def cache(place: Place) -> Iterator[Opened]:
    """A sealing tier on that place."""
    with closing(place.open(KEYS)) as tier:
        yield Opened(place, tier)


def _keys(count: int, group: str = "a" * 64, tenant: str = "acme") -> list[EntryKey]:
    return [EntryKey(group, number.to_bytes(16, "big"), tenant) for number in range(count)]


@pytest.mark.parametrize("value", [VALUE, b"", b"\0" * (1 << 20)], ids=["short", "empty", "1 MiB"])
def test_an_entry_is_found_by_another_process(cache: Opened, value: bytes):
    """Two tiers on one place share entries, and the value is the same to the byte (AR-032)."""
    assert cache.tier.put_many([Put(KEY, value, 3600)]) == 1
    with closing(cache.place.open(KEYS)) as second:
        (found,) = second.get_many([KEY])
        assert found is not None
        assert found.value == value
        assert (second.stats.hits, second.stats.misses) == (1, 0)
    assert cache.tier.stats.puts == 1


def test_plain_entries_are_found(place: Place):
    """Without data keys an entry is stored as it is."""
    with closing(place.open(None)) as tier:
        tier.put_many([Put(KEY, VALUE, 3600)])
        (found,) = tier.get_many([KEY])
        assert found is not None
        assert found.value == VALUE
        assert VALUE in place.read(KEY)


def test_sealed_entries_are_unreadable(cache: Opened):
    """With data keys no value is stored in plain (CF-032)."""
    cache.tier.put_many([Put(KEY, VALUE, 3600)])
    assert VALUE not in cache.place.read(KEY)


def test_answers_are_in_the_order_of_the_keys(cache: Opened):
    """Keys may repeat and may be missing; no keys are no call."""
    first, second, third = _keys(3)
    cache.tier.put_many([Put(first, b"1", 3600), Put(third, b"3", 3600)])
    found = cache.tier.get_many([third, second, first, third, second])
    assert [each and each.value for each in found] == [b"3", None, b"1", b"3", None]
    assert (cache.tier.stats.hits, cache.tier.stats.misses) == (3, 2)
    assert cache.tier.get_many([]) == []
    assert cache.tier.put_many([]) == 0
    assert cache.tier.delete_many([]) == 0


def test_a_later_entry_replaces_an_earlier_one(cache: Opened):
    """The value and the lifetime are those of the last `put_many`, also within one call."""
    cache.tier.put_many([Put(KEY, b"1", 60)])
    cache.tier.put_many([Put(KEY, b"2", 60), Put(KEY, b"3", 7200)])
    (found,) = cache.tier.get_many([KEY])
    assert found is not None
    assert found.value == b"3"
    assert 60 < found.ttl_s <= 7200


def test_the_remaining_lifetime_is_told(cache: Opened):
    """It never exceeds what is left, so that a faster tier which takes the entry over ends with this one (CF-019)."""
    cache.tier.put_many([Put(KEY, VALUE, 3600)])
    cache.place.let_pass(0.2)
    (found,) = cache.tier.get_many([KEY])
    assert found is not None
    assert 0 < found.ttl_s <= 3599.8


def test_expired_entries_are_not_served(cache: Opened):
    """An entry ends at its time, and reading it does not prolong it (CF-019)."""
    short, long = _keys(2)
    cache.tier.put_many([Put(short, VALUE, 0.4), Put(long, VALUE, 3600)])
    cache.place.let_pass(0.2)
    cache.tier.get_many([short])
    cache.place.let_pass(0.2)
    assert (cache.find(short), cache.find(long)) == (None, VALUE)


@pytest.mark.parametrize("ttl_s", [0, -1, math.nan])
def test_an_entry_without_a_lifetime_is_not_stored(cache: Opened, ttl_s: float):
    """What has expired already is not written; the others of the call are."""
    first, second = _keys(2)
    assert cache.tier.put_many([Put(first, VALUE, ttl_s), Put(second, VALUE, 3600)]) == 1
    assert (cache.find(first), cache.find(second)) == (None, VALUE)


def test_an_endless_lifetime_is_stored(cache: Opened):
    """A lifetime that no server can hold becomes a very long one."""
    cache.tier.put_many([Put(KEY, VALUE, math.inf)])
    assert cache.find(KEY) == VALUE


def test_deleted_entries_are_gone(cache: Opened):
    """Only those that were there are counted."""
    first, second, third = _keys(3)
    cache.tier.put_many([Put(first, VALUE, 3600), Put(second, VALUE, 3600)])
    assert cache.tier.delete_many([first, third]) == 1
    assert (cache.find(first), cache.find(second)) == (None, VALUE)


def test_one_group_is_forgotten(cache: Opened):
    """Groups whose names contain the group's name or a pattern's letters keep their entries."""
    for group in ("b", "bb", "b*", "?", "[a-c]", "b:acme", "b\\", ""):
        cache.tier.put_many([Put(key, VALUE, 3600) for key in _keys(3, group)])
    assert cache.tier.forget("b") == 3
    assert cache.tier.forget("?") == 3
    assert cache.tier.forget("b\\") == 3
    left = [group for group in ("b", "bb", "b*", "?", "[a-c]", "b:acme", "b\\", "") if cache.find(_keys(1, group)[0])]
    assert left == ["bb", "b*", "[a-c]", "b:acme", ""]


def test_a_group_of_many_is_forgotten(cache: Opened):
    """Entries of all tenants, more than one step of a scan finds."""
    keys = [*_keys(3000), *_keys(3000, tenant="other")]
    assert cache.tier.put_many([Put(key, b"", 3600) for key in keys]) == 6000
    assert cache.tier.forget("a" * 64) == 6000
    assert cache.tier.get_many(keys) == [None] * 6000


def test_only_own_entries_are_cleared(cache: Opened):
    """Another cache beside this one keeps its entries, and its clearing leaves ours."""
    with closing(cache.place.other().open(KEYS)) as other:
        cache.tier.put_many([Put(key, VALUE, 3600) for key in _keys(3)])
        other.put_many([Put(key, b"other", 3600) for key in _keys(2)])
        assert cache.tier.clear() == 3
        assert cache.find(_keys(1)[0]) is None
        assert [each and each.value for each in other.get_many(_keys(2))] == [b"other"] * 2
        cache.tier.put_many([Put(KEY, VALUE, 3600)])
        assert other.clear() == 2
        assert cache.find(KEY) == VALUE


@pytest.mark.parametrize(
    "moved",
    [KEY._replace(tenant="other"), KEY._replace(group="b" * 64), KEY._replace(digest=b"fedcba9876543210")],
    ids=["tenant", "group", "digest"],
)
def test_a_moved_entry_is_refused(cache: Opened, moved: EntryKey):
    """The same digest of another tenant is a miss, and a value copied there does not open (CF-024)."""
    cache.tier.put_many([Put(KEY, VALUE, 3600)])
    assert cache.find(moved) is None
    assert cache.tier.stats.refused == 0
    cache.place.write(moved, cache.place.read(KEY))
    assert cache.find(moved) is None
    assert (cache.tier.stats.refused, cache.tier.stats.misses) == (1, 2)
    assert cache.find(KEY) == VALUE


def test_flipped_bits_give_no_answer(cache: Opened):
    """1,000 random flips: no wrong answer, no error, each counted."""
    cache.tier.put_many([Put(KEY, VALUE * 10, 3600)])
    stored, draw = cache.place.read(KEY), random.Random(5)
    wrong = 0
    for _ in range(1000):
        place = draw.randrange(len(stored) * 8)
        changed = bytearray(stored)
        changed[place // 8] ^= 1 << place % 8
        cache.place.write(KEY, bytes(changed))
        wrong += cache.find(KEY) is not None
    assert wrong == 0
    assert cache.tier.stats.refused == 1000


def test_cut_entries_give_no_answer(cache: Opened):
    """Every length below the whole is a miss."""
    cache.tier.put_many([Put(KEY, VALUE, 3600)])
    stored = cache.place.read(KEY)
    for length in range(len(stored)):
        cache.place.write(KEY, stored[:length])
        assert cache.find(KEY) is None
    assert cache.tier.stats.refused == len(stored)


@pytest.mark.parametrize(
    ("writing", "reading"), [(KEYS, OTHER_KEYS), (KEYS, None), (None, KEYS)], ids=["other key", "no key", "plain"]
)
def test_entries_of_another_key_are_refused(place: Place, writing: DataKeys | None, reading: DataKeys | None):
    """Ciphertext is never a value, and neither is a plain entry where entries are sealed. On disk a cache that seals
    and one that does not are not the same file: the later one begins it anew.
    """
    with closing(place.open(writing)) as writer, closing(place.open(reading)) as reader:
        writer.put_many([Put(KEY, VALUE, 3600)])
        assert reader.get_many([KEY]) == [None]
        assert (reader.stats.misses, reader.stats.errors) == (1, 0)
        assert reader.stats.refused == (0 if isinstance(place, DiskPlace) and None in (writing, reading) else 1)


def test_entries_of_a_rotated_key_open(place: Place):
    """The first key seals, all open."""
    with closing(place.open(KEYS)) as before, closing(place.open(DataKeys([b"2" * 32, b"1" * 32]))) as after:
        before.put_many([Put(KEY, VALUE, 3600)])
        (found,) = after.get_many([KEY])
        assert found is not None
        assert found.value == VALUE


def test_threads_share_a_tier(cache: Opened):
    """Each thread reads what it wrote, and no call is lost from the counters."""
    failures: list[object] = []

    def work(name: str) -> None:
        keys = _keys(20, tenant=name)
        for turn in range(20):
            value = f"{name} {turn}".encode()
            cache.tier.put_many([Put(key, value, 3600) for key in keys])
            found = cache.tier.get_many(keys)
            if [each and each.value for each in found] != [value] * len(keys):
                failures.append(found)

    threads = [threading.Thread(target=work, args=(f"tenant{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = cache.tier.stats
    assert (stats.puts, stats.hits, stats.misses, stats.errors) == (3200, 3200, 0, 0)


def test_a_closed_tier_finds_nothing(place: Place):
    """Closing twice does no harm, and later calls raise nothing."""
    with ExitStack() as stack:
        tier = place.open(KEYS)
        stack.callback(tier.close)
        tier.put_many([Put(KEY, VALUE, 3600)])
        tier.close()
        tier.close()
        assert tier.get_many([KEY]) == [None]
        assert tier.put_many([Put(KEY, VALUE, 3600)]) == 0
        assert tier.delete_many([KEY]) == tier.forget("a" * 64) == tier.clear() == 0
