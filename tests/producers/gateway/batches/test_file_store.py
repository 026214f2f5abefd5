"""The store: what expires, what a killed upload leaves, and records without their key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.producers.gateway.batches.file_store import FileStore, NotFound, StoreFull, new_id
from penstock.producers.gateway.batches.records import Batch, File, StoredBatch
from penstock.registry.errors import ConfigurationError
from penstock.safety.sealing import DataKeys


class Clock:
    """A clock that stands still unless it is told."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The store's."""
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> FileStore:
    """Of 100 bytes, kept for 60 s."""
    return FileStore(tmp_path / "files", None, max_bytes=100, keep_s=60, clock=clock)


def kept(store: FileStore, content: bytes = b"{}", tenant: str = "a", keep_s: float | None = None) -> File:
    """A file with this content."""
    upload = store.upload()
    upload.append(content)
    return store.keep(upload, tenant, "name", "batch", keep_s)


def stored_batch(file: File, tenant: str = "a") -> StoredBatch:
    """A batch that reads a file."""
    batch = Batch(
        id=new_id("batch_"), endpoint="/e", input_file_id=file.id, completion_window="1h", created_at=1, expires_at=2
    )
    return StoredBatch(tenant, new_id("file-"), new_id("file-"), batch)


def test_files_expire(store: FileStore, clock: Clock, tmp_path: Path):
    """With the store's lifetime, or a shorter one; a file that an open batch reads stays until that has ended."""
    long, short, used = kept(store), kept(store, keep_s=10), kept(store, keep_s=10)
    batch = stored_batch(used)
    store.add_batch(batch)
    clock.now += 10
    assert store.delete_expired() == 1
    with pytest.raises(NotFound):
        store.file("a", short.id)
    assert not (tmp_path / "files" / short.id).exists()
    assert store.file("a", long.id) == long
    store.end_batch("a", batch.batch.id, lambda each: each, 0, 0)
    store.change_batch("a", batch.batch.id, _completed)
    clock.now += 50
    assert store.delete_expired() == 2
    assert {path.name for path in (tmp_path / "files").glob("file-*")} == set()


def _completed(stored: StoredBatch) -> StoredBatch:
    return replace(stored, batch=replace(stored.batch, status="completed"))


def test_killed_uploads_are_removed_after_a_day(store: FileStore, clock: Clock, tmp_path: Path):
    """Not the files of the index, and not those that an open batch writes."""
    file = kept(store)
    batch = stored_batch(file)
    store.add_batch(batch)
    abandoned = store.upload()
    abandoned.append(b"x")
    abandoned.finish()
    writer = store.journal(batch.output)
    writer.close()
    for name in (file.id, abandoned.id, batch.output):
        os.utime(tmp_path / "files" / name, (clock.now, clock.now))
    clock.now += 59
    store.delete_expired()
    assert (tmp_path / "files" / abandoned.id).exists()
    os.utime(tmp_path / "files" / abandoned.id, (clock.now - 86_401,) * 2)
    store.delete_expired()
    assert {path.name for path in (tmp_path / "files").glob("file-*")} == {file.id, batch.output}


class _EndedMeanwhile(FileStore):
    """Another process ends the batch just before the open batches are read, or just after that."""

    ending: StoredBatch | None = None
    ends_after = False

    def open_batches(self) -> list[StoredBatch]:
        """As before."""
        ending, self.ending = self.ending, None
        if self.ends_after:
            found = super().open_batches()
        if ending is not None:
            self.end_batch(ending.tenant, ending.batch.id, _completed, 4, 0)
        return found if self.ends_after else super().open_batches()


@pytest.mark.parametrize("ends_after", [False, True])
def test_a_batch_that_ends_beside_the_removal_keeps_its_file(tmp_path: Path, clock: Clock, ends_after: bool):
    """Also a file that was last written more than a day before, as that of an early error is."""
    store = _EndedMeanwhile(tmp_path / "files", None, max_bytes=100, keep_s=60, clock=clock)
    batch = stored_batch(kept(store))
    store.add_batch(batch)
    writer = store.journal(batch.output)
    writer.append(b"[1]\n")
    writer.close()
    os.utime(tmp_path / "files" / batch.output, (clock.now - 86_401,) * 2)
    store.ending, store.ends_after = batch, ends_after
    store.delete_expired()
    assert store.batch("a", batch.batch.id).batch.output_file_id == batch.output
    assert b"".join(store.content(store.file("a", batch.output))) == b"[1]\n"


def test_a_full_store_takes_no_upload(store: FileStore):
    """Until something is deleted."""
    file = kept(store, b"x" * 100)
    with pytest.raises(StoreFull):
        store.upload()
    assert store.delete("a", file.id)
    kept(store)


def test_ended_batch_lists_the_files_that_are_not_empty(store: FileStore, tmp_path: Path):
    """The other one is gone from the disk, too."""
    batch = stored_batch(kept(store))
    store.add_batch(batch)
    for file_id in (batch.output, batch.errors):
        store.journal(file_id).close()
    ended = store.end_batch("a", batch.batch.id, _completed, 5, 0)
    assert (ended.batch.output_file_id, ended.batch.error_file_id) == (batch.output, None)
    assert store.file("a", batch.output).bytes == 5
    assert not (tmp_path / "files" / batch.errors).exists()
    assert store.open_batches() == []


def test_a_change_that_raises_changes_nothing(store: FileStore):
    """The row is as before, and the store goes on."""
    batch = stored_batch(kept(store))
    store.add_batch(batch)

    def fail(_: StoredBatch) -> StoredBatch:
        raise NotFound("no")

    with pytest.raises(NotFound):
        store.change_batch("a", batch.batch.id, fail)
    assert store.batch("a", batch.batch.id) == batch


def test_a_batch_needs_a_file_of_its_tenant(store: FileStore):
    """Another tenant's does not exist."""
    with pytest.raises(NotFound):
        store.add_batch(stored_batch(kept(store), tenant="b"))
    assert store.open_batches() == []


def test_records_need_their_key(tmp_path: Path, clock: Clock):
    """With another key, or none, nothing is shown; the error says what to look at."""
    folder = tmp_path / "files"
    stores = [
        FileStore(folder, keys, max_bytes=100, keep_s=60, clock=clock)
        for keys in (DataKeys([b"a" * 32]), DataKeys([b"b" * 32]), None)
    ]
    file = kept(stores[0])
    assert stores[0].file("a", file.id) == file
    for other in stores[1:]:
        with pytest.raises(ConfigurationError, match="data keys"):
            other.file("a", file.id)


def test_an_unwritable_folder_is_one_line(tmp_path: Path, clock: Clock):
    """A file stands where the folder should be."""
    (tmp_path / "files").write_text("")
    store = FileStore(tmp_path / "files", None, max_bytes=100, keep_s=60, clock=clock)
    with pytest.raises(ConfigurationError, match="Expected a folder"):
        store.upload()
