"""A candidate that drifts beside the traffic: its breaker opens once, with one alert. AR-065, AR-073."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from penstock.registry.broker.breakers import BreakerLimits, BreakerTransition
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.validators import WorseSide
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shadow.comparison import PairComparison
from penstock.workers.shadow.consumer import ComparedPair
from penstock.workers.shadow.drift import CandidateWatch, DriftStore
from tests.servers import RedisServer
from tests.workers.shadow.pairs import order_of


class _Breakers(MemoryBreakers):
    """Breakers whose broker can be away."""

    is_away = False

    def force_open_breaker(self, name: str, reason: str, id: str, limits: BreakerLimits) -> BreakerTransition:
        if self.is_away:
            raise BrokerUnavailable("away")
        return super().force_open_breaker(name, reason, id, limits)


class _Memory:
    """Where the state is stored, on a broker that can be away."""

    def __init__(self) -> None:
        self.text, self.saves, self.is_away = "", 0, False

    def load(self) -> str:
        self._ask()
        return self.text

    def save(self, text: str) -> None:
        self._ask()
        self.text, self.saves = text, self.saves + 1

    def _ask(self) -> None:
        if self.is_away:
            raise BrokerUnavailable("away")


class _Shadow:
    """Pairs of a model, with the cosine and the latency that the test says."""

    def __init__(self, store: DriftStore | None = None, config: Mapping[str, float] = {}) -> None:
        self.breakers = _Breakers(lambda: 0)
        self.alerts: list[Alert] = []
        self.metrics = InferenceMetrics((1.0,))
        self.memory = _Memory()
        self.drifts: list[tuple[ComparedPair, str, int]] = []
        """What was told, and how many breakers were known then."""
        self.now_s = 0.0
        self.config = SafetyConfig.model_validate(config)
        self._store = store or DriftStore(self.memory.load, self.memory.save)
        self.restart()
        self.random = np.random.default_rng(11)

    def restart(self, **config: object) -> None:
        """Another process, with what the last one has stored."""
        alerts = Alerts()
        alerts.register("test", self.alerts.append)
        self.watch = CandidateWatch(
            "minilm",
            self.breakers,
            self.metrics,
            alerts,
            self.config.model_copy(update=config),
            store=self._store,
            on_drift=lambda pair, reason: self.drifts.append((pair, reason, len(self.circuits))),
            now_s=lambda: 7.0,
            clock=lambda: self.now_s,
        )

    def compare(
        self,
        count: int,
        *,
        shift: float = 0.0,
        latency: float = 1.0,
        candidate: str = "2",
        form: str = "",
        shadow: str = "a",
        sides: Mapping[str, WorseSide] = {"y.min_cosine": "lower"},
        more: Mapping[str, float] = {},
    ) -> None:
        for _ in range(count):
            cosine = 0.9997 + shift + 0.0001 * self.random.standard_normal()
            figures = {"y.min_cosine": cosine, "candidate_ms_per_row": latency, **more}
            comparison = PairComparison("pass", "", figures, sides)
            self.watch.observe(ComparedPair("a", 0, candidate, "1", comparison, form, "c" * 64, shadow))

    @property
    def circuits(self) -> dict[str, str]:
        return {name: record.circuit for name, record in self.breakers.breakers("minilm").records.items()}

    def counted(self, metric: str) -> float:
        (family,) = [each for each in self.metrics.collect() if each.name == metric]
        return sum(sample.value for sample in family.samples)


@pytest.mark.parametrize("form", ["", "int8"])
def test_one_drift_alert_opens_the_breaker_of_the_candidate(form: str):
    """Each pair passes its validator; all of them together are worse than they were. A form has a breaker of its own.

    What happens is told before the breaker opens.
    """
    optimisation = form or "candidate"
    shadow = _Shadow()
    shadow.compare(400, form=form)
    assert (shadow.circuits, shadow.alerts, shadow.drifts) == ({}, [], [])
    assert 0 < shadow.counted("penstock_drift_ratio") < 1
    shadow.compare(100, shift=-0.0003, form=form)
    assert shadow.circuits == {f"minilm/2:{optimisation}": "open"}
    assert [(alert.kind, alert.version, alert.optimisation) for alert in shadow.alerts] == [
        ("breaker", "2", optimisation)
    ]
    assert shadow.alerts[0].reason.startswith("drift: y.min_cosine is lower")
    assert (shadow.counted("penstock_drift_alerts"), shadow.counted("penstock_breaker_trips")) == (1, 1)
    ((pair, reason, opened),) = shadow.drifts
    assert (pair.form, pair.content_hash, reason, opened) == (form, "c" * 64, shadow.alerts[0].reason, 0)


def test_slow_machine_is_no_drift():
    """The latencies are ten times as long: that says nothing about the answers."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.compare(100, latency=10.0)
    assert (shadow.circuits, shadow.alerts) == ({}, [])


