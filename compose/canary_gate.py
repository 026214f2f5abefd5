"""The verdict of a canary -> the gate -> the audit log, before anything follows from it.

A verdict switches nothing on by itself: a promotion and the trial of a form have decisions of their own.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

from penstock.compose.candidates import CheckedCandidate
from penstock.compose.rollout.audit_log import audit_logger
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.audit import GATE_DECISION, AuditLogger
from penstock.safety.canary import CanaryVerdict
from penstock.safety.orchestrator import GateDecision, GateEvidence, Judgement, SafetyOrchestrator, Subject

__all__ = ["record_verdict"]

_CANARY: Final = "canary"


def record_verdict(
    settings: Settings, candidate: CheckedCandidate, verdict: CanaryVerdict, *, reaches_stores: bool = True
) -> GateDecision:
    """The decision of the gate on this verdict, recorded. INSUFFICIENT and FAIL are refused.

    reaches_stores: whether this process may connect to registry and broker. Raises ConfigurationError when the audit
    log cannot be written.
    """
    is_logged = settings.inference.privacy.audit_log_enabled
    with audit_logger(settings, _CANARY, reaches_stores=reaches_stores) if is_logged else nullcontext() as log:

        def record(gate: GateDecision) -> None:
            if log is not None:
                _log(log, candidate, verdict, gate)

        ratio = {} if verdict.latency_ratio is None else {"latency_ratio": verdict.latency_ratio}
        judgement = Judgement(verdict.reasons, verdict.comparisons, {}, verdict.pairs)
        return SafetyOrchestrator(record).gate_optimization(
            _CANARY,
            Subject(candidate.model, candidate.version, candidate.content_hash),
            GateEvidence(judgement=judgement, figures=ratio),
            criterion=f"{verdict.verdict} on {verdict.pairs} pairs",
        )


def _log(log: AuditLogger, candidate: CheckedCandidate, verdict: CanaryVerdict, gate: GateDecision) -> None:
    details = {
        "version": candidate.version,
        "form": candidate.form,
        "content_hash": candidate.content_hash,
        "active": candidate.active,
        "action": gate.action,
        "criterion": gate.criterion,
        "reason": gate.reason,
        "evidence": dict(gate.evidence),
    }
    try:
        log.log_event(GATE_DECISION, candidate.model, _CANARY, str(verdict.verdict), details)
    except OSError as error:
        raise ConfigurationError(
            f"The audit log cannot be written ({error.strerror}), and nothing was decided. Expected room for it"
        ) from None
