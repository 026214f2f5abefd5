"""API keys in the registry's database: changes in order, and the same key after every round."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.registry.api_keys import KeyLimits, new_api_key
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.registry.errors import InvalidInput


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database of its own, which is not made yet."""
    return f"sqlite:///{tmp_path / 'registry.db'}"


def test_a_key_is_read_as_it_was_stored(url: str):
    """With its models and limits; the first change has the revision 1."""
    limits = KeyLimits(requests_per_minute=5, tokens_per_minute=6, requests_per_day=7, requests_per_month=8)
    made = new_api_key("shop", now=10, role="readonly", tenant="acme", models=("a", "b"), expires_at=99, limits=limits)
    stored = SqlApiKeys(url).add(made.key)
    assert stored.revision == 1
    assert SqlApiKeys(url).since(0) == [stored]


def test_the_database_has_no_secret(url: str, tmp_path: Path):
    """ES-039: the text is shown once, and no file has it."""
    made = new_api_key("shop", now=10)
    SqlApiKeys(url).add(made.key)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert made.key.digest.encode() in written
    assert made.text.encode() not in written
    assert made.text.split("_", 2)[2].encode() not in written


def test_reading_makes_no_database(url: str, tmp_path: Path):
    """A gateway without keys leaves its home as it is."""
    assert SqlApiKeys(url).since(0) == []
    assert list(tmp_path.iterdir()) == []


def test_readers_see_changes_only(url: str):
    """Each change has the next revision; a key that was changed twice comes once, as it is now."""
    keys = SqlApiKeys(url)
    one, two = (keys.add(new_api_key(label, now=10).key) for label in ("one", "two"))
    assert keys.since(1) == [two]
    revoked = keys.revoke(one.id, 50)
    assert keys.since(2) == [revoked]
    assert (revoked.revoked_at, revoked.revision) == (50, 3)
    assert keys.revoke(one.id, 60) == revoked
    again = keys.replace_secret(two.id, 60)
    assert keys.since(3) == [again.key]
    assert again.key.digest != two.digest


def test_only_active_keys_get_a_new_secret(url: str):
    """A revoked key stays revoked; an unknown id is one line."""
    keys = SqlApiKeys(url)
    key = keys.add(new_api_key("one", now=10, expires_at=20).key)
    with pytest.raises(InvalidInput, match=f"Key {key.id} is expired. Expected an active one"):
        keys.replace_secret(key.id, 30)
    keys.revoke(key.id, 15)
    with pytest.raises(InvalidInput, match="is revoked"):
        keys.replace_secret(key.id, 16)
    for change in (keys.revoke, keys.replace_secret):
        with pytest.raises(InvalidInput, match="Expected an id of `penstock keys list`"):
            change("000000000000", 1)


def test_writers_at_once_have_revisions_of_their_own(url: str):
    """No reader that follows revisions misses a key."""
    SqlApiKeys(url).add(new_api_key("first", now=1).key)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: SqlApiKeys(url).add(new_api_key(f"key {n}", now=1).key), range(12)))
    assert sorted(key.revision for key in made) == [*range(2, 14)]


def test_a_role_that_nobody_knows_cannot_be_stored(url: str, tmp_path: Path):
    """The database refuses it, whoever writes."""
    SqlApiKeys(url).add(new_api_key("one", now=1).key)
    with sqlite3.connect(tmp_path / "registry.db") as direct, pytest.raises(sqlite3.IntegrityError):
        direct.execute("UPDATE penstock_api_keys SET role = 'root'")
