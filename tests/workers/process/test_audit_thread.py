"""The audit thread of a worker: it stores ends at every turn, records look-ups once a minute, and both at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.audit_accesses import CacheAccessAudit
from penstock.workers.process.audit_thread import AuditThread
from tests.safety.audits import KEY, MemoryHeads


class Harness:
    """A thread that is not started, with its log and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.heads = MemoryHeads()
        self.log = AuditLogger(config=AuditConfig(folder, KEY), heads=[self.heads])
        self.accesses = CacheAccessAudit(self.log, "counted")
        self.thread = AuditThread(self.log, self.accesses, lambda: self.now)

    def look_up(self) -> None:
        self.accesses.count("mlp", "1", "default", "l1", is_hit=True, count=1)

    @property
    def recorded(self) -> int:
        return len(self.log.get_entries_since(0))

    @property
    def stored(self) -> int:
        return sum(head.sequence for head in self.heads.heads.values())


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_ends_are_stored_at_every_turn(harness: Harness):
    """An entry of another thread is anchored by the next turn."""
    harness.log.log_event("gate_decision")
    assert harness.stored == 0
    harness.thread.tick()
    assert harness.stored == 1


def test_look_ups_are_recorded_once_a_minute(harness: Harness):
    """And stored by the same turn."""
    harness.look_up()
    harness.now = 59.9
    harness.thread.tick()
    assert harness.recorded == 0
    harness.now = 60.0
    harness.thread.tick()
    assert (harness.recorded, harness.stored) == (1, 1)
    harness.look_up()
    harness.now = 119.9
    harness.thread.tick()
    assert harness.recorded == 1


def test_the_end_of_a_worker_records_what_is_left(harness: Harness):
    """`stop` returns after the last look-ups are recorded and stored; without `start` it does nothing."""
    harness.look_up()
    harness.thread.start()
    harness.thread.stop()
    assert (harness.recorded, harness.stored) == (1, 1)
    unstarted = AuditThread(harness.log, harness.accesses)
    harness.look_up()
    unstarted.stop()
    assert harness.recorded == 1
