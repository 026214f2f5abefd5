"""Circuit breakers of candidates -> entries of the audit log, from which orchestrator.replayed reads their states.

A candidate that is stopped is stopped without a record, too. One that comes back has its record first.
"""

from __future__ import annotations

from penstock.registry.broker.breakers import CANDIDATE, breaker_name
from penstock.safety.audit import STATE_CHANGE, AuditLogger
from penstock.safety.orchestrator import Action, Subject

__all__ = ["audit_candidate"]


def audit_candidate(
    log: AuditLogger, subject: Subject, action: Action, criterion: str, reason: str, *, optimisation: str = CANDIDATE
) -> None:
    """Records that the breaker of a version, or of its form, has opened (disabled) or is about to close (enabled).

    criterion: who has decided. Raises OSError.
    """
    details = {
        "version": subject.version,
        "content_hash": subject.content_hash,
        "breaker": breaker_name(subject.model, subject.version, optimisation),
        "criterion": criterion,
        "reason": reason,
    }
    log.log_event(STATE_CHANGE, subject.model, optimisation, action, details)
