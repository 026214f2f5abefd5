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

from penstock.compose.breaker_audit import record_closing
from penstock.compose.candidates import CheckedCandidate
from penstock.registry.broker.breakers import CANDIDATE, BreakerEnd, BreakerLimits, breaker_name
from penstock.registry.errors import PenstockError
from penstock.registry.settings import Settings
from penstock.safety.canary import CanaryVerdict

__all__ = ["CanaryPasses"]

_AGAIN_S: Final = 10.0
"""After a record that could not be written."""
_CRITERION: Final = "the canary of a shadow"

logger = logging.getLogger("penstock.shadow")

Record = Callable[[CheckedCandidate, str], None]
"""Gets the candidate and the reason. Raises OSError or PenstockError when it cannot record: then nothing is closed."""


class CanaryPasses:
    """Closes breakers of versions. limits: of their breakers. record: is called before one is closed."""

    def __init__(self, breakers: BreakerEnd, limits: BreakerLimits, record: Record) -> None:
        self._breakers = breakers
        self._limits = limits
        self._record = record

    @classmethod
    def of(cls, settings: Settings, breakers: BreakerEnd, *, reaches_stores: bool = True) -> CanaryPasses:
        """With the limits and the audit log of the settings. reaches_stores: as for audit_logger."""

        def record(candidate: CheckedCandidate, reason: str) -> None:
            record_closing(settings, candidate, _CRITERION, reason, reaches_stores=reaches_stores)

        return cls(breakers, settings.inference.safety.breaker_limits, record)

    def readmit(self, candidate: CheckedCandidate, verdict: CanaryVerdict, since_ms: float) -> float:
        """Close the breaker of a version that has passed. Returns the seconds until it may be tried; 0: it is closed.

        since_ms: when the first pair of the verdict was compared, in unix ms of the broker. Infinity for a breaker that
        was opened after that, and for a form: this verdict closes neither. Raises BrokerUnavailable.
        """
        if candidate.form:
            return inf
        name = breaker_name(candidate.model, candidate.version, CANDIDATE)
        reading = self._breakers.breakers(candidate.model)
        found = reading.records.get(name)
        if found is None or found.is_closed:
            return 0.0
        if found.retry_ms - self._limits.open_ms >= since_ms:
            return inf
        if reading.now_ms < found.retry_ms:
            return (found.retry_ms - reading.now_ms) / 1000
        reason = f"the canary says {verdict.verdict} on {verdict.pairs} pairs"
        try:
            self._record(candidate, reason)
        except (OSError, PenstockError) as error:
            logger.error("the breaker of the candidate stays open without a record: %s", error, extra={"breaker": name})
            return _AGAIN_S
        self._breakers.reset_breaker(name)
        logger.info("the breaker of the candidate is closed", extra={"breaker": name, "reason": reason})
        return 0.0
