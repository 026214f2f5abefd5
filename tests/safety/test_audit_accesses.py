"""Cache accesses in the audit log: counted by model and tenant, sampled, or off."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.audit_accesses import CacheAccessAudit
from penstock.safety.audit_chain import AuditEntry
from tests.safety.audits import KEY


@pytest.fixture
def log(tmp_path: Path) -> AuditLogger:
    return AuditLogger(config=AuditConfig(tmp_path, KEY))


def written(log: AuditLogger) -> list[AuditEntry]:
    return log.get_entries_since(0)


def test_look_ups_are_counted_by_model_version_and_tenant(log: AuditLogger):
    """One entry for each, with hits, misses and the begin of the interval; nothing new gives no entry."""
    times = iter([100.0, 160.0, 220.0])
    accesses = CacheAccessAudit(log, "counted", clock=lambda: next(times))
    accesses.count("mlp", "1", "acme", "l1", is_hit=True, count=3)
    accesses.count("mlp", "1", "acme", "l1", is_hit=False, count=2)
    accesses.count("mlp", "1", "acme", "l1", is_hit=True, count=1)
    accesses.count("mlp", "1", "other", "l1", is_hit=False, count=5)
    accesses.flush()
    accesses.flush()
    assert [(entry.operation, entry.model_id, entry.result, entry.details) for entry in written(log)] == [
        (
            "cache_access",
            "mlp",
            "counted",
            {"version": "1", "tenant": tenant, "tier": "l1", "since": 100.0, "hits": hits, "misses": misses},
        )
        for tenant, hits, misses in (("acme", 4, 2), ("other", 0, 5))
    ]


def test_every_hundredth_look_up_is_sampled(log: AuditLogger):
    """Of each kind, over several minutes."""
    accesses = CacheAccessAudit(log, "sampled")
    for hits, misses in ((99, 250), (1, 49), (99, 0)):
        accesses.count("mlp", "1", "acme", "l1", is_hit=True, count=hits)
        accesses.count("mlp", "1", "acme", "l1", is_hit=False, count=misses)
        accesses.flush()
    entries = written(log)
    assert [entry.result for entry in entries].count("hit") == 1
    assert [entry.result for entry in entries].count("miss") == 2
    assert entries[0].details == {"version": "1", "tenant": "acme", "tier": "l1", "sampled": "1 of 100"}


def test_off_writes_nothing(log: AuditLogger):
    """The setting is followed."""
    accesses = CacheAccessAudit(log, "off")
    accesses.count("mlp", "1", "acme", "l1", is_hit=True, count=1000)
    accesses.flush()
    assert written(log) == []


@pytest.mark.parametrize(("how", "entries"), [("counted", 1), ("sampled", 5)])
def test_a_failure_is_counted_and_loses_no_look_up(
    log: AuditLogger, monkeypatch: pytest.MonkeyPatch, how: str, entries: int
):
    """With a full disk look-ups go on; they are recorded when there is room again."""
    failures: list[None] = []
    accesses = CacheAccessAudit(log, how, on_failure=lambda: failures.append(None))  # type: ignore[arg-type]  # of two

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    accesses.count("mlp", "1", "acme", "l1", is_hit=True, count=500)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.safety.audit_chain.os.write", full)
        accesses.flush()
    assert (len(failures), written(log)) == (1, [])
    accesses.flush()
    assert len(written(log)) == entries


def test_tenants_beyond_a_thousand_are_counted_together(log: AuditLogger):
    """A producer that invents tenants cannot fill the disk."""
    accesses = CacheAccessAudit(log, "counted")
    for number in range(1200):
        accesses.count("mlp", "1", f"tenant-{number}", "l1", is_hit=False, count=1)
    accesses.flush()
    found = {entry.details["tenant"]: entry.details["misses"] for entry in written(log)}
    assert (len(found), found["(others)"]) == (1001, 200)
