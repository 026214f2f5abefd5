"""Decisions of the optimizer in the audit log: the gate's verdict on a step, and the state of every step (CF-040)."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.orchestrator import replayed
from penstock.workers.levels.decision_audit import audit_decision
from penstock.workers.levels.decision_log import DecisionKey, DecisionLog
from penstock.workers.levels.progression import Decision, replay
from tests.safety.audits import KEY

WHAT = DecisionKey("mlp", "1", "ab" * 32, "cpu")


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (
            Decision("batching", "enabled", "16 golden rows", evidence={"y.min_cosine": 1.0}),
            [("gate_decision", "PASS"), ("optimization_state", "enabled")],
        ),
        (
            Decision("prepacked", "enabled", "20 forwards", gain=1.4, evidence={"y.max_abs": 0.0}),
            [("gate_decision", "PASS"), ("optimization_state", "enabled")],
        ),
        (
            Decision("compiled", "refused", "20 forwards", "y: cosine 0.4"),
            [("gate_decision", "FAIL"), ("optimization_state", "refused")],
        ),
        (
            Decision("compiled", "disabled", "it failed at serving", "RuntimeError"),
            [("optimization_state", "disabled")],
        ),
    ],
)
def test_decisions_are_recorded(tmp_path: Path, decision: Decision, expected: list[tuple[str, str]]):
    """Model, step and result are fields of their own; the first entry has criterion, reason, gain and evidence."""
    log = AuditLogger(config=AuditConfig(tmp_path / "audit", KEY))
    audit_decision(log, DecisionLog(tmp_path).append(WHAT, decision))
    entries = log.get_entries_since(0)
    assert [(entry.operation, entry.result) for entry in entries] == expected
    assert {(entry.model_id, entry.optimization_name) for entry in entries} == {("mlp", decision.step)}
    first = entries[0].details
    assert (first["criterion"], first["reason"], first["gain"], first["evidence"]) == (
        decision.criterion,
        decision.reason,
        decision.gain,
        decision.evidence,
    )
    assert {entry.details["content_hash"] for entry in entries} == {"ab" * 32}


def test_the_audit_log_alone_gives_the_state_of_every_step(tmp_path: Path):
    """AR-029: what one process decided, replayed from the files of its log, is where it stands."""
    log, decisions = AuditLogger(config=AuditConfig(tmp_path / "audit", KEY)), DecisionLog(tmp_path)
    made = [
        Decision("batching", "enabled"),
        Decision("compiled", "enabled", gain=1.5),
        Decision("int8", "refused", reason="y: min_cosine 0.98"),
        Decision("bf16", "enabled", gain=2.0, replaces="compiled"),
        Decision("bf16", "disabled", reason="NaN"),
        Decision("onnx", "enabled", gain=1.2),
    ]
    for decision in made:
        audit_decision(log, decisions.append(WHAT, decision))
    log.close()
    states = replayed(log.get_entries_since(0))
    assert {key.run for key in states} == {decisions.run}
    assert {key.optimization for key, state in states.items() if state.is_on} == replay(made).enabled
    assert {key.optimization: state.action for key, state in states.items()} == {
        "batching": "enabled",
        "compiled": "disabled",
        "int8": "refused",
        "bf16": "disabled",
        "onnx": "enabled",
    }