@pytest.mark.parametrize(
    ("sides", "shift", "opens"),
    [
        ({"y.min_cosine": "lower"}, 0.0003, False),
        ({"y.min_cosine": "lower"}, -0.0003, True),
        ({"y.min_cosine": "higher"}, 0.0003, True),
        ({"y.min_cosine": "higher"}, -0.0003, False),
        ({}, 0.0003, True),
        ({}, -0.0003, True),
    ],
)
def test_a_figure_that_gets_better_is_no_drift(sides: dict[str, WorseSide], shift: float, opens: bool):
    """Where the validator knows which side is worse; where nobody does, any change is a drift."""
    shadow = _Shadow()
    shadow.compare(300, sides=sides)
    shadow.compare(100, shift=shift, sides=sides)
    assert bool(shadow.circuits) is opens


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
    assert (len(shadow.alerts), len(shadow.drifts)) == (1, 1)


@pytest.mark.parametrize("other", [{"candidate": "3"}, {"form": "int8"}, {"shadow": "b"}])
def test_another_candidate_begins_anew(other: dict[str, Any]):
    """Its figures are its own: neither the window of the last candidate nor that of the last shadow counts."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.compare(300, shift=-0.0005, **other)
    assert shadow.circuits == {}


def test_drift_in_the_next_shadow_of_a_candidate_is_told_again():
    """The shadow worker lives on; the breaker was closed meanwhile."""
    shadow = _Shadow()
    for id in ("a", "b"):
        shadow.compare(300, shadow=id)
        shadow.compare(100, shift=-0.0003, shadow=id)
        assert shadow.circuits == {"minilm/2:candidate": "open"}
        shadow.breakers.reset_breaker("minilm/2:candidate")
    assert len(shadow.alerts) == 2


# The settings


def _opens(shift: float, *, reference: int = 300, changed: int = 60, **config: float) -> bool:
    shadow = _Shadow(config=config)
    shadow.compare(reference)
    shadow.compare(changed, shift=shift)
    return bool(shadow.circuits)


def test_the_width_of_the_control_limit_is_that_of_the_settings():
    """drift_width: three deviations within 60 pairs are beyond the default, and within a wide limit."""
    assert _opens(-0.0003)
    assert not _opens(-0.0003, drift_width=50)


def test_the_reference_window_is_that_of_the_settings():
    """drift_reference_size: 40 pairs are enough for a shorter one."""
    assert not _opens(-0.0005, reference=40)
    assert _opens(-0.0005, reference=40, drift_reference_size=40)


def test_the_smoothing_is_that_of_the_settings():
    """drift_smoothing: under one limit, the chart of heavy new values alone finds a large shift within three pairs."""
    assert not _opens(-0.001, changed=3, drift_width=3.0)
    assert _opens(-0.001, changed=3, drift_smoothing=0.9, drift_width=3.0)


def test_adwin_of_the_settings_finds_a_small_change():
    """drift_adwin_delta: half a deviation that lasts is within the limits of the chart."""
    small = {"reference": 1200, "changed": 600}
    assert not _opens(-0.00004, **small)
    assert _opens(-0.00004, **small, drift_adwin_delta=0.002)


# A restart


def test_a_restarted_shadow_worker_goes_on():
    """The drift is found with the reference from before: 100 pairs after the restart would be no window."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.watch.close()
    shadow.restart()
    shadow.compare(100, shift=-0.0003)
    assert shadow.circuits == {"minilm/2:candidate": "open"}
    assert len(shadow.alerts) == 1


