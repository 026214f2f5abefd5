"""Verification of the audit log: each kind of damage to real files is found, and its first bad entry is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.audit_heads import AuditHead
from penstock.safety.audit_chain import ChainKey
from penstock.safety.audit_reader import AuditDamage, entries, verify
from tests.safety.audits import KEY, MemoryHeads, files_of, write_log

COUNT = 10


@pytest.fixture
def heads() -> MemoryHeads:
    return MemoryHeads()


def damage(folder: Path, heads: MemoryHeads) -> AuditDamage:
    """The only damage in a folder."""
    verified = verify([folder], [KEY], [heads.all()])
    (found,) = verified.damage
    assert verified.ends == {}
    return found


def lines_of(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True)


def test_a_sound_log_has_no_damage(tmp_path: Path, heads: MemoryHeads):
    """Its ends are returned, and each one is the stored head."""
    write_log(tmp_path, COUNT, heads=heads)
    write_log(tmp_path, COUNT, heads=heads, max_file_bytes=500)
    verified = verify([tmp_path], [KEY], [heads.all()])
    assert (verified.chains, verified.entries, verified.damage, verified.unanchored) == (2, 2 * COUNT, (), ())
    assert verified.ends == heads.all()


def test_an_edited_byte_is_found(tmp_path: Path, heads: MemoryHeads):
    """Any byte of an entry: of its content, its sequence or its MAC (CF-026)."""
    (file,) = write_log(tmp_path, COUNT, heads=heads)
    lines = lines_of(file)
    for place, byte in enumerate(lines[4][:-1]):
        changed = bytearray(lines[4])
        changed[place] = byte ^ 1
        file.write_bytes(b"".join([*lines[:4], changed, *lines[5:]]))
        found = damage(tmp_path, heads)
        assert (found.file, found.line, found.sequence) == (file.name, 5, 5), place
    file.write_bytes(b"".join([*lines[:4], lines[4].replace(b"PASS", b"FAIL"), *lines[5:]]))
    assert "changed" in damage(tmp_path, heads).problem


def test_a_deleted_entry_is_found(tmp_path: Path, heads: MemoryHeads):
    """The line after the gap is named, with the entry that was expected."""
    (file,) = write_log(tmp_path, COUNT, heads=heads)
    lines = lines_of(file)
    file.write_bytes(b"".join(lines[:3] + lines[5:]))
    assert damage(tmp_path, heads) == (file.name, 4, 4, "entries 4 to 5 are missing")


def test_an_inserted_entry_is_found(tmp_path: Path, heads: MemoryHeads):
    """A copy of an earlier line, and a forged line with the sequence number that was due."""
    (file,) = write_log(tmp_path, COUNT, heads=heads)
    lines = lines_of(file)
    file.write_bytes(b"".join([*lines[:6], lines[1], *lines[6:]]))
    assert damage(tmp_path, heads) == (file.name, 7, 7, "entry 2 is here again: it was inserted")
    forged = lines[5].replace(b'"sequence":6', b'"sequence":7')
    file.write_bytes(b"".join([*lines[:6], forged, *lines[6:]]))
    found = damage(tmp_path, heads)
    assert (found.line, found.sequence) == (7, 7)
    assert "two lines have this sequence number" in found.problem


def test_swapped_entries_are_found(tmp_path: Path, heads: MemoryHeads):
    """Two lines, and two files of one chain."""
    (file,) = write_log(tmp_path / "lines", COUNT, heads=heads)
    lines = lines_of(file)
    lines[3], lines[6] = lines[6], lines[3]
    file.write_bytes(b"".join(lines))
    assert damage(tmp_path / "lines", heads) == (file.name, 4, 4, "entry 7 stands here: entries were swapped")
    heads.heads.clear()
    first, second, *_ = write_log(tmp_path / "files", COUNT, heads=heads, max_file_bytes=500)
    texts = first.read_bytes(), second.read_bytes()
    second.write_bytes(texts[0])
    first.write_bytes(texts[1])
    found = damage(tmp_path / "files", heads)
    assert (found.file, found.line, found.sequence) == (first.name, 1, 1)
    assert "swapped" in found.problem


@pytest.mark.parametrize("left", [b"", b'{"sequence":8,"ti'], ids=["whole lines", "half a line"])
def test_a_truncated_file_is_found(tmp_path: Path, heads: MemoryHeads, left: bytes):
    """The end is a sound chain, and only the stored head tells that entries are missing."""
    (file,) = write_log(tmp_path, COUNT, heads=heads)
    file.write_bytes(b"".join(lines_of(file)[:7]) + left)
    found = damage(tmp_path, heads)
    assert (found.file, found.line, found.sequence) == (file.name, 8, 8)
    assert found.problem.startswith("entries 8 to 10 are missing at the end: the file was truncated")
    unanchored = verify([tmp_path], [KEY])
    assert (unanchored.damage, len(unanchored.unanchored)) == ((), 1)


def test_a_file_that_was_rolled_back_is_found(tmp_path: Path, heads: MemoryHeads):
    """An older copy of the whole folder is sound by itself, and behind the stored head."""
    files = write_log(tmp_path, COUNT, heads=heads, max_file_bytes=500)
    for file in files[2:]:
        file.unlink()
    found = damage(tmp_path, heads)
    assert (found.file, found.sequence) == (files[1].name, len(lines_of(files[0])) + len(lines_of(files[1])) + 1)
    assert "replaced by an older copy" in found.problem


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_deleted_file_is_found(tmp_path: Path, heads: MemoryHeads, which: int):
    """The first one, one in the middle, or all of a writer."""
    files = write_log(tmp_path, COUNT, heads=heads, max_file_bytes=500)
    for file in [files[which]] if which >= 0 else files:
        file.unlink()
    found = damage(tmp_path, heads)
    assert (found.file, found.line, found.problem) == (files[max(0, which)].name, 0, "the file is missing")


def test_a_chain_that_was_written_again_with_its_key_is_found(tmp_path: Path, heads: MemoryHeads):
    """A thief of the key makes a sound chain; up to the stored head it must be the old one."""
    (file,) = write_log(tmp_path, COUNT, heads=heads)
    writer, key = file.name.split(".")[0], ChainKey(KEY)
    mac, forged = key.first(writer), []
    for line in lines_of(file):
        body = line[: line.index(b',"mac"')].replace(b"PASS", b"FAIL")
        mac = key.next(mac, body)
        forged.append(b'%b,"mac":"%b"}\n' % (body, mac.hex().encode()))
    file.write_bytes(b"".join(forged))
    assert verify([tmp_path], [KEY]).damage == ()
    assert "written again" in damage(tmp_path, heads).problem


def test_files_of_two_writers_cannot_be_exchanged(tmp_path: Path, heads: MemoryHeads):
    """A chain begins with its writer's name."""
    (one,), (other,) = write_log(tmp_path, 3, heads=heads), write_log(tmp_path, 3, heads=heads)
    texts = one.read_bytes(), other.read_bytes()
    one.write_bytes(texts[1])
    other.write_bytes(texts[0])
    assert [found.sequence for found in verify([tmp_path], [KEY], [heads.all()]).damage] == [1, 1]


