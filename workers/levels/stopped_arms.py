"""An arm whose failures on this worker have opened its breaker -> a metric, an alert, an entry of the audit log."""

from __future__ import annotations

import logging
import time

from penstock.registry.broker.breakers import CANDIDATE, BreakerRecord, split_breaker_name
from penstock.safety.alerts import Alerts, breaker_alert
from penstock.safety.audit import AuditLogger
from penstock.safety.candidate_audit import audit_stopped
from penstock.workers.observe.metrics import InferenceMetrics

__all__ = ["tell_arm_stopped"]

logger = logging.getLogger("penstock.runtime")


def tell_arm_stopped(
    metrics: InferenceMetrics, alerts: Alerts, log: AuditLogger, name: str, record: BreakerRecord
) -> None:
    """Called on the one worker whose report opened the breaker. The arm is stopped, with a record or without."""
    model, local = split_breaker_name(name)
    metrics.breaker_tripped(model, local.partition(":")[0], CANDIDATE)
    alerts.notify(breaker_alert(name, record, time.time()))
    try:
        audit_stopped(log, name, record.reason, by="failures")
    except OSError as error:
        logger.error("a stopped arm is not in the audit log: %s", error, extra={"breaker": name})
