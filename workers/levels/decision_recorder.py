"""Decisions on steps -> a line of the log, an audit record, the level of the version, a line for operators, a metric.

Both records are written before a decision takes effect. A step without a record could not be traced, so it is not on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from penstock.safety.orchestrator import GateDecision, SafetyOrchestrator
from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.decision_log import DecisionKey, DecisionLog
from penstock.workers.levels.progression import THRESHOLDS, Decision
from penstock.workers.levels.trials import Trial
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.forms import EAGER, Tunable

__all__ = ["Audit", "DecisionRecorder"]

logger = logging.getLogger("penstock.runtime")

Audit: TypeAlias = Callable[[Mapping[str, object]], None]


class DecisionRecorder:
    """Records what the gate decides. The caller holds the optimizer's lock. audit: gets each decision as plain data."""

    def __init__(self, log: DecisionLog, audit: Audit, metrics: InferenceMetrics) -> None:
        self.log: Final = log
        self._audit = audit
        self._metrics = metrics

    def gated(self, version: AttachedVersion, trial: Trial, step: str, criterion: str) -> GateDecision | None:
        """The gate's decision on a trial; None when it could not be recorded."""
        try:
            return self._gate_of(version).gate_optimization(
                step, version.subject, trial.evidence, level=THRESHOLDS[step].level, criterion=criterion
            )
        except Exception:  # a full disk, or whatever the audit raises: without both records the step stays off
            _log_unrecorded(version.key, step)
            return None

    def disabled(self, version: AttachedVersion, form: str, reason: str, criterion: str) -> None:
        """The form in use is off. It is off without a record, too."""
        try:
            self._gate_of(version).disable_optimization(
                form, version.subject, reason, level=THRESHOLDS[form].level, criterion=criterion
            )
        except Exception:  # as above; the form has failed, and must not stay on for want of a record
            _log_unrecorded(version.key, form)
        self.settle(version, Decision(form, "disabled", criterion, reason))

    def not_recorded(self, version: AttachedVersion, decision: Decision) -> Decision:
        """The decision that stands in place of one without a record."""
        if decision.action == "enabled":
            decision = replace(decision, action="refused", reason="it could not be recorded")
            # The log may have the first decision although the audit has not.
            with suppress(OSError):
                self.log.append(version.key, decision)
        return self.settle(version, decision)

    def settle(self, version: AttachedVersion, decision: Decision) -> Decision:
        """The version has the level of this decision from now on."""
        version.level_state = version.level_state.apply(decision)
        _log_decision(version.key, decision)
        self.show_level(version)
        return decision

    def show_level(self, version: AttachedVersion) -> None:
        """Sets the metrics."""
        key, level_state = version.key, version.level_state
        self._metrics.level(key.model, key.version, "", level_state.level)
        if isinstance(version.runtime, Tunable):
            form = "" if level_state.form == EAGER else level_state.form
            self._metrics.form(key.model, key.version, form, level_state.form_gain)

    def _gate_of(self, version: AttachedVersion) -> SafetyOrchestrator:
        return SafetyOrchestrator(partial(self._record, version))

    def _record(self, version: AttachedVersion, gate: GateDecision) -> None:
        self._audit(self.log.append(version.key, Decision.of(gate, version.level_state.form)))


def _log_decision(key: DecisionKey, decision: Decision) -> None:
    logger.info(
        "optimization decision",
        extra={
            "model": key.model,
            "version": key.version,
            "step": decision.step,
            "action": decision.action,
            "gain": decision.gain,
            "reason": decision.reason or decision.criterion,
        },
    )


def _log_unrecorded(key: DecisionKey, step: str) -> None:
    logger.exception("a decision could not be recorded", extra={"model": key.model, "step": step})
