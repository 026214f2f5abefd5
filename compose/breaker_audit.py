"""A breaker that a shadow opens -> one entry of the audit log: the candidate, or its form, is disabled.

It is open without a record, too: off is safe. The log of the process tells of a missing one.
"""

from __future__ import annotations

import logging

from penstock.compose.candidates import CheckedCandidate
from penstock.compose.rollout.audit_log import audit_logger
from penstock.registry.broker.breakers import breaker_name
from penstock.registry.errors import PenstockError
from penstock.registry.settings import Settings
from penstock.safety.orchestrator import GateDecision, SafetyOrchestrator, Subject
from penstock.workers.levels.decision_audit import audit_decision

__all__ = ["record_opening"]

logger = logging.getLogger("penstock.shadow")


def record_opening(
    settings: Settings, candidate: CheckedCandidate, criterion: str, reason: str, *, reaches_stores: bool = True
) -> None:
    """Records that the candidate gets no jobs, or that its form is used no more. It never raises.

    criterion: who has decided. reaches_stores: as for audit_logger.
    """
    if not settings.inference.privacy.audit_log_enabled:
        return
    breaker = breaker_name(candidate.model, candidate.version, candidate.optimisation)
    try:
        with audit_logger(settings, "shadow", reaches_stores=reaches_stores) as log:

            def record(gate: GateDecision) -> None:
                facts = {"version": candidate.version, "content_hash": candidate.content_hash, "breaker": breaker}
                decided = {"model": candidate.model, "step": gate.optimization, "action": gate.action}
                audit_decision(log, {**decided, **facts, "criterion": gate.criterion, "reason": gate.reason})

            subject = Subject(candidate.model, candidate.version, candidate.content_hash)
            SafetyOrchestrator(record).disable_optimization(
                candidate.optimisation, subject, reason, criterion=criterion
            )
    except (OSError, PenstockError) as error:
        logger.error("an open breaker is not in the audit log: %s", error, extra={"breaker": breaker})
