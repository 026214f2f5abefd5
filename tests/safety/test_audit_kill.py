"""kill -9 at any moment: every acknowledged entry is on disk, and the chain has no damage (CF-026)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.safety.audit_reader import entries, verify
from tests.safety.audits import KEY
from tests.servers import ROOT

WRITER = """
import os, sys, threading
from pathlib import Path
from penstock.safety.audit import AuditConfig, AuditLogger

config = AuditConfig(Path(sys.argv[1]), b"k" * 32, group_s=float(sys.argv[2]), max_file_bytes=4000)
log = AuditLogger(config=config)

def write():
    while True:
        entry = log.log_event("gate_decision", "mlp", "compiled", "PASS", {"text": "x" * 200})
        os.write(1, b"%s %d\\n" % (entry.writer.encode(), entry.sequence))

for _ in range(int(sys.argv[3]) - 1):
    threading.Thread(target=write, daemon=True).start()
write()
"""


def killed_writer(folder: Path, acknowledged: int, *, group_s: float, threads: int) -> set[tuple[str, int]]:
    """The entries that a process acknowledged until it was killed, soon after that many."""
    command = [sys.executable, "-c", WRITER, str(folder), str(group_s), str(threads)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(acknowledged)]
        process.kill()
        told += process.stdout.readlines()
    return {(writer, int(sequence)) for writer, sequence in (line.decode().split() for line in told)}


def check_rounds(folder: Path, rounds: int) -> None:
    """Kills that many writers, synced and grouped in turns, and compares the disk with what they acknowledged."""
    choose, told = random.Random(rounds), set()
    for number in range(rounds):
        is_grouped = bool(number % 2)
        told |= killed_writer(
            folder, choose.randrange(1, 120), group_s=0.001 * is_grouped, threads=8 if is_grouped else 1
        )
    found = {(entry.writer, entry.sequence) for entry in entries([folder], 1 << 30).entries}
    assert len(told) > rounds
    assert told - found == set()
    verified = verify([folder], [KEY])
    assert (verified.chains, verified.damage) == (rounds, ())


def test_acknowledged_entries_survive_kill_9(tmp_path: Path):
    """Four processes, killed in the middle of their work."""
    check_rounds(tmp_path, 4)


@pytest.mark.slow
def test_acknowledged_entries_survive_a_hundred_kills(tmp_path: Path):
    """100 processes, each killed at random: no acknowledged entry is missing."""
    check_rounds(tmp_path, 100)