def test_a_drift_that_is_known_is_not_told_again():
    """The state after the alert is beyond its limit: the breaker stays open, and nobody hears of it twice."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.compare(100, shift=-0.0003)
    shadow.watch.close()
    shadow.restart()
    shadow.compare(1, shift=-0.0003)
    assert (shadow.circuits, len(shadow.alerts)) == ({"minilm/2:candidate": "open"}, 1)


def test_state_is_stored_every_few_seconds_and_at_the_end():
    """A killed shadow worker loses five seconds; one that ends by itself loses nothing."""
    shadow = _Shadow()
    shadow.compare(200)
    assert shadow.memory.saves == 0
    shadow.now_s += 5
    shadow.compare(50)
    assert shadow.memory.saves == 1
    shadow.now_s += 4.9
    shadow.compare(50)
    assert shadow.memory.saves == 1
    shadow.watch.close()
    shadow.watch.close()
    assert shadow.memory.saves == 2


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("{", {}),
        ("[]", {}),
        ('{"watched": ["a", "2", "", "1"], "monitors": [{}]}', {}),
        ('{"watched": ["a", "3", "", "1"], "monitors": []}', {}),
        ("", {"drift_reference_size": 500}),
    ],
    ids=["no JSON", "no state", "no monitor", "another candidate", "another window"],
)
def test_a_state_of_another_kind_begins_anew(text: str, config: dict[str, object]):
    """Nothing of it is used, and the first pairs are the reference."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.watch.close()
    shadow.memory.text = text or shadow.memory.text
    shadow.restart(**config)
    shadow.compare(150, shift=-0.0003)
    assert shadow.circuits == {}


def test_pairs_are_passed_over_while_the_state_cannot_be_read():
    """They would be a reference beside the stored one."""
    shadow = _Shadow()
    shadow.compare(300)
    shadow.watch.close()
    shadow.restart()
    shadow.memory.is_away = True
    shadow.compare(250)
    shadow.watch.close()
    shadow.memory.is_away = False
    shadow.compare(100, shift=-0.0003)
    assert shadow.circuits == {"minilm/2:candidate": "open"}


def test_a_state_that_is_too_long_is_not_stored():
    """A validator with hundreds of figures: nothing is stored, rather than a part of them."""
    shadow = _Shadow()
    shadow.compare(200, more={f"y.figure_{number}": number / 7 for number in range(300)})
    shadow.watch.close()
    assert (shadow.memory.text, shadow.memory.saves) == ("", 1)


def test_state_lies_in_the_report_and_ends_with_the_shadow(shared_redis: RedisServer, slot: str):
    """In Redis the next worker of the same shadow finds it; the next shadow finds nothing."""
    with closing(RedisShadow.from_url(shared_redis.url)) as end:
        order = order_of(slot)
        assert end.start(order, order.seal()) is None
        assert end.drift(slot) == ""
        shadow = _Shadow(store=DriftStore(lambda: end.drift(slot), lambda text: end.note_drift(slot, text)))
        shadow.compare(300)
        shadow.watch.close()
        assert end.state(slot).report["drift"] == end.drift(slot)
        assert len(end.drift(slot)) < 10_000
        shadow.restart()
        shadow.compare(100, shift=-0.0003)
        assert shadow.circuits == {"minilm/2:candidate": "open"}
        end.stop(slot)
        following = order_of(slot)
        assert end.start(following, following.seal()) is None
        assert end.drift(slot) == ""
