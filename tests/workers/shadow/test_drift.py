"""A candidate that drifts beside the traffic: its breaker opens once, with one alert. AR-065, AR-073."""

from __future__ import annotations

import numpy as np

from penstock.registry.broker.breakers import BreakerLimits, BreakerTransition
from penstock.registry.errors import BrokerUnavailable
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.breaker import MemoryBreakers
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shadow.comparison import PairComparison
from penstock.workers.shadow.consumer import ComparedPair
from penstock.workers.shadow.drift import CandidateWatch


class _Breakers(MemoryBreakers):
    """Breakers whose broker can be away."""

    is_away = False

    def force_open_breaker(self, name: str, reason: str, id: str, limits: BreakerLimits) -> BreakerTransition:
        if self.is_away:
            raise BrokerUnavailable("away")
        return super().force_open_breaker(name, reason, id, limits)


class _Shadow:
    """Pairs of a model, with the cosine and the latency that the test says."""

    def __init__(self) -> None:
        self.breakers = _Breakers(lambda: 0)
        self.alerts: list[Alert] = []
        self.metrics = InferenceMetrics((1.0,))
        alerts = Alerts()
        alerts.register("test", self.alerts.append)
        self.watch = CandidateWatch("minilm", self.breakers, self.metrics, alerts, now_s=lambda: 7.0)
        self.random = np.random.default_rng(11)

    def compare(self, count: int, *, shift: float = 0.0, latency: float = 1.0, candidate: str = "2") -> None:
        for _ in range(count):
            cosine = 0.9997 + shift + 0.0001 * self.random.standard_normal()
            figures = {"y.min_cosine": cosine, "candidate_ms_per_row": latency}
            self.watch.observe(ComparedPair("a", 0, candidate, "1", PairComparison("pass", "", figures)))

    @property
    def circuits(self) -> dict[str, str]:
        return {name: record.circuit for name, record in self.breakers.breakers("minilm").records.items()}

    def counted(self, metric: str) -> float:
        (family,) = [each for each in self.metrics.collect() if each.name == metric]
        return sum(sample.value for sample in family.samples)


def test_one_drift_alert_opens_the_breaker_of_the_candidate():
    """Each pair passes its validator; all of them together are worse than they were."""
    shadow = _Shadow()
    shadow.compare(400)
    assert (shadow.circuits, shadow.alerts) == ({}, [])
    assert 0 < shadow.counted("penstock_drift_ratio") < 1
    shadow.compare(100, shift=-0.0003)
    assert shadow.circuits == {"minilm/2:candidate": "open"}
    assert [(alert.kind, alert.version, alert.optimisation) for alert in shadow.alerts] == [
        ("breaker", "2", "candidate")
    ]
    assert shadow.alerts[0].reason.startswith("drift: y.min_cosine is lower")
    assert (shadow.counted("penstock_drift_alerts"), shadow.counted("penstock_breaker_trips")) == (1, 1)


def test_slow_machine_is_no_drift():
    """The latencies are ten times as long: that says nothing about the answers."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.compare(100, latency=10.0)
    assert (shadow.circuits, shadow.alerts) == ({}, [])


def test_breaker_is_opened_when_the_broker_is_back():
    """The alert is raised once, and what it asks for is not lost."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.breakers.is_away = True
    shadow.compare(100, shift=-0.0003)
    assert (shadow.circuits, shadow.alerts) == ({}, [])
    assert shadow.counted("penstock_drift_alerts") == 1
    shadow.breakers.is_away = False
    shadow.compare(1)
    assert shadow.circuits == {"minilm/2:candidate": "open"}
    assert len(shadow.alerts) == 1


def test_another_candidate_begins_anew():
    """Its figures are its own: the window of the last candidate says nothing about them."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.compare(300, shift=-0.0005, candidate="3")
    assert shadow.circuits == {}
