"""The engine's end of the one gate: each form that makes a decoder faster is asked for before any request has it.

    at load: evidence -- accepts --> SafetyOrchestrator -- record --> on, or the plain form
             an option says off -- stays_off --> recorded, and off
    later:   a form fails -- switched_off --> off, and recorded

One decision each for a loaded engine: joined-linears, packed-linears, attention-kernel, compiled-decoding, cuda-graphs.
A worker's gate writes the audit log; see levels/engine_decisions.py. That of an engine alone writes lines of the log.

Importing this module imports nothing heavy.
"""

from __future__ import annotations

import logging
from typing import Final

from penstock.safety.orchestrator import GateDecision, GateEvidence, SafetyOrchestrator, Subject

__all__ = [
    "ATTENTION_KERNEL",
    "COMPILED_DECODING",
    "CUDA_GRAPHS",
    "JOINED_LINEARS",
    "PACKED_LINEARS",
    "POLICY",
    "AccelerationGate",
    "error_evidence",
    "log_decision",
]

logger = logging.getLogger("penstock.runtime")

JOINED_LINEARS: Final = "joined-linears"
PACKED_LINEARS: Final = "packed-linears"
ATTENTION_KERNEL: Final = "attention-kernel"
COMPILED_DECODING: Final = "compiled-decoding"
CUDA_GRAPHS: Final = "cuda-graphs"
POLICY: Final = "an option of the engine"
"""The criterion of a decision that an option made: nothing was tried."""
_AUTO: Final = "auto"
_MOST_CHARACTERS: Final = 300


class AccelerationGate:
    """Asks the gate for one engine. For any thread that the gate's recorder is for.

    gate: None has a recorder that writes lines of the log. subject: what the decisions are about.
    """

    def __init__(self, gate: SafetyOrchestrator | None, subject: Subject) -> None:
        self._gate: Final = SafetyOrchestrator(log_decision) if gate is None else gate
        self._subject: Final = subject

    def accepts(self, name: str, evidence: GateEvidence, option: str, value: object) -> bool:
        """Whether the form may be used. It may not where the decision cannot be recorded.

        option, value: what asks for the form. A refusal of one that is not `auto` is a warning of the log.
        """
        criterion = f"{option} is {value}"
        try:
            decision = self._gate.gate_optimization(name, self._subject, evidence, criterion=criterion)
        except Exception:  # a full disk, or whatever the recorder raises: without a record the form stays off
            logger.exception("a decision could not be recorded", extra={"acceleration": name})
            return False
        if not decision.accepted and value != _AUTO:
            facts = {"acceleration": name, "criterion": criterion, "reason": decision.reason}
            logger.warning("an acceleration that an option asks for stays off", extra=facts)
        return decision.accepted

    def stays_off(self, name: str, option: str, value: object) -> None:
        """Records that an option keeps the form off."""
        self._disabled(name, f"{option} is {value}", POLICY)

    def switched_off(self, name: str, reason: str) -> None:
        """Records that a form which was on has failed, and is off."""
        self._disabled(name, reason[:_MOST_CHARACTERS], "it failed while it was used")

    def _disabled(self, name: str, reason: str, criterion: str) -> None:
        try:
            self._gate.disable_optimization(name, self._subject, reason, criterion=criterion)
        except Exception:  # as above; it is off without a record, too
            logger.exception("a decision could not be recorded", extra={"acceleration": name})


def error_evidence(error: Exception) -> GateEvidence:
    """Evidence against a form that cannot be built, or that raises."""
    return GateEvidence((f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.{_MOST_CHARACTERS}}",))


def log_decision(gate: GateDecision) -> None:
    """Writes a decision as a line of the log."""
    facts = {
        "model": gate.subject.model,
        "version": gate.subject.version,
        "acceleration": gate.optimization,
        "action": gate.action,
        "gain": gate.gain,
        "criterion": gate.criterion,
        "reason": gate.reason,
        "evidence": dict(gate.evidence),
    }
    logger.info("acceleration decision", extra=facts)
