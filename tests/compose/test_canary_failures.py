"""What the FAIL of a canary does: the breaker of the version opens, and one alert is sent. AR-064, AR-068."""

from __future__ import annotations

import pytest

from penstock.compose.canary_failures import CanaryFailures
from penstock.compose.candidates import CheckedCandidate
from penstock.registry.broker.breakers import BreakerLimits, BreakerTransition
from penstock.registry.errors import BrokerUnavailable
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.canary import CanaryVerdict
from penstock.safety.validators import Verdict
from penstock.workers.observe.metrics import InferenceMetrics

VERSION = CheckedCandidate("minilm", "2", "", "c" * 64, "1")
FORM = CheckedCandidate("minilm", "1", "int8", "c" * 64, "1")
FAIL = CanaryVerdict(Verdict.FAIL, ("y: NaN or infinity",), 7)


class _Breakers(MemoryBreakers):
    """Breakers whose broker can be away."""

    is_away = False

    def force_open_breaker(self, name: str, reason: str, id: str, limits: BreakerLimits) -> BreakerTransition:
        if self.is_away:
            raise BrokerUnavailable("away")
        return super().force_open_breaker(name, reason, id, limits)


class _Judge:
    """A process that judges candidates."""

    def __init__(self, breakers: MemoryBreakers) -> None:
        self.told: list[Alert] = []
        self.metrics = InferenceMetrics((1.0,))
        alerts = Alerts()
        alerts.register("test", self.told.append)
        self.failures = CanaryFailures(breakers, alerts, self.metrics, now_s=lambda: 7.0)

    def trips(self) -> float:
        (family,) = [each for each in self.metrics.collect() if each.name == "penstock_breaker_trips"]
        return sum(sample.value for sample in family.samples)


def test_version_that_fails_has_an_open_breaker():
    """Two processes that find the same open it once; the reason is the canary's."""
    breakers = _Breakers(lambda: 0)
    judges = [_Judge(breakers), _Judge(breakers)]
    for judge in judges:
        judge.failures.stop(VERSION, FAIL)
    (record,) = breakers.breakers("minilm").records.items()
    assert (record[0], record[1].circuit, record[1].epoch) == ("minilm/2:candidate", "open", 1)
    assert record[1].reason == "the canary says FAIL: y: NaN or infinity"
    assert [judge.trips() for judge in judges] == [1, 0]


def test_form_that_fails_leaves_its_version_alone():
    """The version serves well as it is built: only the alert tells of the form."""
    breakers = _Breakers(lambda: 0)
    judge = _Judge(breakers)
    judge.failures.stop(FORM, FAIL)
    judge.failures.tell(FORM, FAIL, "a")
    assert breakers.breakers("minilm").records == {}
    assert [(alert.kind, alert.version, alert.optimisation) for alert in judge.told] == [("canary", "1", "int8")]


def test_one_fail_is_one_alert():
    """However often it is told; the next run of the canary has one of its own."""
    judge = _Judge(_Breakers(lambda: 0))
    for id in ("a", "a", "b"):
        judge.failures.tell(VERSION, FAIL, id)
    assert [alert.id for alert in judge.told] == ["canary a", "canary b"]
    assert {(alert.kind, alert.model, alert.version, alert.at_s) for alert in judge.told} == {
        ("canary", "minilm", "2", 7.0)
    }
    assert judge.told[0].figures["pairs"] == 7


def test_breaker_is_opened_once_the_broker_is_back():
    """The caller is told, and calls again."""
    breakers = _Breakers(lambda: 0)
    judge = _Judge(breakers)
    breakers.is_away = True
    with pytest.raises(BrokerUnavailable):
        judge.failures.stop(VERSION, FAIL)
    breakers.is_away = False
    judge.failures.stop(VERSION, FAIL)
    assert breakers.breakers("minilm").records["minilm/2:candidate"].circuit == "open"
    assert judge.trips() == 1
