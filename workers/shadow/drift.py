"""Drift of a candidate beside the traffic: the figures of its shadow pairs -> one alert -> its breaker is open.

    ComparedPair -> DriftMonitor of each figure -- an alert --> breaker `model/version:candidate`, forced open
                                                                   '--> one Alert

`penstock rollout` reads that breaker: it does not begin, and a running one is rolled back. The PASS of the canary
of a new shadow closes it. Latencies are no part of it: a busy machine is no drift.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from penstock.registry.broker.breakers import (
    CANDIDATE,
    CANDIDATE_LIMITS,
    BreakerEnd,
    breaker_name,
    new_breaker_id,
)
from penstock.registry.errors import PenstockError
from penstock.safety.alerts import Alerts, breaker_alert
from penstock.safety.drift import DriftAlert, DriftLimits, DriftMonitor
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shadow.consumer import ComparedPair

__all__ = ["CandidateWatch"]

logger = logging.getLogger("penstock.shadow")

_DECIMALS: Final = 9
"""As in safety/shadow_report.py: rounding is no drift."""
_TIMES: Final = "_ms_per_row"


class CandidateWatch:
    """Watches the candidates of one model. For the thread of the shadow worker. now_s: unix seconds."""

    def __init__(
        self,
        model: str,
        breakers: BreakerEnd,
        metrics: InferenceMetrics,
        alerts: Alerts,
        *,
        limits: DriftLimits | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._breakers = breakers
        self._metrics = metrics
        self._alerts = alerts
        self._limits = limits or DriftLimits()
        self._now_s = now_s
        self._watched = ("", "")
        """The candidate and the version that answers: a change of either begins anew."""
        self._monitors: dict[str, DriftMonitor] = {}
        self._alert: DriftAlert | None = None
        self._id = ""
        """Of the opening that is not sent yet, so that it can be repeated."""

    def observe(self, pair: ComparedPair) -> None:
        """Take in a comparison. While the broker is away, the breaker is opened with a later pair.

        A form is passed over: the breaker is of the version, which may serve well as it is built.
        """
        if pair.form:
            return
        if (pair.candidate, pair.version) != self._watched:
            self._watched, self._monitors, self._alert, self._id = (pair.candidate, pair.version), {}, None, ""
        for figure, value in pair.comparison.figures.items():
            if figure.endswith(_TIMES):
                continue
            monitor = self._monitors.setdefault(figure, DriftMonitor(figure, "either", self._limits))
            alert = monitor.observe(round(value, _DECIMALS))
            if alert is not None and self._alert is None:
                self._alert, self._id = alert, new_breaker_id()
                self._metrics.drift_alert(self._model, pair.candidate, CANDIDATE)
        ratio = max((abs(each.score) / each.limit for each in self._monitors.values() if each.count), default=0.0)
        self._metrics.drift(self._model, pair.candidate, CANDIDATE, ratio)
        if self._alert is not None and self._id:
            self._open(pair.candidate, self._alert)

    def _open(self, candidate: str, alert: DriftAlert) -> None:
        name = breaker_name(self._model, candidate, CANDIDATE)
        try:
            opened = self._breakers.force_open_breaker(name, alert.reason, self._id, CANDIDATE_LIMITS)
        except PenstockError as error:
            logger.warning("the breaker of the candidate is not open yet: %s", error, extra={"breaker": name})
            return
        self._id = ""
        logger.warning("the candidate drifts, and its breaker is open", extra={"breaker": name, "reason": alert.reason})
        if opened.did:
            self._metrics.breaker_tripped(self._model, candidate, CANDIDATE)
            self._alerts.notify(breaker_alert(name, opened.record, self._now_s()))
