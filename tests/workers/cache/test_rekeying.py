"""Entries of older keys are sealed again while a worker serves, and a stop in between loses none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.safety.cache_entry import EntryKey
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.cache.rekeying import Rekeying
from penstock.workers.cache.tier import Put, Tier
from tests.servers import wait_until
from tests.workers.cache.stepped_tiers import DictTier

OLD, NEW = b"1" * 32, b"2" * 32
KEYS = [EntryKey("a" * 64, number.to_bytes(16, "big"), "acme") for number in range(3000)]

Records = list[tuple[str, str, Mapping[str, object]]]


def opened(folder: Path, *keys: bytes) -> L2Cache:
    return L2Cache(L2CacheConfig(db_path=folder / "cache.db", encryption_key=DataKeys(keys)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a cache that the old key sealed."""
    cache = opened(tmp_path, OLD)
    assert cache.put_many([Put(key, b"value", 600.0) for key in KEYS]) == len(KEYS)
    cache.close()
    return tmp_path


def test_entries_get_the_seal_of_the_first_key(folder: Path, caplog: pytest.LogCaptureFixture):
    """Afterwards the new key is enough; the operation is recorded once, with what it found."""
    caplog.set_level(logging.INFO, "penstock.server")
    records: Records = []
    cache = opened(folder, NEW, OLD)
    rekeying = Rekeying.begin([cache], DataKeys([NEW, OLD]), lambda *record: records.append(record))
    assert rekeying is not None
    wait_until(lambda: records, 60, "all entries are sealed again")
    rekeying.stop()
    assert records == [("reseal", "done", {"resealed": len(KEYS), "current": 0, "unopenable": 0})]
    assert "cached answers are sealed with the first key" in caplog.text
    cache.close()
    cache = opened(folder, NEW)
    assert None not in cache.get_many(KEYS)
    cache.close()


def test_a_stop_in_between_loses_nothing(folder: Path):
    """Each entry opens with one of the keys, and the next start goes on."""
    records: Records = []
    cache = opened(folder, NEW, OLD)
    rekeying = Rekeying.begin([cache], DataKeys([NEW, OLD]), lambda *record: records.append(record))
    assert rekeying is not None
    rekeying.stop(30)
    assert records == []
    assert None not in cache.get_many(KEYS)
    again = Rekeying.begin([cache], DataKeys([NEW, OLD]), lambda *record: records.append(record))
    assert again is not None
    wait_until(lambda: records, 60, "the rest is sealed again")
    again.stop()
    cache.close()


def test_a_cache_that_is_closed_ends_it(folder: Path, caplog: pytest.LogCaptureFixture):
    """The drain closes its tiers; the thread says so and ends."""
    cache = opened(folder, NEW, OLD)
    cache.close()
    rekeying = Rekeying(cache, lambda *_record: None)
    rekeying._run()
    assert "keep the seals of older keys" in caplog.text


def test_there_is_nothing_to_do_without_a_second_key_or_a_disk(folder: Path):
    """No thread is started then."""
    cache = opened(folder, OLD)
    nothing: list[tuple[list[Tier], DataKeys | None]] = [
        ([cache], DataKeys([OLD])),
        ([cache], None),
        ([DictTier("l3", lambda: 0.0)], DataKeys([NEW, OLD])),
        ([], DataKeys([NEW, OLD])),
    ]
    for tiers, keys in nothing:
        assert Rekeying.begin(tiers, keys, lambda *_record: None) is None
    cache.close()