def test_a_torn_last_line_is_no_damage(tmp_path: Path, heads: MemoryHeads):
    """A process that was killed while it wrote had not acknowledged that entry; a torn line elsewhere is damage."""
    (file,) = write_log(tmp_path, COUNT, heads=heads)
    with file.open("ab") as end:
        end.write(lines_of(file)[0][:40])
    verified = verify([tmp_path], [KEY], [heads.all()])
    assert (verified.entries, verified.damage) == (COUNT, ())
    assert len(entries([tmp_path], 100).entries) == COUNT
    first, *_ = write_log(tmp_path / "several", COUNT, heads=heads, max_file_bytes=500)
    first.write_bytes(first.read_bytes()[:-1])
    (found,) = verify([tmp_path / "several"], [KEY]).damage
    assert (found.file, found.problem) == (first.name, "the line is no entry")


def test_a_chain_of_another_key_is_not_accepted(tmp_path: Path):
    """After a change of the key, the old one is needed for the chains that it wrote."""
    write_log(tmp_path, 3)
    write_log(tmp_path, 3, key=b"n" * 32)
    assert verify([tmp_path], [b"n" * 32, KEY]).damage == ()
    (found,) = verify([tmp_path], [b"n" * 32]).damage
    assert (found.line, found.problem) == (1, "the entry was changed, or written with a key that is not here")


def test_files_of_another_program_are_named(tmp_path: Path):
    """They are no part of a chain: neither damage nor silently passed over."""
    write_log(tmp_path, 1)
    (tmp_path / "levels.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").touch()
    verified = verify([tmp_path], [KEY])
    assert (verified.damage, verified.foreign, verified.chains) == ((), ("levels.jsonl",), 1)


def test_an_archive_is_verified_beside_its_folder(tmp_path: Path, heads: MemoryHeads):
    """Files that were moved are found in the other folder; a file in both is named."""
    files = write_log(tmp_path / "audit", COUNT, heads=heads, max_file_bytes=500)
    archive = tmp_path / "archive"
    archive.mkdir()
    moved = files[0].rename(archive / files[0].name)
    folders = [tmp_path / "audit", archive]
    assert verify(folders, [KEY], [heads.all()]).damage == ()
    assert verify(folders[:1], [KEY], [heads.all()]).damage[0].problem == "the file is missing"
    files[0].write_bytes(moved.read_bytes())
    assert verify(folders, [KEY]).damage[0].problem == "file 0 is here twice"


def test_a_stored_head_that_cannot_be_read_is_damage(tmp_path: Path, heads: MemoryHeads):
    """Another program has written over it."""
    (file,) = write_log(tmp_path, COUNT, heads=heads)
    heads.heads[file.name.split(".")[0]] = AuditHead(0, "?")
    assert damage(tmp_path, heads).problem == "the stored head of this chain cannot be read"


def test_unreadable_lines_are_counted(tmp_path: Path):
    """Reading goes on behind them, and the caller learns how many there are."""
    (file,) = write_log(tmp_path, 4)
    lines = lines_of(file)
    file.write_bytes(lines[0] + b"\xff\xfe\n" + lines[1] + b"{}\n" + b"".join(lines[2:]))
    found = entries([tmp_path], 3)
    assert ([entry.sequence for entry in found.entries], found.unreadable) == ([2, 3, 4], 2)
    assert files_of(tmp_path / "missing") == []
