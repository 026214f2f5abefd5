"""Goldens outlive the process: bound to their version, sealed where privacy asks, bounded, and read with care."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from penstock.registry.catalog.goldens import MOST_GOLDENS, GoldenOwner
from penstock.registry.errors import ConfigurationError, RegistryUnavailable
from penstock.registry.settings import Settings
from penstock.safety.golden_archive import GoldenArchive
from penstock.safety.golden_store import Golden, GoldenStore
from penstock.safety.sealing import DataKeys

OWNER = GoldenOwner("minilm", "1", "ab" * 32)
KEYS = DataKeys([b"k" * 32])


def goldens(count: int, first: int = 0) -> list[Golden]:
    store = GoldenStore(max_jobs=count)
    for number in range(first, first + count):
        inputs = {"text": np.array([f"secret {number}"], object), "x": np.full((1, 3), number, np.float32)}
        assert store.offer(f"minilm.{number:032x}", inputs, {"y": np.full((1, 2), number, np.float32)})
    return store.goldens()


def stored(url: str) -> list[bytes]:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return [bytes(row.sample) for row in connection.execute(text("SELECT sample FROM penstock_goldens"))]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "sealed"])
def test_what_was_saved_is_loaded(registry_url: str, keys: DataKeys | None, slot: str):
    """Inputs, outputs, ids and strata, on SQLite and PostgreSQL; another content or version has none of them."""
    owner, saved = OWNER._replace(model=slot), goldens(3)
    archive = GoldenArchive(registry_url, keys)
    archive.save(owner, saved, 1000)
    archive.save(owner, saved[1:], 2000)
    loaded = GoldenArchive(registry_url, keys).load(owner)
    assert sorted(each.digest for each in loaded) == sorted(each.digest for each in saved)
    by_digest = {golden.digest: golden for golden in loaded}
    for golden in saved:
        found = by_digest[golden.digest]
        assert (found.job_id, found.stratum) == (golden.job_id, golden.stratum)
        for side, other in ((found.inputs, golden.inputs), (found.outputs, golden.outputs)):
            assert {name: values.tolist() for name, values in side.items()} == {
                name: values.tolist() for name, values in other.items()
            }
    assert archive.load(owner._replace(content_hash="cd" * 32)) == archive.load(owner._replace(version="2")) == []
    assert archive.forget(slot) == 3
    assert archive.load(owner) == []


def test_sealed_samples_are_not_readable_and_belong_to_one_place(url: str, caplog: pytest.LogCaptureFixture):
    """No text of an input is in the database. A row that was moved to another version, changed, or sealed with
    another key is passed over with one warning."""
    archive = GoldenArchive(url, KEYS)
    archive.save(OWNER, goldens(3), 1000)
    assert all(b"secret" not in sample for sample in stored(url))
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.execute(
            text("UPDATE penstock_goldens SET version = '2' WHERE digest = (SELECT MIN(digest) FROM penstock_goldens)")
        )
    moved = OWNER._replace(version="2")
    assert (len(archive.load(OWNER)), archive.load(moved)) == (2, [])
    assert GoldenArchive(url, DataKeys([b"x" * 32])).load(OWNER) == []
    assert GoldenArchive(url, None).load(OWNER) == []
    assert {record.message for record in caplog.records} == {"stored reference samples cannot be opened"}


def test_a_plain_sample_is_not_taken_where_they_are_sealed(url: str):
    """Otherwise a writer of the database could choose what candidates are compared with."""
    GoldenArchive(url, None).save(OWNER, goldens(2), 1000)
    assert any(b"secret" in sample for sample in stored(url))
    assert len(GoldenArchive(url, None).load(OWNER)) == 2
    assert GoldenArchive(url, KEYS).load(OWNER) == []


def test_a_changed_plain_sample_is_passed_over(url: str):
    """Its digest tells it."""
    archive = GoldenArchive(url, None)
    archive.save(OWNER, goldens(1), 1000)
    (sample,) = stored(url)
    with create_engine(url, poolclass=NullPool).begin() as connection:
        changed = sample.replace(b"secret 0", b"secret 9")
        assert changed != sample
        connection.execute(text("UPDATE penstock_goldens SET sample = :it"), {"it": changed})
    assert archive.load(OWNER) == []
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.execute(text("UPDATE penstock_goldens SET sample = :it"), {"it": b"\x00junk"})
    assert archive.load(OWNER) == []


def test_rows_of_a_version_are_bounded_and_the_newest_stay(url: str):
    """However many workers save: the oldest go first. Another version keeps its own."""
    archive = GoldenArchive(url, None)
    archive.save(OWNER._replace(version="2"), goldens(1), 1)
    for moment in range(3):
        archive.save(OWNER, goldens(60, first=moment * 60), moment)
    loaded = archive.load(OWNER)
    assert len(loaded) == MOST_GOLDENS
    numbers = [int(golden.job_id.partition(".")[2], 16) for golden in loaded]
    assert sum(number >= 60 for number in numbers) == 120
    assert len(archive.load(OWNER._replace(version="2"))) == 1


def test_new_content_under_a_label_ends_the_samples_of_the_old_one(url: str):
    """The old answers are no measure of the new files."""
    archive = GoldenArchive(url, None)
    archive.save(OWNER, goldens(2), 1)
    archive.save(OWNER._replace(content_hash="cd" * 32), goldens(1), 2)
    assert archive.load(OWNER) == []
    assert len(stored(url)) == 1


def test_a_database_that_cannot_be_used_says_so(tmp_path: Path):
    """The caller goes on without stored samples."""
    (tmp_path / "registry.db").write_text("no database at all, only text")
    with pytest.raises(RegistryUnavailable):
        GoldenArchive(f"sqlite:///{tmp_path}/registry.db", None).load(OWNER)


@pytest.mark.parametrize(
    ("mode", "is_stored"), [("ephemeral", False), ("hashes_only", False), ("persisted_encrypted", True)]
)
def test_the_privacy_mode_decides_whether_samples_are_stored(tmp_path: Path, mode: str, is_stored: bool):
    """Only persisted_encrypted lets inputs outlive the process, and it seals them: a missing key is an error."""
    settings = Settings.load(environ={}, cwd=tmp_path, overrides={"privacy.mode": mode, "home": str(tmp_path)})
    assert (GoldenArchive.of(settings, KEYS) is not None) is is_stored
    if is_stored:
        with pytest.raises(ConfigurationError, match="have no data key"):
            GoldenArchive.of(settings, None)
