"""Decisions of the gate on what makes an engine faster -> an audit record, a metric, a line of the log.

    AccelerationGate of an engine -> SafetyOrchestrator -> EngineDecisions --> audit_decision
                                                                           '--> metrics of verdicts and transitions

They are no steps of a level: the engine asks when it is loaded, before it has a request.
"""

from __future__ import annotations

from penstock.safety.orchestrator import GateDecision
from penstock.workers.generation.acceleration_gate import POLICY, log_decision
from penstock.workers.levels.decision_recorder import Audit
from penstock.workers.observe.metrics import InferenceMetrics

__all__ = ["EngineDecisions"]


class EngineDecisions:
    """The recorder of a worker's gate. For any thread.

    audit: gets each decision as plain data. run: the mark of this process in its records.
    """

    def __init__(self, audit: Audit, metrics: InferenceMetrics, run: str) -> None:
        self._audit = audit
        self._metrics = metrics
        self._run = run
        self._on: dict[tuple[str, str], set[str]] = {}
        """What is on in each engine, by (model, version)."""

    def __call__(self, gate: GateDecision) -> None:
        """Records a decision. Raises what the audit raises: then it must not take effect."""
        subject = gate.subject
        self._audit(
            {
                "run": self._run,
                "model": subject.model,
                "version": subject.version,
                "content_hash": subject.content_hash,
                "step": gate.optimization,
                "action": gate.action,
                "level": gate.level,
                "criterion": gate.criterion,
                "reason": gate.reason,
                "gain": gate.gain,
                "evidence": dict(gate.evidence),
            }
        )
        self._count(gate)
        self._note_form(gate)
        log_decision(gate)

    def _note_form(self, gate: GateDecision) -> None:
        """Each gain is of one part of a step: nobody has measured the engine without all that is on."""
        key = gate.subject.model, gate.subject.version
        found = self._on.setdefault(key, set())
        if gate.accepted:
            found.add(gate.optimization)
        else:
            found.discard(gate.optimization)
        self._metrics.form(*key, "+".join(sorted(found)), None if found else 1.0)

    def _count(self, gate: GateDecision) -> None:
        model, version = gate.subject.model, gate.subject.version
        if gate.action != "disabled":
            self._metrics.gate(model, version, "", "accepted" if gate.accepted else "refused")
        # What an option keeps off was never on.
        if gate.accepted or (gate.action == "disabled" and gate.criterion != POLICY):
            self._metrics.transition(model, version, gate.optimization, "on" if gate.accepted else "off")
