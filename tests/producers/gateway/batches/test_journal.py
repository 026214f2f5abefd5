"""The files of a batch that runs: what a restart finds done."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.producers.gateway.batches.block_file import BLOCK_BYTES, MOST_PLAIN_BYTES, FileBusy, read_blocks
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


def test_lines_that_end_together_are_short_blocks(store: FileStore, tmp_path: Path):
    """A block has whole lines, and more than one only where they are short: readers hold one block at a time."""
    long = b'"' + b"x" * BLOCK_BYTES + b'"'
    bodies = [b'"' + b"x" * 10_000 + b'"'] * 60 + [long, long, b"1"]
    for status, name in ((200, "file-o"), (422, "file-e")):
        with Journal(store, STORED) as journal:
            before = len(journal.done)
            journal.write([EndedLine(before + place, "c", status, "job", body) for place, body in enumerate(bodies)])
            size = journal.sizes[status != 200]
        blocks = list(read_blocks(tmp_path / "files" / name, size, None))
        assert all(block.endswith(b"\n") for block in blocks)
        assert sum(block.count(b"\n") for block in blocks) == len(bodies)
        assert [block.count(b"\n") for block in blocks if len(block) > BLOCK_BYTES] == [1, 1]
        with Journal(store, STORED) as journal:
            assert len(journal.done) == before + len(bodies)


def test_an_answer_that_is_too_long_for_a_block_is_an_error(store: FileStore, tmp_path: Path):
    """The line is done, and the error file says why its answer is not there; the other lines keep theirs."""
    with Journal(store, STORED) as journal:
        journal.write([ANSWER._replace(number=4, custom_id="four", body=bytes(MOST_PLAIN_BYTES)), ANSWER])
        assert journal.counts(2) == Counts(2, 1, 1)
        size = journal.sizes[1]
    (line,) = b"".join(read_blocks(tmp_path / "files" / "file-e", size, None)).splitlines()
    found = json.loads(line)
    assert (found["custom_id"], found["response"], found["error"]["code"]) == ("four", None, "answer_too_long")
    with Journal(store, STORED) as journal:
        assert journal.done == {3, 4}


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
