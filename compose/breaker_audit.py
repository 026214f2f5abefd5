"""A breaker that a shadow opens or closes -> one entry of the audit log about the candidate, or about its form.

It is open without a record, too: off is safe. It closes with a record only.
"""

from __future__ import annotations

import logging

from penstock.compose.candidates import CheckedCandidate
from penstock.compose.rollout.audit_log import audit_logger
from penstock.registry.errors import PenstockError
from penstock.registry.settings import Settings
from penstock.safety.candidate_audit import audit_candidate
from penstock.safety.orchestrator import Action, Subject

__all__ = ["record_closing", "record_opening"]

logger = logging.getLogger("penstock.shadow")


def record_opening(
    settings: Settings, candidate: CheckedCandidate, criterion: str, reason: str, *, reaches_stores: bool = True
) -> None:
    """Records that the candidate gets no jobs, or that its form is used no more. It never raises.

    criterion: who has decided. reaches_stores: as for audit_logger.
    """
    try:
        _record(settings, candidate, "disabled", criterion, reason, reaches_stores=reaches_stores)
    except (OSError, PenstockError) as error:
        facts = {"model": candidate.model, "version": candidate.version, "optimisation": candidate.optimisation}
        logger.error("an open breaker is not in the audit log: %s", error, extra=facts)


def record_closing(
    settings: Settings, candidate: CheckedCandidate, criterion: str, reason: str, *, reaches_stores: bool = True
) -> None:
    """Records that the candidate may get jobs again. Raises OSError and PenstockError: then it must not."""
    _record(settings, candidate, "enabled", criterion, reason, reaches_stores=reaches_stores)


def _record(
    settings: Settings,
    candidate: CheckedCandidate,
    action: Action,
    criterion: str,
    reason: str,
    *,
    reaches_stores: bool,
) -> None:
    if not settings.inference.privacy.audit_log_enabled:
        return
    subject = Subject(candidate.model, candidate.version, candidate.content_hash)
    with audit_logger(settings, "shadow", reaches_stores=reaches_stores) as log:
        audit_candidate(log, subject, action, criterion, reason, optimisation=candidate.optimisation)
