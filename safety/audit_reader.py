"""The audit log as it lies on disk -> its entries by time, or the damage that was done to it.

files of all writers --> entries            merged by time; lines that are no entries are counted
         '-- keys, stored heads --> verify  the first bad entry of each chain: file, line, sequence, problem
"""

from __future__ import annotations

import heapq
import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from penstock.registry.audit_heads import AuditHead
from penstock.safety.audit_chain import (
    AuditEntry,
    ChainFile,
    ChainKey,
    ReadLine,
    chain_files,
    foreign_files,
    read_lines,
)

__all__ = ["AuditDamage", "AuditVerification", "Found", "entries", "verify"]


class Found(NamedTuple):
    """Entries by time, oldest first, and how many lines could not be read."""

    entries: list[AuditEntry]
    unreadable: int


class AuditDamage(NamedTuple):
    """The first bad entry of a chain. line: from 1 on; 0 for a whole file. sequence: the expected one."""

    file: str
    line: int
    sequence: int
    problem: str


@dataclass(frozen=True, slots=True)
class AuditVerification:
    """What a verification found.

    Attributes:
        damage: the first bad entry of each damaged chain.
        ends: the last entry of each sound chain.
        unanchored: sound chains without a stored head: entries cut from their ends would not be found.
        foreign: names of files that are no part of a chain.
    """

    chains: int
    entries: int
    damage: tuple[AuditDamage, ...]
    ends: Mapping[str, AuditHead] = field(repr=False)
    unanchored: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def entries(folders: Sequence[Path], most: int, since: float | None = None) -> Found:
    """The newest entries of all writers, at most so many. since: unix seconds; only later ones. Raises OSError.

    The MACs are not checked: `verify` does that.
    """
    unreadable = 0

    def read() -> Iterator[AuditEntry]:
        nonlocal unreadable
        for files in chain_files(folders).values():
            for file in files:
                for line in read_lines(file):
                    if line.entry is None:
                        unreadable += not line.is_torn
                    elif since is None or line.entry.time > since:
                        yield line.entry

    newest = heapq.nlargest(most, read(), key=lambda entry: (entry.time, entry.writer, entry.sequence))
    return Found(newest[::-1], unreadable)


def verify(
    folders: Sequence[Path], keys: Sequence[bytes], heads: Sequence[Mapping[str, AuditHead]] = ()
) -> AuditVerification:
    """Checks every chain in these folders with the keys and with the stored heads. Raises OSError.

    heads: by writer, from one or more stores. Read them before this call: a live writer appends meanwhile.
    """
    chain_keys = [ChainKey(key) for key in keys]
    files = chain_files(folders)
    stored = {writer: [each[writer] for each in heads if writer in each] for each in heads for writer in each}
    checks = {writer: _Check(writer, each, chain_keys, stored.get(writer, ())) for writer, each in files.items()}
    damage = {writer: check.damage for writer, check in checks.items() if check.damage is not None}
    for writer in sorted(stored.keys() - files.keys()):
        damage[writer] = AuditDamage(f"{writer}.000000.jsonl", 0, 1, "the file is missing")
    ends = {writer: check.end for writer, check in checks.items() if check.end.sequence and writer not in damage}
    return AuditVerification(
        chains=len(checks),
        entries=sum(check.end.sequence for check in checks.values()),
        damage=tuple(damage.values()),
        ends=ends,
        unanchored=tuple(writer for writer in ends if writer not in stored),
        foreign=tuple(foreign_files(folders)),
    )


_START: Final = AuditHead(0, "")


class _Check:
    """One chain, read from its first entry until the first bad one. heads: those that are stored of it."""

    def __init__(
        self, writer: str, files: Sequence[ChainFile], keys: Sequence[ChainKey], heads: Sequence[AuditHead]
    ) -> None:
        self.end = _START
        self._writer = writer
        self._files = files
        self._keys = keys
        self._key: ChainKey | None = None
        self._heads = heads
        self._macs = dict.fromkeys((head.sequence for head in heads), "")
        """The MACs here of the entries whose MACs are stored, by sequence."""
        self._next = "", 1
        """The file and the line after the last sound entry."""
        self.damage = self._in_files() or self._against_heads()

    def _in_files(self) -> AuditDamage | None:
        for place, file in enumerate(self._files):
            if file.number != place:
                missing, is_twice = f"{self._writer}.{place:06d}.jsonl", file.number < place
                problem = f"file {file.number} is here twice" if is_twice else "the file is missing"
                return AuditDamage(missing, 0, self.end.sequence + 1, problem)
            self._next = file.path.name, 1
            for line in read_lines(file):
                if line.is_torn and place == len(self._files) - 1:
                    # A process was killed while it wrote this line, and so before it acknowledged the entry.
                    break
                if not self._accept(line):
                    expected = self.end.sequence + 1
                    return AuditDamage(file.path.name, line.number, expected, self._problem(line, place, expected))
                self._next = file.path.name, line.number + 1
        return None

    def _against_heads(self) -> AuditDamage | None:
        """Whether the stored heads are entries of the chain."""
        for sequence, mac in self._heads:
            here = *self._next, self.end.sequence + 1
            if sequence < 1:
                return AuditDamage(*here, "the stored head of this chain cannot be read")
            if sequence > self.end.sequence:
                problem = _missing(self.end.sequence + 1, sequence)
                return AuditDamage(*here, f"{problem} at the end: the file was truncated, or replaced by an older copy")
            if self._macs[sequence] != mac:
                problem = f"entry {sequence} differs from the stored head: the chain was written again with its key"
                return AuditDamage(self._next[0], 0, sequence, problem)
        return None

    def _accept(self, line: ReadLine) -> bool:
        if line.entry is None or line.entry.sequence != self.end.sequence + 1:
            return False
        key = self._key or next((each for each in self._keys if self._fits(each, line)), None)
        if key is None or not self._fits(key, line):
            return False
        self._key = key
        self.end = AuditHead(line.entry.sequence, line.mac.hex())
        if self.end.sequence in self._macs:
            self._macs[self.end.sequence] = self.end.mac
        return True

    def _fits(self, key: ChainKey, line: ReadLine) -> bool:
        before = bytes.fromhex(self.end.mac) if self.end.sequence else key.first(self._writer)
        return hmac.compare_digest(key.next(before, line.body), line.mac)

    def _problem(self, bad: ReadLine, place: int, expected: int) -> str:
        """What was done, as far as the sequence numbers tell it."""
        if bad.entry is None:
            return "the line is no entry"
        found = bad.entry.sequence
        later = [line.entry.sequence for line in self._after(bad, place) if line.entry is not None]
        if found < expected:
            return f"entry {found} is here again: it was inserted"
        if found > expected:
            has_moved = expected in later
            return f"entry {found} stands here: entries were swapped" if has_moved else _missing(expected, found - 1)
        if expected in later:
            return "the line was inserted, or the entry changed: two lines have this sequence number"
        if self._key is None:
            return "the entry was changed, or written with a key that is not here"
        return "the entry was changed, or the MAC before it"

    def _after(self, bad: ReadLine, place: int) -> Iterator[ReadLine]:
        for number, file in enumerate(self._files[place:], place):
            for line in read_lines(file):
                if number > place or line.number > bad.number:
                    yield line


def _missing(first: int, last: int) -> str:
    return f"entry {first} is missing" if first == last else f"entries {first} to {last} are missing"
