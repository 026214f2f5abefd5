"""Block files: what a killed writer leaves, one writer at a time, and changes on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.producers.gateway.batches.block_file import (
    MOST_PLAIN_BYTES,
    BlockTooLong,
    BlockWriter,
    FileBusy,
    FileDamaged,
    read_blocks,
)
from penstock.safety.sealing import DataKeys

BLOCKS = [b"first\n", b"second\n" * 1000, b"third\n"]
SEALING = DataKeys([b"k" * 32])


@pytest.fixture(params=[None, SEALING], ids=["plain", "sealed"])
def keys(request: pytest.FixtureRequest) -> DataKeys | None:
    """Without encryption, and with."""
    found: DataKeys | None = request.param
    return found


def written(path: Path, keys: DataKeys | None) -> int:
    """Writes the blocks; returns their plain bytes."""
    writer = BlockWriter(path, keys)
    for block in BLOCKS:
        writer.append(block)
    writer.sync()
    writer.close()
    return writer.nbytes


def test_blocks_come_back(tmp_path: Path, keys: DataKeys | None):
    """In their order, and as many bytes as were written."""
    nbytes = written(tmp_path / "file-a", keys)
    assert nbytes == sum(map(len, BLOCKS))
    assert list(read_blocks(tmp_path / "file-a", nbytes, keys)) == BLOCKS


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_block_that_was_cut_is_written_again(tmp_path: Path, keys: DataKeys | None, cut: int):
    """A writer that was killed in the middle of a block: the whole ones stay, and the next one follows them."""
    path = tmp_path / "file-a"
    nbytes = written(path, keys)
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - min(cut, len(BLOCKS[2])))
    writer = BlockWriter(path, keys)
    assert list(writer.recover()) == BLOCKS[:2]
    writer.append(BLOCKS[2])
    writer.close()
    assert path.stat().st_size == whole
    assert list(read_blocks(path, nbytes, keys)) == BLOCKS


def test_a_long_block_is_not_the_end_of_a_file(tmp_path: Path, keys: DataKeys | None):
    """The answer of one line may have hundreds of MB: a restart keeps it, and readers have it as a whole."""
    path, long = tmp_path / "file-a", b"x" * (65 * 1024 * 1024)
    writer = BlockWriter(path, keys)
    writer.append(long)
    writer.close()
    writer = BlockWriter(path, keys)
    assert [len(block) for block in writer.recover()] == [len(long)]
    writer.append(b"next")
    writer.close()
    assert list(read_blocks(path, writer.nbytes, keys)) == [long, b"next"]


def test_a_block_that_no_reader_takes_is_not_written(tmp_path: Path, keys: DataKeys | None):
    """The file stays as it was, and takes shorter blocks."""
    path = tmp_path / "file-a"
    writer = BlockWriter(path, keys)
    with pytest.raises(BlockTooLong, match=f"Expected at most {MOST_PLAIN_BYTES}"):
        writer.append(bytes(MOST_PLAIN_BYTES + 1))
    assert (writer.nbytes, path.stat().st_size) == (0, 0)
    writer.append(b"short")
    writer.close()
    assert list(read_blocks(path, writer.nbytes, keys)) == [b"short"]


def test_one_writer_at_a_time(tmp_path: Path, keys: DataKeys | None):
    """The second one is refused until the first has closed."""
    first = BlockWriter(tmp_path / "file-a", keys)
    with pytest.raises(FileBusy):
        BlockWriter(tmp_path / "file-a", keys)
    first.close()
    BlockWriter(tmp_path / "file-a", keys).close()


def test_a_file_that_was_cut_is_not_read_as_a_whole(tmp_path: Path, keys: DataKeys | None):
    """Also where it ends with a whole block, and where it is gone."""
    path = tmp_path / "file-a"
    nbytes = written(path, keys)
    content = path.read_bytes()
    first_block = 4 + int.from_bytes(content[:4], "little")
    for size in (0, 3, first_block, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(FileDamaged):
            list(read_blocks(path, nbytes, keys))
    path.unlink()
    with pytest.raises(FileDamaged):
        list(read_blocks(path, nbytes, keys))


def test_sealed_blocks_stay_in_their_places(tmp_path: Path):
    """Blocks that changed places, a file under another name, and a flipped bit are refused; nothing is in plain."""
    keys, path = SEALING, tmp_path / "file-a"
    nbytes = written(path, keys)
    content = path.read_bytes()
    assert b"first" not in content
    first = 4 + int.from_bytes(content[:4], "little")
    second = first + 4 + int.from_bytes(content[first : first + 4], "little")
    flipped = bytes([*content[:40], content[40] ^ 1, *content[41:]])
    exchanged = content[second:] + content[first:second] + content[:first]
    for name, changed in (("file-a", flipped), ("file-a", exchanged), ("file-b", content)):
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(FileDamaged):
            list(read_blocks(tmp_path / name, nbytes, keys))
