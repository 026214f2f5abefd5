"""The cache on disk: entries, lifetimes, the bound, encryption, and use by threads and processes."""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
import subprocess
import sys
import threading
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.registry.errors import ConfigurationError
from penstock.safety.cache_entry import EntryKey
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.cache.l2_rows import FORMAT, name_of
from penstock.workers.cache.tier import Put, Tier
from tests.servers import ROOT
from tests.workers.cache.l2_files import HOUR_S, KEY, Clock, cache_at, disk_bytes, rows_of, run_sql


def key(number: int, *, group: str = "version", tenant: str = "") -> EntryKey:
    return EntryKey(group, number.to_bytes(16, "little"), tenant)


def values(cache: L2Cache, *keys: EntryKey) -> list[bytes | None]:
    """What a look-up of several keys finds."""
    return [found and found.value for found in cache.get_many(keys)]


def test_values_come_back_by_text_keys(tmp_path: Path):
    """CF-043: usable on its own: put, get, delete, with a file of this user and write-ahead log (AR-031)."""
    with closing(L2Cache(L2CacheConfig(db_path=tmp_path / "folder" / "cache.db", encryption_key=KEY))) as cache:
        assert cache.put("key", b"value")
        assert cache.get("key") == b"value"
        assert cache.get("other") is None
        assert run_sql(tmp_path / "folder" / "cache.db", "PRAGMA journal_mode") == [("wal",)]
        assert cache.delete("key")
        assert not cache.delete("key")
        assert cache.get("key") is None


def test_the_defaults_are_those_of_the_specification():
    """CF-043: the place, the lifetime and no key."""
    config = L2CacheConfig()
    assert config.db_path == "~/.penstock/inference_cache/cache.db"
    assert (config.ttl_seconds, config.encryption_key, config.max_bytes) == (86_400, None, 1 << 30)


def test_a_tilde_is_the_home_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The default place is below the home of this user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with closing(L2Cache()) as cache:
        assert cache.put("key", b"value")
    assert (tmp_path / ".penstock" / "inference_cache" / "cache.db").is_file()


def test_tier_calls_keep_the_order_of_keys(tmp_path: Path):
    """Values and gaps come in the order of the keys, repeated keys included, and counters count them."""
    with cache_at(tmp_path) as cache:
        tier: Tier = cache
        assert tier.name == "l2"
        assert tier.get_many([]) == []
        assert tier.put_many([]) == 0
        assert tier.put_many([Put(key(n), b"%d" % n, 60) for n in range(700)]) == 700
        asked = [key(3), key(900), key(699), key(3)]
        assert [found and found.value for found in tier.get_many(asked)] == [b"3", None, b"699", b"3"]
        assert tier.put_many([Put(key(3), b"first", 60), Put(key(3), b"last", 60)]) == 2
        assert cache.get(key(3)) == b"last"
        assert tier.delete_many([key(3), key(900), key(699)]) == 2
        stats = tier.stats
        assert (stats.puts, stats.hits, stats.misses, stats.entries, stats.errors) == (702, 4, 1, 698, 0)
        assert stats.nbytes == disk_bytes(tmp_path)


def test_group_digest_and_tenant_tell_entries_apart(tmp_path: Path):
    """No part of a key stands for another one, and a moved boundary is another key."""
    keys = [
        EntryKey("g", b"d", "t"),
        EntryKey("gd", b"", "t"),
        EntryKey("g", b"", "dt"),
        EntryKey("g", b"d", ""),
        EntryKey("", b"d", "t"),
    ]
    with cache_at(tmp_path) as cache:
        cache.put_many([Put(each, b"%d" % n, 60) for n, each in enumerate(keys)])
        assert [found and found.value for found in cache.get_many(keys)] == [b"0", b"1", b"2", b"3", b"4"]


