"""Upkeep of the cache on disk: what is in it, verification, and new seals after a change of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.safety.cache_entry import EntryKey
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l2_upkeep import Contents, GroupContents, Rekeyed, Verified
from penstock.workers.cache.tier import Put
from penstock.workers.compilation.artifacts import ArtifactStore
from tests.workers.cache.l2_files import KEY, Clock, cache_at, run_sql

NEW = bytes(32)
BOTH = DataKeys([NEW, KEY])
KEYS = [EntryKey(f"version {n % 2}", n.to_bytes(16, "little"), "tenant") for n in range(2100)]


class Interrupted(Exception):
    """What a person or a stopping worker does."""


def test_contents_by_group_and_key(tmp_path: Path):
    """Entries, sizes, times and ids of keys are counted over all entries."""
    clock = Clock(1_000_000.0)
    with cache_at(tmp_path, clock=clock) as cache:
        cache.put_many([Put(key, b"value", 10) for key in KEYS[:1000]])
        clock.now += 5
        cache.put_many([Put(key, b"value", 10) for key in KEYS[1000:]])
        clock.now += 5
        found = cache.inspect()
        assert found.entries == len(KEYS)
        expected = GroupContents(1050, 1050 * (5 + 48), 500, 1_000_000_000, 1_000_005_000)
        assert found.groups == {"version 0": expected, "version 1": expected}
        assert found.keys == {DataKeys([KEY]).ids[0]: len(KEYS)}
    with cache_at(tmp_path / "plain", encryption_key=None) as cache:
        assert cache.inspect() == Contents(is_sealed=False, file_bytes=cache.stats.nbytes)
        cache.put("key", b"value")
        assert cache.inspect().keys == {"plain": 1}


def test_verify_counts_what_does_not_open(tmp_path: Path):
    """Good, expired and changed entries, and those of another key, are told apart; none is removed."""
    clock = Clock()
    with cache_at(tmp_path, clock=clock, encryption_key=NEW) as cache:
        cache.put_many([Put(key, b"value", 100) for key in KEYS[:7]])
    with cache_at(tmp_path, clock=clock) as cache:
        cache.put_many([Put(key, b"value", 10 if n < 20 else 100) for n, key in enumerate(KEYS[7:107])])
        run_sql(tmp_path / "cache.db", "UPDATE entries SET bound = zeroblob(32) WHERE id IN (50, 60, 70)")
        clock.now += 10
        steps: list[tuple[int, int]] = []
        assert cache.verify(lambda done, total: steps.append((done, total))) == Verified(77, 20, 3, 7)
        assert steps == [(0, 107), (107, 107)]
        assert cache.verify().unopenable == 10


def test_an_interrupted_rekey_is_continued(tmp_path: Path):
    """All entries are served at any time; the second run seals what the first one left, and the old key can go."""
    with cache_at(tmp_path) as cache:
        cache.put_many([Put(key, key.digest, 3600) for key in KEYS])

    def interrupt(done: int, total: int) -> None:
        assert total == len(KEYS)
        if done > 1000:
            raise Interrupted

    with cache_at(tmp_path, encryption_key=BOTH) as cache:
        with pytest.raises(Interrupted):
            cache.rekey(interrupt)
        first, second = cache.inspect().keys[BOTH.ids[0]], cache.inspect().keys[BOTH.ids[1]]
        assert first > 0
        assert second > 0
        assert all(found is not None for found in cache.get_many(KEYS))
        assert cache.rekey() == Rekeyed(resealed=second, current=first, unopenable=0)
    with cache_at(tmp_path, encryption_key=NEW) as cache:
        assert [found and found.value for found in cache.get_many(KEYS)] == [key.digest for key in KEYS]
        assert cache.stats.refused == 0


def test_rekey_leaves_what_does_not_open(tmp_path: Path):
    """A changed entry gets no valid seal by being sealed again."""
    with cache_at(tmp_path) as cache:
        cache.put_many([Put(key, b"value", 3600) for key in KEYS[:10]])
    run_sql(tmp_path / "cache.db", "UPDATE entries SET data = front WHERE id = 4")
    with cache_at(tmp_path, encryption_key=BOTH) as cache:
        assert cache.rekey() == Rekeyed(resealed=9, current=0, unopenable=1)
        assert cache.verify() == Verified(good=9, changed=1)


def test_compiled_artefacts_and_the_cache_share_a_folder(tmp_path: Path):
    """The cleaning of compiled models, down to nothing, leaves the cache on disk alone."""
    folder = tmp_path / "inference_cache"
    with cache_at(folder) as cache:
        cache.put("key", b"value")
        store = ArtifactStore(folder, tmp_path / "key", most_bytes=1)
        store.store("first", {"code": b"x" * 100})
        store.store("second", {"code": b"y" * 100})
        assert store.load("first") is None
        assert store.load("second") is not None
        assert cache.get("key") == b"value"
    with cache_at(folder) as cache:
        assert cache.get("key") == b"value"
