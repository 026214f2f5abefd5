"""What follows from the FAIL of a canary, once it is recorded: the candidate gets no jobs, and one alert says so.

    FAIL --> stop: of a version, breaker `model/version:candidate`, forced open --> rollouts and A/B experiments obey it
                   of a form, breaker `model/version:form`, forced open --> workers use the form no more
         --> the shadow ends; the one process that has ended it --> tell --> one Alert

The FAIL of a form leaves its version alone, which may serve well as its author built it. A canary has seen more pairs
than the trials of a probe do, so the form is off for the longest time off before a worker tries it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final, TypeAlias

from penstock.compose.breaker_audit import record_opening
from penstock.compose.candidates import CheckedCandidate
from penstock.registry.broker.breakers import BreakerEnd, breaker_name, new_breaker_id
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.alert_hooks import open_alerts
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.canary import CanaryVerdict
from penstock.workers.observe.metrics import InferenceMetrics

__all__ = ["CanaryFailures", "opened_failures"]

OnOpened: TypeAlias = Callable[[CheckedCandidate, str], None]
"""Gets the candidate whose breaker has opened, and the reason."""

_TIMEOUT_S: Final = 5.0
_CRITERION: Final = "a canary refused it"

logger = logging.getLogger("penstock.shadow")


class CanaryFailures:
    """Breakers and alerts of the candidates that a process judges.

    on_opened: is told by the one process that has opened the breaker. now_s: unix seconds.
    """

    def __init__(
        self,
        breakers: BreakerEnd,
        alerts: Alerts,
        metrics: InferenceMetrics,
        config: SafetyConfig,
        *,
        on_opened: OnOpened = lambda _candidate, _reason: None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._breakers = breakers
        self._alerts = alerts
        self._metrics = metrics
        self._limits = config.breaker_limits
        self._form_limits = self._limits._replace(open_ms=int(config.max_off_s * 1000))
        self._on_opened = on_opened
        self._now_s = now_s

    @classmethod
    def of(
        cls,
        settings: Settings,
        breakers: BreakerEnd,
        alerts: Alerts,
        metrics: InferenceMetrics,
        *,
        reaches_stores: bool = True,
    ) -> CanaryFailures:
        """With the limits and the audit log of the settings. reaches_stores: as for audit_logger."""

        def record(candidate: CheckedCandidate, reason: str) -> None:
            record_opening(settings, candidate, _CRITERION, reason, reaches_stores=reaches_stores)

        return cls(breakers, alerts, metrics, settings.inference.safety, on_opened=record)

    def stop(self, candidate: CheckedCandidate, verdict: CanaryVerdict) -> None:
        """Open the breaker of the version, or of the form. Raises BrokerUnavailable; call it again then."""
        name, reason = breaker_name(candidate.model, candidate.version, candidate.optimisation), _reason(verdict)
        limits = self._form_limits if candidate.form else self._limits
        opened = self._breakers.force_open_breaker(name, reason, new_breaker_id(), limits)
        if opened.did:
            self._metrics.breaker_tripped(candidate.model, candidate.version, candidate.optimisation)
            logger.warning("the breaker of the candidate is open", extra={"breaker": name, "reason": reason})
            # The FAIL is on record already, so that nothing is lost with a process that ends here.
            self._on_opened(candidate, reason)

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
        yield CanaryFailures.of(settings, breakers, opened.alerts, metrics)


def _reason(verdict: CanaryVerdict) -> str:
    return f"the canary says {verdict.verdict}: {'; '.join(verdict.reasons)}"
