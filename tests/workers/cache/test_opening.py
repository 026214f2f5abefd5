"""Settings -> the tiers behind a worker's memory: which there are, where, and what they would store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.cache_entry import EntryKey
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.opening import open_tiers
from penstock.workers.cache.tier import Put, Tier

KEYS = DataKeys([b"1" * 32])
KEY = EntryKey("a" * 64, b"0123456789abcdef", "acme")
VALUE = b"the answer that nobody else reads"
MODES = ("ephemeral", "hashes_only", "persisted_encrypted")

Open = Callable[..., list[Tier]]
"""Opens the tiers of these settings; data_keys: KEYS unless given."""


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as ends:

        def open_(data_keys: DataKeys | None = KEYS, **settings: Any) -> list[Tier]:
            found = {"cache.privacy_mode": "persisted_encrypted", **settings}
            loaded = Settings.load(environ={"PENSTOCK_HOME": str(tmp_path)}, cwd=tmp_path, overrides=found)
            tiers = open_tiers(loaded, data_keys)
            for tier in tiers:
                ends.callback(tier.close)
            return tiers

        yield open_


def names(tiers: list[Tier]) -> list[str]:
    return [tier.name for tier in tiers]


@pytest.mark.parametrize("modes", list(product(MODES, repeat=2)))
def test_tiers_exist_where_answers_may_outlive_the_process(open_: Open, tmp_path: Path, modes: tuple[str, str]):
    """CF-030 to CF-032: in persisted_encrypted only; elsewhere there is no file, and no connection is made."""
    url = {"cache.redis_url": "redis://127.0.0.1:1/0"}
    tiers = open_(**{"cache.privacy_mode": modes[0], "privacy.mode": modes[1], **url})
    persists = "persisted_encrypted" in modes and "hashes_only" not in modes
    assert names(tiers) == (["l2", "l3"] if persists else [])
    assert (tmp_path / "inference_cache").exists() == persists


@pytest.mark.parametrize("off", ["enabled", "cache.enabled"])
def test_there_is_no_tier_where_nothing_is_cached(open_: Open, tmp_path: Path, off: str):
    """CF-017: the cache is off, or all of inference's extras are."""
    assert open_(**{off: False}) == []
    assert not (tmp_path / "inference_cache").exists()


def test_the_file_is_where_the_setting_says_and_has_its_bound(open_: Open, tmp_path: Path):
    """cache.l2_path and cache.l2_max_bytes; 0 bytes are no tier on disk."""
    (tier,) = open_(**{"cache.l2_path": str(tmp_path / "elsewhere" / "kept.db"), "cache.l2_max_bytes": 4 << 20})
    assert (tmp_path / "elsewhere" / "kept.db").is_file()
    for number in range(40):
        tier.put_many([Put(KEY._replace(digest=number.to_bytes(16, "big")), bytes(120_000), 60.0)])
    assert 0 < tier.stats.entries < 40
    assert sum(file.stat().st_size for file in (tmp_path / "elsewhere").iterdir()) <= 4 << 20
    assert open_(**{"cache.l2_max_bytes": 0}) == []
    assert names(open_(**{"cache.l2_max_bytes": 0, "cache.redis_url": "redis://127.0.0.1:1/0"})) == ["l3"]
    with pytest.raises(ConfigurationError, match="expected 0, or at least 4194304 bytes"):
        open_(**{"cache.l2_max_bytes": 1000})


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_values_are_readable_on_disk_only_where_the_setting_says_so(open_: Open, tmp_path: Path, is_encrypted: bool):
    """CF-027: privacy.encrypt_at_rest. Keys that are there for other purposes change nothing."""
    (tier,) = open_(**{"privacy.encrypt_at_rest": is_encrypted})
    assert tier.put_many([Put(KEY, VALUE, 60.0)]) == 1
    tier.close()
    written = b"".join(file.read_bytes() for file in (tmp_path / "inference_cache").iterdir())
    assert (VALUE in written) is not is_encrypted


def test_a_missing_key_is_no_plain_file(open_: Open, tmp_path: Path):
    """CF-046: never plaintext by accident."""
    with pytest.raises(ConfigurationError, match="no data key"):
        open_(None)
    assert not (tmp_path / "inference_cache").exists()
