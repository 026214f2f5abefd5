"""An arm that was stopped for its failures: a metric, one alert and an entry from which its state can be rebuilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.broker.breakers import BreakerLimits, new_breaker_id
from penstock.registry.settings import Settings
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.orchestrator import StateKey, Subject, replayed
from penstock.workers.levels.stopped_arms import tell_arm_stopped
from penstock.workers.observe.metrics import InferenceMetrics

NAME = "minilm/2:candidate"
SUBJECT = Subject("minilm", "2", "c" * 64)


def test_a_stopped_arm_is_told_counted_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk changes nothing about the alert: the arm is stopped already."""
    told: list[Alert] = []
    alerts, metrics = Alerts(), InferenceMetrics((1.0,))
    alerts.register("test", told.append)
    record = (
        MemoryBreakers(lambda: 5)
        .force_open_breaker(NAME, "5 of 5 jobs failed", new_breaker_id(), BreakerLimits())
        .record
    )
    settings = Settings.load(environ={"PENSTOCK_HOME": str(tmp_path)})
    with AuditLogger(config=AuditConfig.of(settings)) as log:
        tell_arm_stopped(metrics, alerts, log, SUBJECT, record)
        ((key, state),) = replayed(log.get_entries_since(0.0)).items()
        monkeypatch.setattr(log, "log_event", _fails)
        tell_arm_stopped(metrics, alerts, log, SUBJECT, record._replace(opened_by="other"))
    assert key == StateKey("", "minilm", "c" * 64, "candidate")
    assert (state.action, state.reason) == ("disabled", "5 of 5 jobs failed")
    assert [(alert.kind, alert.model, alert.version) for alert in told] == [("breaker", "minilm", "2")] * 2
    (family,) = [each for each in metrics.collect() if each.name == "penstock_breaker_trips"]
    assert [sample.value for sample in family.samples if sample.name.endswith("_total")] == [2.0]


def _fails(*_: object, **__: object) -> None:
    raise OSError("no space left")