def test_forget_and_clear_give_the_disk_back(tmp_path: Path):
    """A group leaves as a whole and no other one does; afterwards the file is small."""
    with cache_at(tmp_path, max_bytes=64 << 20) as cache:
        for group in ("old", "new"):
            cache.put_many([Put(key(n, group=group), os.urandom(4000), 60) for n in range(2500)])
        assert cache.forget("old") == 2500
        assert cache.forget("old") == 0
        assert cache.stats.entries == 2500
        assert cache.get(key(7, group="old")) is None
        assert cache.get(key(7, group="new")) is not None
        assert cache.clear() == 2500
        assert cache.stats.entries == 0
        assert (tmp_path / "cache.db").stat().st_size < 1 << 20


def test_an_entry_lives_as_long_as_it_was_given(tmp_path: Path):
    """CF-019: the lifetime that is left is told, and from its end on the entry is not served, also after a restart."""
    clock = Clock()
    with cache_at(tmp_path, clock=clock, ttl_seconds=100) as cache:
        cache.put("default", b"x")
        cache.put("short", b"y", 10)
        clock.now += 9.5
        (found,) = cache.get_many([EntryKey("", b"short")])
        assert found is not None
        assert found.ttl_s == pytest.approx(0.5)
        clock.now += 0.5
        assert cache.get("short") is None
        assert cache.get("default") == b"x"
    with cache_at(tmp_path, clock=clock) as cache:
        assert cache.get("default") == b"x"
        clock.now += 90
        assert cache.get("default") is None


def test_expired_entries_leave_the_disk(tmp_path: Path):
    """Entries whose time is over leave with the writes that follow, and are no evictions."""
    clock = Clock()
    with cache_at(tmp_path, clock=clock) as cache:
        cache.put_many([Put(key(n), b"x" * 1000, 10 + n % 2) for n in range(200)])
        clock.now += 10
        for n in range(3):
            cache.put(key(1000 + n), b"y", 50)
        stats = cache.stats
        assert (stats.entries, stats.expired, stats.evicted) == (103, 100, 0)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_an_entry_without_a_lifetime_takes_the_place_of_an_earlier_one(tmp_path: Path, ttl_s: float):
    """It is not stored, and the value that it replaces is not served any more."""
    with cache_at(tmp_path) as cache:
        cache.put("key", b"old")
        assert not cache.put("key", b"new", ttl_s)
        assert cache.get("key") is None


def test_an_endless_lifetime_is_a_long_one(tmp_path: Path):
    """Infinity is stored as the longest lifetime there is."""
    with cache_at(tmp_path) as cache:
        assert cache.put("key", b"value", float("inf"))
        assert cache.get("key") == b"value"


def test_a_clock_that_jumps_serves_no_expired_entry(tmp_path: Path):
    """An hour forward: what has less than an hour left is gone. An hour back: entries of the future are not served,
    and come back with the clock; no lifetime exceeds the one given."""
    clock = Clock()
    with cache_at(tmp_path, clock=clock) as cache:
        cache.put("day", b"d", 24 * HOUR_S)
        cache.put("minute", b"m", 60)
        clock.now += HOUR_S
        assert (cache.get("day"), cache.get("minute")) == (b"d", None)
        clock.now -= 2 * HOUR_S
        assert (cache.get("day"), cache.get("minute")) == (None, None)
        cache.put("now", b"n", 60)
        assert cache.get("now") == b"n"
        clock.now += HOUR_S - 1
        (found,) = cache.get_many([EntryKey("", b"day")])
        assert found is not None
        assert found.ttl_s == 24 * HOUR_S
        assert cache.get("now") is None


def test_the_file_stays_within_its_bound(tmp_path: Path):
    """AR-058: 1.2 times the bound is written: file and log never exceed it, and the entries stored first leave."""
    most, size = 8 << 20, 1500
    count = int(1.2 * most) // size
    with cache_at(tmp_path, max_bytes=most) as cache:
        for begin in range(0, count, 64):
            entries = [Put(key(n), os.urandom(size), 60) for n in range(begin, min(begin + 64, count))]
            assert cache.put_many(entries) == len(entries)
            assert disk_bytes(tmp_path) <= most
        found = [each is not None for each in cache.get_many([key(n) for n in range(count)])]
        kept = found.index(True)
        assert found == [False] * kept + [True] * (count - kept)
        stats = cache.stats
        assert stats.evicted == kept
        assert stats.entries == count - kept
        assert (count - kept) * size > 0.75 * most


