"""The files of a batch that runs: what a restart finds done."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.producers.gateway.batches.block_file import FileBusy, read_blocks
from penstock.producers.gateway.batches.file_store import FileStore
from penstock.producers.gateway.batches.journal import EndedLine, Journal
from penstock.producers.gateway.batches.records import Batch, Counts, StoredBatch
from penstock.registry.errors import PenstockError

BATCH = Batch(id="batch_b", endpoint="/e", input_file_id="file-i", completion_window="1h", created_at=1, expires_at=2)
STORED = StoredBatch("a", "file-o", "file-e", BATCH)
ANSWER = EndedLine(3, "three", 200, "job", b'{"y":1}')
REFUSED = EndedLine(1, "one", 422, "", b'{"error":{}}')
UNRUN = EndedLine(2, None, 0, "", None, "batch_cancelled", "why")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """With a folder."""
    found = FileStore(tmp_path / "files", None, max_bytes=1000, keep_s=60, clock=time.time)
    found.upload().discard()
    return found


def test_a_restart_finds_what_is_done(store: FileStore, tmp_path: Path):
    """Also behind a line that was cut; then both files have each line once, in the form of the API."""
    with Journal(store, STORED) as journal:
        journal.write([ANSWER, REFUSED])
    with (tmp_path / "files" / "file-e").open("ab") as file:
        file.write(b"\x99\x00\x00\x00{")
    with Journal(store, STORED) as journal:
        assert journal.done == {1, 3}
        journal.write([UNRUN])
        assert journal.done == {1, 2, 3}
        assert journal.counts(3) == Counts(3, 1, 2)
        sizes = journal.sizes
    contents = [
        b"".join(read_blocks(tmp_path / "files" / name, size, None))
        for name, size in zip(("file-o", "file-e"), sizes, strict=True)
    ]
    output, errors = ([json.loads(text) for text in content.splitlines()] for content in contents)
    answer = {"status_code": 200, "request_id": "job", "body": {"y": 1}}
    assert output == [{"id": "batch_req_b_3", "custom_id": "three", "response": answer, "error": None}]
    assert [line["custom_id"] for line in errors] == ["one", None]
    assert errors[0]["response"]["status_code"] == 422
    assert errors[1]["error"] == {"code": "batch_cancelled", "message": "why"}


def test_one_process_has_a_batch(store: FileStore):
    """The second one is refused, and may have it afterwards."""
    with Journal(store, STORED), pytest.raises(FileBusy):
        Journal(store, STORED)
    with Journal(store, STORED):
        pass


def test_lines_of_another_batch_are_refused(store: FileStore):
    """A file that was exchanged stops the run; the lock is free again."""
    with Journal(store, STORED) as journal:
        journal.write([ANSWER])
    other = StoredBatch("a", "file-o", "file-x", replace(BATCH, id="batch_c"))
    for _ in range(2):
        with pytest.raises(PenstockError, match="changed on the disk"):
            Journal(store, other)
