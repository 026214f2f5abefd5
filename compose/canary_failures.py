"""What follows from the FAIL of a canary, once it is recorded: the version gets no jobs, and one alert says so.

    FAIL --> stop: breaker `model/version:candidate`, forced open --> rollouts and A/B experiments obey it
         --> the shadow ends; the one process that has ended it --> tell --> one Alert

The form of a version has no part in the breaker: the version may serve well as its author built it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final

from penstock.compose.candidates import CheckedCandidate
from penstock.registry.broker.breakers import CANDIDATE, CANDIDATE_LIMITS, BreakerEnd, breaker_name, new_breaker_id
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.settings import Settings
from penstock.safety.alert_hooks import open_alerts
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.canary import CanaryVerdict
from penstock.workers.observe.metrics import InferenceMetrics

__all__ = ["CanaryFailures", "opened_failures"]

_TIMEOUT_S: Final = 5.0

logger = logging.getLogger("penstock.shadow")


class CanaryFailures:
    """Breakers and alerts of the candidates that a process judges. now_s: unix seconds."""

    def __init__(
        self, breakers: BreakerEnd, alerts: Alerts, metrics: InferenceMetrics, *, now_s: Callable[[], float] = time.time
    ) -> None:
        self._breakers = breakers
        self._alerts = alerts
        self._metrics = metrics
        self._now_s = now_s

    def stop(self, candidate: CheckedCandidate, verdict: CanaryVerdict) -> None:
        """Open the breaker of the version. Raises BrokerUnavailable; call it again then."""
        if candidate.form:
            return
        name = breaker_name(candidate.model, candidate.version, CANDIDATE)
        opened = self._breakers.force_open_breaker(name, _reason(verdict), new_breaker_id(), CANDIDATE_LIMITS)
        if opened.did:
            self._metrics.breaker_tripped(candidate.model, candidate.version, CANDIDATE)
            logger.warning("the breaker of the candidate is open", extra={"breaker": name, "reason": _reason(verdict)})

    def tell(self, candidate: CheckedCandidate, verdict: CanaryVerdict, id: str) -> None:
        """Send the alert. id: of the shadow or of the run that has failed, the same for every report of this FAIL."""
        version, form = candidate.version, candidate.form
        reason, figures = _reason(verdict), verdict.figures
        self._alerts.notify(
            Alert(f"canary {id}", "canary", candidate.model, reason, self._now_s(), version, form, figures)
        )


@contextmanager
def opened_failures(settings: Settings, metrics: InferenceMetrics) -> Iterator[CanaryFailures]:
    """With the broker and the alert hooks of the settings; at the end, waiting alerts are sent.

    Raises ConfigurationError as open_alerts does.
    """
    with (
        closing(open_alerts(settings, metrics.alert)) as opened,
        closing(RedisBreakers.from_url(settings.redis_url or "", timeout_s=_TIMEOUT_S)) as breakers,
    ):
        yield CanaryFailures(breakers, opened.alerts, metrics)


def _reason(verdict: CanaryVerdict) -> str:
    return f"the canary says {verdict.verdict}: {'; '.join(verdict.reasons)}"
