"""Decisions on what makes an engine faster in a worker: entries of the audit log, and metrics."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.orchestrator import GateEvidence, SafetyOrchestrator, StateKey, Subject, replayed
from penstock.workers.generation.acceleration_gate import AccelerationGate
from penstock.workers.levels.decision_audit import audit_decision
from penstock.workers.levels.engine_decisions import EngineDecisions
from penstock.workers.observe.cost import CostEstimator, CostLedger
from penstock.workers.observe.metrics import InferenceMetrics
from tests.safety.audits import KEY

WRITER = Subject("writer", "3", "ab" * 32)


def counted(metrics: InferenceMetrics, name: str, label: str) -> dict[str, float]:
    """The values of a counter by one label."""
    families = [family for family in metrics.collect() if family.name == name]
    return {sample.labels[label]: sample.value for family in families for sample in family.samples}


def test_each_decision_is_recorded_and_counted(tmp_path: Path):
    """A verdict and a state with the evidence, or a state alone; from the log the states are known again."""
    metrics = InferenceMetrics((0.1,))
    with AuditLogger(config=AuditConfig(tmp_path, KEY)) as log:
        gate = AccelerationGate(
            SafetyOrchestrator(EngineDecisions(partial(audit_decision, log), metrics, "run-1")), WRITER
        )
        assert gate.accepts("cuda-graphs", GateEvidence(figures={"rows": 2}), "cuda_graphs", True)
        assert not gate.accepts("packed-linears", GateEvidence(gain=0.9, min_gain=1.03), "packed_linears", "auto")
        assert not gate.accepts("joined-linears", GateEvidence(), "joined_linears", "auto")
        gate.stays_off("attention-kernel", "attention", "sdpa")
        gate.switched_off("cuda-graphs", "it copies to the device")
        found = log.get_entries_since(0)
    assert [(one.operation, one.optimization_name, one.result) for one in found] == [
        ("gate_decision", "cuda-graphs", "PASS"),
        ("optimization_state", "cuda-graphs", "enabled"),
        ("gate_decision", "packed-linears", "FAIL"),
        ("optimization_state", "packed-linears", "refused"),
        ("gate_decision", "joined-linears", "FAIL"),
        ("optimization_state", "joined-linears", "refused"),
        ("optimization_state", "attention-kernel", "disabled"),
        ("optimization_state", "cuda-graphs", "disabled"),
    ]
    assert {(one.model_id, one.details["version"], one.details["content_hash"]) for one in found} == {
        ("writer", "3", "ab" * 32)
    }
    assert found[0].details["evidence"] == {"rows": 2}
    assert found[2].details["reason"] == "gain 0.90, expected at least 1.03"
    assert found[4].details["reason"] == "no evidence, expected at least one figure"
    states = replayed(found)
    assert states[StateKey("run-1", "writer", "ab" * 32, "cuda-graphs")].reason == "it copies to the device"
    assert not any(state.is_on for state in states.values())
    assert counted(metrics, "penstock_gate_verdicts", "verdict") == {"accepted": 1, "refused": 2}
    # What an option keeps off was never on.
    assert counted(metrics, "penstock_hysteresis_transitions", "to") == {"on": 1, "off": 1}


def test_nothing_is_on_without_a_record(caplog: pytest.LogCaptureFixture):
    """A full disk: the form stays off, and is not counted."""

    def fail(_: object) -> None:
        raise OSError("no space left")

    metrics = InferenceMetrics((0.1,))
    gate = AccelerationGate(SafetyOrchestrator(EngineDecisions(fail, metrics, "run-1")), WRITER)
    assert not gate.accepts("cuda-graphs", GateEvidence(figures={"rows": 2}), "cuda_graphs", True)
    gate.switched_off("packed-linears", "it failed")
    assert counted(metrics, "penstock_gate_verdicts", "verdict") == {}
    assert [each.message for each in caplog.records] == ["a decision could not be recorded"] * 2


def test_an_engine_with_an_acceleration_has_no_baseline():
    """AR-097: gains are of parts of a step, so the cost without them is not known, until all of them are off."""
    metrics = InferenceMetrics((0.1,), CostLedger(CostEstimator(hourly_rate=3.6)))
    gate = AccelerationGate(SafetyOrchestrator(EngineDecisions(lambda _: None, metrics, "run-1")), WRITER)

    def form() -> tuple[str, float | None]:
        metrics.engine_ran("writer", "3", "infer", 1.0)
        (entry,) = (metrics.costs() or {})["entries"]
        return entry["in_form"]["form"], entry["in_form"]["gain"]

    gate.stays_off("attention-kernel", "attention", "sdpa")
    assert not gate.accepts("packed-linears", GateEvidence(gain=0.9, min_gain=1.03), "packed_linears", "auto")
    assert form() == ("", 1.0)
    for name in ("joined-linears", "cuda-graphs"):
        assert gate.accepts(name, GateEvidence(figures={"rows": 2}), "an_option", "auto")
    assert form() == ("cuda-graphs+joined-linears", None)
    gate.switched_off("cuda-graphs", "it failed")
    assert form() == ("joined-linears", None)
    gate.switched_off("joined-linears", "it failed")
    assert form() == ("", 1.0)
