"""`penstock cache` over a file of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.safety.cache_entry import EntryKey
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.cache.tier import Put
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.workers.cache.l2_files import run_sql

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
CANARY = b"canary of a value"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of this home with 30 entries of two versions, sealed with the old key."""
    file = tmp_path / "inference_cache" / "cache.db"
    cache = L2Cache(L2CacheConfig(db_path=file, encryption_key=OLD))
    entries = [Put(EntryKey("first" if n < 20 else "second", b"%d" % n), CANARY * 10, 3600) for n in range(30)]
    assert cache.put_many(entries) == 30
    cache.close()
    return file


def asked(home: Path, *arguments: str, keys: tuple[bytes, ...] = (OLD,), exit_code: int = 0) -> Any:
    """What the command prints as JSON."""
    given = {"PENSTOCK_L2_ENCRYPTION_KEY": ",".join(key.hex() for key in keys)}
    shown = penstock(home, "cache", *arguments, "--json", **given)
    assert shown.exit_code == exit_code, shown.stderr
    return json.loads(shown.stdout)


@pytest.mark.parametrize("command", ["stats", "inspect", "verify", "rekey", "clear"])
def test_without_a_file_there_is_nothing_to_do(tmp_path: Path, command: str):
    """Before the first worker has cached anything every command succeeds, and makes no file."""
    shown = penstock(tmp_path, "cache", command, *(["--yes"] if command == "clear" else []))
    assert shown.exit_code == 0
    assert shown.stdout in ("There is no cache on this machine's disk.\n", "0 entries removed.\n")
    assert not (tmp_path / "inference_cache").exists()


def test_contents_are_shown_without_values_and_without_a_key(tmp_path: Path, file: Path):
    """Versions, sizes, times and ids of keys are shown; no value is."""
    contents = asked(tmp_path, "inspect", keys=())
    assert {name: group["entries"] for name, group in contents["groups"].items()} == {"first": 20, "second": 10}
    assert contents["keys"] == {DataKeys([OLD]).ids[0]: 30}
    assert contents["is_sealed"] is True
    shown = penstock(tmp_path, "cache", "inspect").stdout
    assert "30 entries, encrypted" in shown
    assert "version first  20 entries" in shown
    assert "canary" not in shown
    stats = asked(tmp_path, "stats", keys=())
    assert stats.pop("bytes") >= file.stat().st_size
    assert stats == {"entries": 30, "max_bytes": 1 << 30, "encrypted": True}


def test_verify_finds_changed_entries_and_those_of_other_keys(tmp_path: Path, file: Path):
    """The exit status is 1 when an entry does not open; nothing is changed."""
    assert asked(tmp_path, "verify") == {"good": 30, "expired": 0, "changed": 0, "other_key": 0}
    run_sql(file, "UPDATE entries SET data = front WHERE id = 7")
    assert asked(tmp_path, "verify", exit_code=1) == {"good": 29, "expired": 0, "changed": 1, "other_key": 0}
    assert asked(tmp_path, "verify", keys=(NEW,), exit_code=1)["other_key"] == 30
    assert run_sql(file, "SELECT count(*) FROM entries") == [(30,)]


def test_rekey_seals_with_the_first_key(tmp_path: Path, file: Path):
    """Afterwards the new key alone opens everything, and a second run has nothing to do."""
    assert asked(tmp_path, "rekey", keys=(NEW, OLD)) == {"resealed": 30, "current": 0, "unopenable": 0}
    assert asked(tmp_path, "verify", keys=(NEW,))["good"] == 30
    assert asked(tmp_path, "rekey", keys=(NEW, OLD)) == {"resealed": 0, "current": 30, "unopenable": 0}
    cache = L2Cache(L2CacheConfig(db_path=file, encryption_key=NEW))
    assert cache.get(EntryKey("first", b"3")) == CANARY * 10
    cache.close()


def test_clear_asks_first(tmp_path: Path, file: Path):
    """Without a yes nothing is removed; with one the file is empty and small."""
    refused = penstock(tmp_path, "cache", "clear", stdin="n\n")
    assert refused.exit_code == 1
    assert "Remove 30 entries from this machine's disk?" in refused.stderr
    assert asked(tmp_path, "stats")["entries"] == 30
    assert asked(tmp_path, "clear", "--yes") == {"removed": 30}
    assert asked(tmp_path, "stats")["entries"] == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "PENSTOCK_L2_ENCRYPTION_KEY is not set. Expected a key"),
        ("abc", "neither hex nor base64. Expected 32"),
        ("abcd", "Expected 32"),
    ],
)
def test_an_encrypted_file_needs_its_key(tmp_path: Path, file: Path, given: str | None, told: str):
    """One line says what was expected and does not show the key; the file stays as it is."""
    refused = penstock(tmp_path, "cache", "verify", **({"PENSTOCK_L2_ENCRYPTION_KEY": given} if given else {}))
    assert refused.exit_code == EXIT_CONFIGURATION
    assert told in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert asked(tmp_path, "verify")["good"] == 30


def test_a_damaged_file_is_refused_and_stays(tmp_path: Path):
    """A command moves no file aside: that is left to the worker that writes there."""
    file = tmp_path / "inference_cache" / "cache.db"
    file.parent.mkdir()
    file.write_bytes(content := os.urandom(20_000))
    for command in ("stats", "inspect", "verify", "rekey", "clear"):
        refused = penstock(tmp_path, "cache", command, *(["--yes"] if command == "clear" else []))
        assert refused.exit_code == 1
        assert refused.stderr.startswith("Error: The cache on disk cannot be used (file is not a database)")
        assert refused.stderr.count("\n") == 1
    assert file.read_bytes() == content
