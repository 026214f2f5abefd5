"""An arm whose failures on this worker have opened its breaker -> a metric, an alert, an entry of the audit log."""

from __future__ import annotations

import logging
import time
from typing import Final

from penstock.registry.broker.breakers import CANDIDATE, BreakerRecord, breaker_name
from penstock.safety.alerts import Alerts, breaker_alert
from penstock.safety.audit import AuditLogger
from penstock.safety.candidate_audit import audit_candidate
from penstock.safety.orchestrator import Subject
from penstock.workers.observe.metrics import InferenceMetrics

__all__ = ["tell_arm_stopped"]

_CRITERION: Final = "the failures of its jobs"

logger = logging.getLogger("penstock.runtime")


def tell_arm_stopped(
    metrics: InferenceMetrics, alerts: Alerts, log: AuditLogger, subject: Subject, record: BreakerRecord
) -> None:
    """Called on the one worker whose report opened the breaker. The arm is stopped, with a record or without."""
    name = breaker_name(subject.model, subject.version, CANDIDATE)
    metrics.breaker_tripped(subject.model, subject.version, CANDIDATE)
    alerts.notify(breaker_alert(name, record, time.time()))
    try:
        audit_candidate(log, subject, "disabled", _CRITERION, record.reason)
    except OSError as error:
        logger.error("a stopped arm is not in the audit log: %s", error, extra={"breaker": name})