def test_large_and_mixed_values_stay_within_the_bound(tmp_path: Path):
    """Values of all sizes, replaced and new, never make the file too large; one that is too large is not stored."""
    most = 8 << 20
    with cache_at(tmp_path, max_bytes=most) as cache:
        for n in range(400):
            size = (n * 7919) % 240_000
            assert cache.put(key(n % 150), os.urandom(size))
            assert disk_bytes(tmp_path) <= most
        assert cache.get(key(399 % 150)) is not None
        assert not cache.put(key(1), bytes(most // 16))
        assert cache.get(key(1)) is None
        assert cache.stats.errors == 0


def test_a_lowered_bound_shrinks_the_file(tmp_path: Path):
    """At the next start the oldest entries leave until the file fits."""
    with cache_at(tmp_path, max_bytes=16 << 20) as cache:
        cache.put_many([Put(key(n), os.urandom(1500), 60) for n in range(7000)])
        assert disk_bytes(tmp_path) > 8 << 20
    with cache_at(tmp_path, max_bytes=4 << 20) as cache:
        assert disk_bytes(tmp_path) <= 4 << 20
        assert cache.get(key(6999)) is not None
        assert cache.get(key(0)) is None


@pytest.mark.parametrize("length", [0, 5, 16, 31, 33])
def test_a_key_of_another_length_is_refused(tmp_path: Path, length: int):
    """CF-044: a key has 32 bytes; the error says so, and does not show it."""
    with pytest.raises(ConfigurationError, match=f"has {length} bytes. Expected 32"):
        L2Cache(L2CacheConfig(db_path=tmp_path / "cache.db", encryption_key=b"k" * length))
    assert "kkkk" not in repr(L2CacheConfig(encryption_key=b"k" * 32))


@pytest.mark.parametrize("config", [{"max_bytes": 1 << 20}, {"ttl_seconds": 0.0}, {"ttl_seconds": float("nan")}])
def test_bounds_that_make_no_sense_are_refused(tmp_path: Path, config: dict[str, float]):
    """The error says what was expected."""
    with pytest.raises(ConfigurationError, match="Expected"):
        L2Cache(L2CacheConfig(db_path=tmp_path / "cache.db", **config))  # type: ignore[arg-type]  # by design


def test_without_the_library_a_key_is_refused(tmp_path: Path):
    """CF-046: with a key and without `cryptography` nothing is stored; without a key the cache works, plain."""
    program = f"""
import sys
sys.modules["cryptography"] = None
from penstock.registry.errors import ConfigurationError
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
try:
    L2Cache(L2CacheConfig(db_path={str(tmp_path / "a.db")!r}, encryption_key=bytes(32)))
except ConfigurationError as error:
    print(error)
plain = L2Cache(L2CacheConfig(db_path={str(tmp_path / "b.db")!r}))
print(plain.put("key", b"value"), plain.get("key"))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "The library cryptography cannot be imported" in ended.stdout
    assert "True b'value'" in ended.stdout
    assert not (tmp_path / "a.db").exists()


@pytest.mark.parametrize("encryption_key", [KEY, None])
def test_only_plain_values_can_be_read_on_disk(tmp_path: Path, encryption_key: bytes | None):
    """CF-027: the value is nowhere in the file, its log and its shared memory, unless it was stored plain."""
    canary = b"canary of a value that nobody may read"
    with cache_at(tmp_path, encryption_key=encryption_key) as cache:
        cache.put("key", canary * 3)
        for again in (False, True):
            on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
            assert (canary in on_disk) == (encryption_key is None), again
            run_sql(tmp_path / "cache.db", "PRAGMA wal_checkpoint(TRUNCATE)")
        assert cache.get("key") == canary * 3


def test_equal_values_have_different_nonces(tmp_path: Path):
    """CF-047: 100,000 puts of one value under few keys: every nonce has 12 bytes and is used once."""
    seen: set[bytes] = set()
    sealed: set[bytes] = set()
    with cache_at(tmp_path) as cache:
        for begin in range(0, 100_000, 500):
            cache.put_many([Put(key(n), b"value", 60) for n in range(500)])
            rows = rows_of(tmp_path / "cache.db")
            seen |= {front[4:16] for _, front, _ in rows}
            sealed |= {data for *_, data in rows}
            assert len(seen) == len(sealed) == begin + 500
    assert {len(nonce) for nonce in seen} == {12}


@pytest.mark.parametrize("encryption_key", [KEY, None])
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entries SET (front, data) = (SELECT front, data FROM entries WHERE id = 2) WHERE id = 1",
        "UPDATE entries SET front = (SELECT front FROM entries WHERE id = 2) WHERE id = 1",
        "UPDATE entries SET data = (SELECT data FROM entries WHERE id = 2) WHERE id = 1",
        "UPDATE entries SET data = substr(data, 1, length(data) - 1) WHERE id = 1",
        "UPDATE entries SET data = substr(data, 1, 7) WHERE id = 1",
        "UPDATE entries SET data = CAST(substr(data, 1, 20) AS TEXT) WHERE id = 1",
        "UPDATE entries SET front = CAST(substr(front, 1, 31) AS BLOB) WHERE id = 1",
        "UPDATE entries SET front = front || x'00' WHERE id = 1",
        "UPDATE entries SET front = CAST(substr(front, 1, 9) AS TEXT) WHERE id = 1",
        "UPDATE entries SET front = 12 WHERE id = 1",
        "UPDATE entries SET data = 12 WHERE id = 1",
        "UPDATE entries SET data = 1.5 WHERE id = 1",
    ],
)
def test_a_changed_row_is_refused_and_removed(tmp_path: Path, encryption_key: bytes | None, change: str):
    """CF-044, CF-047: swapped and cut values, and other types, are misses for both look-ups, and counted."""
    for many in (False, True):
        with cache_at(tmp_path / str(many), encryption_key=encryption_key) as cache:
            cache.put("one", b"value of one")
            # Without encryption, rows of the same millisecond with the same lifetime have equal fronts.
            cache.put("two", b"value of two", ttl_seconds=600)
            run_sql(tmp_path / str(many) / "cache.db", change)
            if many:
                assert values(cache, EntryKey("", b"one"), EntryKey("", b"two")) == [None, b"value of two"]
            else:
                assert cache.get("one") is None
                assert cache.get("two") == b"value of two"
            stats = cache.stats
            assert (stats.refused, stats.misses, stats.errors, stats.entries) == (1, 1, 0, 1)
            assert len(rows_of(tmp_path / str(many) / "cache.db")) == 1


@pytest.mark.parametrize("encryption_key", [KEY, None])
def test_a_changed_byte_of_a_row_is_a_miss(tmp_path: Path, encryption_key: bytes | None):
    """CF-044: whichever byte of the key's id, the nonce, the times and the value is changed, the entry is not
    served."""
    with cache_at(tmp_path, encryption_key=encryption_key) as cache:
        for place in range(32 + 5 + 16):
            cache.put("key", b"value")
            ((number, front, data),) = rows_of(tmp_path / "cache.db")
            changed = bytearray(front + data)
            changed[place] ^= 1
            run_sql(
                tmp_path / "cache.db",
                "UPDATE entries SET front = ?, data = ? WHERE id = ?",
                (bytes(changed[:32]), bytes(changed[32:]), number),
            )
            assert cache.get("key") is None
        assert cache.stats.refused == 32 + 5 + 16


@pytest.mark.parametrize("encryption_key", [KEY, None])
def test_two_keys_with_one_name_never_share_an_answer(tmp_path: Path, encryption_key: bytes | None):
    """Tenants, versions and digests whose 64-bit names collide replace each other's entry, and find a miss: the value
    is bound to the whole key."""
    first = EntryKey("version", bytes(16), "tenant")
    number = name_of(first)[0]
    for group, tenant in (("version", "tenant"), ("version", "other"), ("other", "tenant")):
        # Equal changes in both halves of a digest leave the name as it is.
        digest = struct.pack("<qq", name_of(EntryKey(group, bytes(16), tenant))[0] ^ number ^ 7, 7)
        second = EntryKey(group, digest, tenant)
        assert name_of(second)[0] == number
        folder = tmp_path / f"{group} {tenant}"
        with cache_at(folder, encryption_key=encryption_key) as cache:
            cache.put(first, b"first")
            assert cache.get(first) == b"first"
            assert cache.get(second) is None
            cache.put(second, b"second")
            assert len(rows_of(folder / "cache.db")) == 1
            assert values(cache, first, second) == [None, b"second"]


@pytest.mark.parametrize("encryption_key", [KEY, None])
def test_a_moved_row_is_refused(tmp_path: Path, encryption_key: bytes | None):
    """CF-047: a whole row under the name of another tenant, version or digest is not served there."""
    first, *others = key(1, tenant="a"), key(2, tenant="a"), key(1, tenant="b"), key(1, group="other", tenant="a")
    for number, other in enumerate(others):
        with cache_at(tmp_path / str(number), encryption_key=encryption_key) as cache:
            cache.put(first, b"first")
            name, bound = name_of(other)
            moved = "UPDATE entries SET name = ?, bound = ?"
            run_sql(tmp_path / str(number) / "cache.db", moved, (name, bound[len(FORMAT) :]))
            assert cache.get(other) is None
            assert cache.stats.refused == 1


def test_two_rows_of_one_name_are_misses(tmp_path: Path):
    """Only a damaged file has them: a look-up of many finds nothing, and the next put leaves one row."""
    with cache_at(tmp_path) as cache:
        cache.put_many([Put(key(n), b"%d" % n, 60) for n in range(3)])
        same = "UPDATE entries SET name = (SELECT name FROM entries WHERE id = 1), grp = id WHERE id < 3"
        run_sql(tmp_path / "cache.db", same)
        assert values(cache, key(0), key(2)) == [None, None]
        cache.put(key(0), b"new")
        assert values(cache, key(0), key(2)) == [b"new", b"2"]


@pytest.mark.parametrize("encryption_key", [KEY, None])
def test_the_times_beside_a_value_prolong_nothing(tmp_path: Path, encryption_key: bytes | None):
    """Lifetimes are those to which the value is bound, whatever the columns for the sweep say."""
    clock = Clock()
    with cache_at(tmp_path, clock=clock, encryption_key=encryption_key) as cache:
        cache.put("key", b"value", 10)
        run_sql(tmp_path / "cache.db", "UPDATE entries SET expires = expires + 100000, stored = 'x'")
        clock.now += 9
        assert cache.get("key") == b"value"
        clock.now += 1
        assert cache.get("key") is None
        assert values(cache, EntryKey("", b"key")) == [None]


def test_a_text_and_a_digest_are_different_keys(tmp_path: Path):
    """A digest that is the hash of a text is no other spelling of the text."""
    text = b"a text of another length"
    with cache_at(tmp_path) as cache:
        cache.put(text.decode(), b"of the text")
        cache.put(EntryKey("", sha256(text).digest()[:16]), b"of the digest")
        assert cache.get(text.decode()) == b"of the text"
        assert cache.get(EntryKey("", sha256(text).digest()[:16])) == b"of the digest"


def test_entries_of_another_key_are_misses_and_stay(tmp_path: Path):
    """Another key's entries are refused, never served sealed, and readable again with that key."""
    with cache_at(tmp_path) as cache:
        cache.put("key", b"value")
    with cache_at(tmp_path, encryption_key=bytes(32)) as cache:
        assert cache.get("key") is None
        assert cache.get_many([EntryKey("", b"key")]) == [None]
        assert (cache.stats.refused, cache.stats.entries) == (2, 1)
    with cache_at(tmp_path, encryption_key=DataKeys([bytes(32), KEY])) as cache:
        assert cache.get("key") == b"value"


def test_encryption_removes_a_plain_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """When values are encrypted from now on, no plain one stays on disk; the log says so."""
    with cache_at(tmp_path, encryption_key=None) as cache:
        cache.put("key", b"a plain canary")
    with cache_at(tmp_path) as cache:
        assert cache.get("key") is None
        assert cache.put("key", b"value")
        assert not any(b"a plain canary" in path.read_bytes() for path in tmp_path.iterdir())
    assert "held plain values and is removed" in caplog.text
    with cache_at(tmp_path, encryption_key=None) as cache:
        assert cache.get("key") is None
        assert cache.put("key", b"value")
    assert "there is no key for them" in caplog.text


def test_files_and_folders_are_this_users_only(tmp_path: Path):
    """The folder has mode 0700; the file, its log, its shared memory and its lock have 0600, whatever the umask."""
    umask = os.umask(0)
    try:
        with closing(L2Cache(L2CacheConfig(db_path=tmp_path / "a" / "b" / "cache.db"))) as cache:
            cache.put("key", b"value")
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a" / "b").iterdir()}
    finally:
        os.umask(umask)
    assert modes == dict.fromkeys(("cache.db", "cache.db-wal", "cache.db-shm", "cache.db-lock"), 0o600)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_wide_mode_of_the_file_is_narrowed(tmp_path: Path):
    """A file that others could read is this user's only after the start."""
    with cache_at(tmp_path):
        pass
    (tmp_path / "cache.db").chmod(0o644)
    with cache_at(tmp_path):
        assert stat.S_IMODE((tmp_path / "cache.db").stat().st_mode) == 0o600


def test_unsafe_places_are_refused(tmp_path: Path):
    """A folder to which others may write, a link and a folder in the file's place: one line, without paths."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link.db").symlink_to(tmp_path / "target.db")
    (tmp_path / "folder.db").mkdir()
    (tmp_path / "file").touch()
    for place in ("open/cache.db", "link.db", "folder.db", "file/cache.db"):
        with pytest.raises(ConfigurationError) as refused:
            L2Cache(L2CacheConfig(db_path=tmp_path / place))
        assert str(tmp_path) not in str(refused.value)
    assert not (tmp_path / "target.db").exists()


def test_a_closed_cache_finds_nothing(tmp_path: Path):
    """Calls after the end find and store nothing, and raise nothing."""
    cache = L2Cache(L2CacheConfig(db_path=tmp_path / "cache.db"))
    cache.put("key", b"value")
    cache.close()
    cache.close()
    assert cache.get("key") is None
    assert not cache.put("key", b"value")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9), st.binary(max_size=40), st.integers(-1, 5)),
        st.tuples(st.just("delete"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(0, 3)),
        st.tuples(st.just("forget"), st.integers(0, 1)),
        st.tuples(st.just("restart")),
        st.tuples(st.just("clear")),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, encrypts=st.booleans())
def test_it_answers_as_a_dict_with_lifetimes(tmp_path_factory: pytest.TempPathFactory, steps, encrypts: bool):
    """After each step all keys have the value and the remaining lifetime that a dictionary would have."""
    folder = tmp_path_factory.mktemp("cache")
    clock, key_bytes = Clock(), KEY if encrypts else None
    keys = [key(n // 2, group=str(n % 2)) for n in range(10)]
    oracle: dict[int, tuple[bytes, float]] = {}
    cache = L2Cache(L2CacheConfig(db_path=folder / "cache.db", encryption_key=key_bytes), clock=clock)
    for step in steps:
        match step:
            case "put", n, value, ttl_s:
                assert cache.put(keys[n], value, ttl_s) == (ttl_s > 0)
                oracle.pop(n, None)
                if ttl_s > 0:
                    oracle[n] = value, clock.now + ttl_s
            case "delete", n:
                was_live = n in oracle and clock.now < oracle[n][1]
                assert cache.delete(keys[n]) or not was_live
                oracle.pop(n, None)
            case "wait", seconds:
                clock.now += seconds
            case "forget", group:
                cache.forget(str(group))
                oracle = {n: kept for n, kept in oracle.items() if n % 2 != group}
            case ("clear",):
                cache.clear()
                oracle.clear()
            case ("restart",):
                cache.close()
                cache = L2Cache(L2CacheConfig(db_path=folder / "cache.db", encryption_key=key_bytes), clock=clock)
        expected = [
            (oracle[n][0], oracle[n][1] - clock.now) if n in oracle and clock.now < oracle[n][1] else None
            for n in range(10)
        ]
        assert cache.get_many(keys) == expected
    assert cache.stats.errors == 0
    cache.close()


def value_of(number: int) -> bytes:
    """The only value that is ever stored under this number."""
    return number.to_bytes(8, "little") * (1 + number % 300)


def use(cache: L2Cache, seed: int, rounds: int) -> int:
    """Reads and writes entries of all users; returns the hits. Raises AssertionError for a wrong value."""
    hits = 0
    for turn in range(rounds):
        numbers = [(seed * 31 + turn * 17 + n * 7) % 500 for n in range(16)]
        for number, found in zip(numbers, cache.get_many([key(number) for number in numbers]), strict=True):
            if found is not None:
                assert found.value == value_of(number)
                hits += 1
        cache.put_many([Put(key(number), value_of(number), 60) for number in numbers])
        if turn % 10 == 9:
            cache.delete_many([key(number) for number in numbers[:4]])
    return hits


def test_eight_threads_share_a_cache(tmp_path: Path):
    """Threads that read, write and delete at once get right values, and no call fails."""
    with cache_at(tmp_path, write_wait_ms=30_000, read_wait_ms=30_000) as cache:
        hits: list[int] = []
        threads = [threading.Thread(target=lambda seed=n: hits.append(use(cache, seed, 30))) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(hits) == 8
        assert sum(hits) > 0
        assert cache.stats.errors == 0
        assert cache.stats.entries == len(rows_of(tmp_path / "cache.db"))


def test_two_processes_share_a_file(tmp_path: Path):
    """Processes see each other's entries, get right values, and the total in the file is right."""
    program = (
        "import sys; from pathlib import Path; from tests.workers.cache.test_l2 import use, cache_at\n"
        "with cache_at(Path(sys.argv[1]), write_wait_ms=30_000, read_wait_ms=30_000) as cache:\n"
        "    use(cache, int(sys.argv[2]), 60); print(cache.stats.errors)\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(n)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    assert [child.communicate(timeout=120)[0].strip() for child in children] == ["0", "0"]
    with cache_at(tmp_path) as cache:
        numbers = range(500)
        found = cache.get_many([key(n) for n in numbers])
        assert all(each is None or each.value == value_of(n) for n, each in zip(numbers, found, strict=True))
        assert cache.stats.entries == sum(each is not None for each in found) > 0


def test_a_process_follows_when_another_one_begins_a_new_file(tmp_path: Path):
    """When the file is replaced, a process with the old one open goes on with the new one."""
    monotonic = Clock()
    with cache_at(tmp_path, monotonic=monotonic) as cache:
        cache.put("key", b"old")
        for name in ("cache.db", "cache.db-wal", "cache.db-shm"):
            (tmp_path / name).rename(tmp_path / f"away-{name}")
        with cache_at(tmp_path) as other:
            other.put("key", b"new")
        monotonic.now += 2
        assert cache.get("key") == b"new"
        assert cache.put("mine", b"value")
        assert sqlite3.connect(tmp_path / "cache.db").execute("SELECT entries FROM totals").fetchall() == [(2,)]
