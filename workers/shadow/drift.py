"""Drift of a candidate beside the traffic: the figures of its shadow pairs -> one alert -> its breaker is open.

    ComparedPair -> DriftMonitor of each figure -- an alert --> the audit log
                          |                                --> breaker `model/version:candidate`, forced open; of a form
                          |                                    that of the form: its workers use it no more
                          |                                       '--> one Alert
                          '-- every few seconds, and at the end --> Redis --> a shadow worker that restarts

`penstock rollout` reads the breaker of a version: it does not begin, and a running one is rolled back. The PASS of the
canary of a new shadow closes it. Where the validator knows the side on which a figure gets worse, only that side is a
drift. Latencies are no part of it: a busy machine is no drift.

The stored state is one for all shadow workers of the model, because each of them sees the same traffic. The last one
that wrote gave a whole state of its own, and a worker that is killed loses the comparisons of a few seconds.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from penstock.registry.broker.breakers import CANDIDATE, BreakerEnd, breaker_name, new_breaker_id
from penstock.registry.errors import InvalidInput, PenstockError
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.alerts import Alerts, breaker_alert
from penstock.safety.drift import DriftAlert, DriftLimits, DriftMonitor
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shadow.consumer import ComparedPair

__all__ = ["CandidateWatch", "DriftStore", "OnDrift"]

logger = logging.getLogger("penstock.shadow")

_DECIMALS: Final = 9
"""As in safety/shadow_report.py: rounding is no drift."""
_TIMES: Final = "_ms_per_row"
_STORE_EVERY_S: Final = 5.0
_MOST_STORED: Final = 256 * 1024
"""Characters. A state that is longer is not stored: `penstock shadow report` reads it with everything else."""

OnDrift: TypeAlias = Callable[[ComparedPair, str], None]
"""Gets the comparison that raised the alert, and the alert in words, before the breaker is opened."""


@dataclass(frozen=True, slots=True)
class DriftStore:
    """Where the state of the monitors outlives the process, as text. Both raise PenstockError."""

    load: Callable[[], str] = lambda: ""
    save: Callable[[str], None] = lambda _: None


class _Watched(NamedTuple):
    """What the monitors are about. A change of any of it begins anew."""

    shadow: str = ""
    candidate: str = ""
    form: str = ""
    version: str = ""
    """The version that answers."""

    @property
    def optimisation(self) -> str:
        """Whose breaker opens: that of the form, or that of the whole version."""
        return self.form or CANDIDATE


class CandidateWatch:
    """Watches the candidates of one model. For the thread of the shadow worker. Call `close` last.

    now_s: unix seconds. clock: monotonic seconds.
    """

    def __init__(
        self,
        model: str,
        breakers: BreakerEnd,
        metrics: InferenceMetrics,
        alerts: Alerts,
        config: SafetyConfig,
        *,
        store: DriftStore | None = None,
        on_drift: OnDrift = lambda _pair, _reason: None,
        now_s: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._breakers = breakers
        self._metrics = metrics
        self._alerts = alerts
        self._limits = DriftLimits.of(config)
        self._breaker_limits = config.breaker_limits
        self._store = store or DriftStore()
        self._on_drift = on_drift
        self._now_s = now_s
        self._clock = clock
        self._watched = _Watched()
        self._monitors: dict[str, DriftMonitor] = {}
        self._alert: DriftAlert | None = None
        self._id = ""
        """Of the opening that is not sent yet, so that it can be repeated."""
        self._save_at = 0.0
        """When the state is stored next."""
        self._has_unsaved = False

    def observe(self, pair: ComparedPair) -> None:
        """Take in a comparison. While the broker is away, the breaker is opened with a later pair."""
        watched = _Watched(pair.shadow, pair.candidate, pair.form, pair.version)
        if watched != self._watched and not self._begin(watched):
            return
        for figure, value in pair.comparison.figures.items():
            if figure.endswith(_TIMES):
                continue
            monitor = self._monitors.get(figure)
            if monitor is None:
                side = pair.comparison.worse_sides.get(figure, "either")
                monitor = self._monitors[figure] = DriftMonitor(figure, side, self._limits)
            alert = monitor.observe(round(value, _DECIMALS))
            if alert is not None and self._alert is None:
                self._alert, self._id = alert, new_breaker_id()
                self._metrics.drift_alert(self._model, pair.candidate, watched.optimisation)
                self._on_drift(pair, alert.reason)
        ratio = max((abs(each.score) / each.limit for each in self._monitors.values() if each.count), default=0.0)
        self._metrics.drift(self._model, pair.candidate, watched.optimisation, ratio)
        if self._alert is not None and self._id:
            self._open(self._alert)
        self._has_unsaved = True
        if self._clock() >= self._save_at:
            self._save()

    def close(self) -> None:
        """Store what was taken in."""
        if self._has_unsaved:
            self._save()

    def _begin(self, watched: _Watched) -> bool:
        """Go on from the stored state, if it is about this candidate. False: the broker is away; try again later."""
        try:
            text = self._store.load()
        except PenstockError as error:
            logger.warning("the state of the drift monitors cannot be read: %s", error, extra={"model": self._model})
            return False
        self._watched, self._alert, self._id = watched, None, ""
        self._monitors = self._decoded(text, watched) if text else {}
        self._save_at = self._clock() + _STORE_EVERY_S
        return True

    def _decoded(self, text: str, watched: _Watched) -> dict[str, DriftMonitor]:
        try:
            state = json.loads(text)
            if tuple(state["watched"]) != watched:
                return {}
            monitors = [DriftMonitor.from_data(each, self._limits) for each in state["monitors"]]
        except (InvalidInput, LookupError, RecursionError, TypeError, ValueError) as error:
            logger.warning("the drift monitors begin anew: %.200s", error, extra={"model": self._model})
            return {}
        return {monitor.metric: monitor for monitor in monitors}

    def _save(self) -> None:
        self._save_at = self._clock() + _STORE_EVERY_S
        monitors = [monitor.as_data() for monitor in self._monitors.values()]
        text = json.dumps({"watched": self._watched, "monitors": monitors})
        if len(text) > _MOST_STORED:
            logger.warning("the state of %d drift monitors is too long to be stored", len(monitors))
            text = ""
        try:
            self._store.save(text)
        except PenstockError as error:
            logger.warning("the state of the drift monitors is not stored: %s", error, extra={"model": self._model})
        else:
            self._has_unsaved = False

    def _open(self, alert: DriftAlert) -> None:
        candidate, optimisation = self._watched.candidate, self._watched.optimisation
        name = breaker_name(self._model, candidate, optimisation)
        try:
            opened = self._breakers.force_open_breaker(name, alert.reason, self._id, self._breaker_limits)
        except PenstockError as error:
            logger.warning("the breaker of the candidate is not open yet: %s", error, extra={"breaker": name})
            return
        self._id = ""
        logger.warning("the candidate drifts, and its breaker is open", extra={"breaker": name, "reason": alert.reason})
        if opened.did:
            self._metrics.breaker_tripped(self._model, candidate, optimisation)
            self._alerts.notify(breaker_alert(name, opened.record, self._now_s()))
