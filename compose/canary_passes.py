"""What follows from the PASS of a canary: a candidate whose circuit breaker is open may get jobs again.

    PASS on pairs that were compared after the breaker opened, and the pause is over --> audit log --> closed

The pause and the pairs are the hysteresis of a version: what was stopped comes back slowly, and by new evidence alone.
MARGINAL and INSUFFICIENT change nothing. A form has probes of its own on the workers; see levels/form_breakers.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Final

from penstock.compose.candidates import CheckedCandidate
from penstock.compose.rollout.audit_log import audit_logger
from penstock.registry.broker.breakers import CANDIDATE, CANDIDATE_LIMITS, BreakerEnd, breaker_name
from penstock.registry.errors import PenstockError
from penstock.registry.settings import Settings
from penstock.safety.canary import CanaryVerdict
from penstock.safety.candidate_audit import audit_readmitted

__all__ = ["readmit", "recorded_in"]

_AGAIN_S: Final = 10.0
"""After a record that could not be written."""

logger = logging.getLogger("penstock.shadow")

Record = Callable[[str, str], None]
"""(name of the breaker, reason). Raises OSError or PenstockError when it cannot be written: then nothing is closed."""


def readmit(
    breakers: BreakerEnd, candidate: CheckedCandidate, verdict: CanaryVerdict, since_ms: float, record: Record
) -> float:
    """Close the breaker of a version that has passed. Returns the seconds until it may be tried; 0: it is closed.

    since_ms: when the first pair of the verdict was compared, in unix ms of the broker. Infinity for a breaker that
    opened after that, and for a form: this verdict closes neither. Raises BrokerUnavailable.
    """
    if candidate.form:
        return inf
    name = breaker_name(candidate.model, candidate.version, CANDIDATE)
    reading = breakers.breakers(candidate.model)
    found = reading.records.get(name)
    if found is None or found.is_closed:
        return 0.0
    if found.retry_ms - CANDIDATE_LIMITS.open_ms >= since_ms:
        return inf
    if reading.now_ms < found.retry_ms:
        return (found.retry_ms - reading.now_ms) / 1000
    reason = f"the canary says {verdict.verdict} on {verdict.pairs} pairs"
    try:
        record(name, reason)
    except (OSError, PenstockError) as error:
        logger.error("the breaker of the candidate stays open without a record: %s", error, extra={"breaker": name})
        return _AGAIN_S
    breakers.reset_breaker(name)
    logger.info("the breaker of the candidate is closed", extra={"breaker": name, "reason": reason})
    return 0.0


def recorded_in(settings: Settings) -> Record:
    """Records in the audit log of these settings."""

    def record(name: str, reason: str) -> None:
        if settings.inference.privacy.audit_log_enabled:
            with audit_logger(settings, "canary", reaches_stores=False) as log:
                audit_readmitted(log, name, reason, by="canary")

    return record
