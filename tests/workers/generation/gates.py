"""Gates of the tests: the one gate, whose decisions a test can read, and which finds a reason against some forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.safety.orchestrator import GateDecision, GateEvidence, SafetyOrchestrator, Subject
from penstock.workers.generation.acceleration_gate import AccelerationGate

__all__ = ["Decisions", "open_gate"]


class Decisions(list[GateDecision]):
    """What was recorded, in order."""

    def of(self, name: str) -> list[GateDecision]:
        """The decisions on one form."""
        return [one for one in self if one.optimization == name]

    @property
    def actions(self) -> list[tuple[str, str]]:
        """(form, action) of each."""
        return [(one.optimization, one.action) for one in self]


class _Refusing(SafetyOrchestrator):
    """Knows a reason against these forms."""

    def __init__(self, decisions: Decisions, refused: tuple[str, ...]) -> None:
        super().__init__(decisions.append)
        self._refused = refused

    def gate_optimization(self, name: str, subject: Subject, evidence: GateEvidence, **how: Any) -> GateDecision:
        """Adds the reason to the evidence."""
        if name in self._refused:
            evidence = replace(evidence, problems=(*evidence.problems, "this test is against it"))
        return super().gate_optimization(name, subject, evidence, **how)


def open_gate(*refused: str) -> tuple[AccelerationGate, Decisions]:
    """A gate that refuses these forms, and what it decides."""
    decisions = Decisions()
    return AccelerationGate(_Refusing(decisions, refused), Subject("writer", "1", "ab" * 32)), decisions
