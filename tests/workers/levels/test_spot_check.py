"""A form that serves is compared with the model as built, on few batches and beside the traffic. AR-073, 075, 076, 099.

Two optimizers with one model each share their breakers in memory; the test is every thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.breaker import MemoryBreakers
from penstock.workers.levels.spot_check import SpotSampler
from penstock.workers.runtime.forms import Forms
from penstock.workers.versions.tuner import AnsweredJob, BatchObservation
from tests.workers.levels.fake_model import WIDTH, Clock, Form, Rotation
from tests.workers.levels.test_optimizer import OptimizerHarness

FORM = "rotation/1:compiled"
MIN_ON_S = 60.0


class _Fleet:
    """Two workers of one model, whose compiled form is as wrong as the test says. Every batch is checked."""

    def __init__(self, home: Path, share: float = 1.0, *, safety: Mapping[str, float] = {}, **spec: Any) -> None:
        self.clock = Clock()
        self.breakers = MemoryBreakers(lambda: int(self.clock.now * 1000))
        self.angle = 0.0
        """By how much the form turns its rows, in radians."""
        self.noise = np.random.default_rng(7)
        self.alerts: list[Alert] = []
        self.workers = [
            self._worker(home / str(number), {**safety, "spot_check_share": share}, spec) for number in range(2)
        ]
        self.second, self.first = self.workers
        for worker in self.workers:
            worker.serve(61)
            worker.settle()
        for _ in range(2):
            self.turn()
            self.first.settle()

    def _worker(self, home: Path, safety: dict[str, float], spec: dict[str, Any]) -> OptimizerHarness:
        config = InferenceConfig.model_validate({"max_level": 2, "safety": safety})
        model = Rotation(self.clock, {"compiled": Form(self._turned, cost_s=0.25)}, **spec)
        worker = OptimizerHarness(home, model, self.clock, config, breakers=self.breakers)
        worker.optimizer._alerts.register("test", self.alerts.append)
        return worker

    def _turned(self, rows: Array) -> Array:
        """Each row is turned by `angle` and by a little noise, which any form has."""
        angle = self.angle and self.angle * (1 + 0.2 * self.noise.standard_normal(len(rows)))
        turned = rows.copy()
        turned[:, 0] += angle
        unit: Array = turned / np.linalg.norm(turned, axis=1, keepdims=True)
        return unit

    def turn(self) -> None:
        for worker in self.workers:
            assert worker.optimizer._breakers is not None
            worker.optimizer._breakers.shared.turn()

    def serve(self, batches: int) -> None:
        """Traffic of the first worker; after each batch its optimizer has time."""
        for _ in range(batches):
            self.first.serve(1)
            self.first.settle()
            self.turn()

    @property
    def forms_in_use(self) -> list[str]:
        self.turn()
        return [worker.runtime.forms.name for worker in self.workers]

    def counted(self, metric: str, **labels: str) -> float:
        """The sum of a metric of both workers, over the samples with these labels."""
        families = [each for worker in self.workers for each in worker.metrics.collect() if each.name == metric]
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@pytest.fixture
def fleet(tmp_path: Path) -> _Fleet:
    fleet = _Fleet(tmp_path)
    fleet.turn()
    assert fleet.forms_in_use == ["compiled", "compiled"]
    return fleet


def test_one_drift_alert_opens_the_breaker_on_every_worker(fleet: _Fleet):
    """The form still passes its validator, but answers worse than it did: off at once, one alert, all on record."""
    fleet.angle = 0.002
    fleet.serve(10)
    assert fleet.forms_in_use == ["compiled", "compiled"]
    assert fleet.counted("penstock_canary_verdicts", verdict="FAIL") == 0
    fleet.angle = 0.02
    fleet.serve(6)
    assert fleet.forms_in_use == ["eager", "eager"]
    record = fleet.breakers.breakers("rotation").records[FORM]
    assert record.circuit == "open"
    assert record.reason.startswith("drift: y.")
    assert fleet.counted("penstock_drift_alerts") == 1
    assert fleet.counted("penstock_breaker_trips") == 1
    assert fleet.counted("penstock_hysteresis_transitions", to="off") == 2
    assert [(alert.kind, alert.optimisation, alert.reason) for alert in fleet.alerts] == [
        ("breaker", "compiled", record.reason)
    ]
    assert fleet.first.records[-1]["criterion"] == "it drifted at serving"
    assert fleet.second.records[-1]["criterion"] == "its circuit breaker opened"


def test_steady_form_stays_on(fleet: _Fleet):
    """A thousand checked jobs of a form that answers as it did."""
    fleet.angle = 0.002
    fleet.serve(40)
    assert fleet.forms_in_use == ["compiled", "compiled"]
    assert fleet.counted("penstock_drift_alerts") == 0
    assert 0 < fleet.counted("penstock_drift_ratio") < 1
    assert fleet.alerts == []


def test_wrong_answers_disable_the_form_after_its_shortest_time_on(fleet: _Fleet):
    """A FAIL of the spot checks is a soft disable: nothing in the first 60 s, then off on every worker. AR-076."""
    fleet.angle = 0.5
    begun = fleet.clock.now
    fleet.serve(1)
    assert fleet.counted("penstock_canary_verdicts", verdict="FAIL") == 1
    assert fleet.clock.now - begun < MIN_ON_S
    assert fleet.forms_in_use == ["compiled", "compiled"]
    fleet.clock.now += MIN_ON_S
    fleet.first.settle()
    fleet.turn()
    fleet.turn()
    assert fleet.forms_in_use == ["eager", "eager"]
    record = fleet.breakers.breakers("rotation").records[FORM]
    assert record.reason.startswith("spot checks: y: min_cosine")
    assert [alert.reason for alert in fleet.alerts] == [record.reason]


@pytest.mark.parametrize(("min_on_s", "form"), [(5, "eager"), (60, "compiled")])
def test_shortest_time_on_is_that_of_the_settings(tmp_path: Path, min_on_s: float, form: str):
    """With min_on_s of five seconds a form whose spot checks fail goes off sooner."""
    fleet = _Fleet(tmp_path, safety={"min_on_s": min_on_s})
    fleet.turn()
    assert fleet.forms_in_use == ["compiled", "compiled"]
    fleet.angle = 0.5
    fleet.serve(1)
    fleet.clock.now += 5
    fleet.first.settle()
    fleet.turn()
    fleet.turn()
    assert fleet.forms_in_use == [form, form]


@pytest.mark.parametrize(
    ("safety", "form"),
    [({}, "eager"), ({"drift_width": 100}, "compiled"), ({"drift_reference_size": 2000}, "compiled")],
    ids=["default", "wide", "long window"],
)
def test_drift_is_looked_for_with_the_limits_of_the_settings(tmp_path: Path, safety: dict[str, float], form: str):
    """A wide control limit, or a reference window that is not full yet: the form stays on."""
    fleet = _Fleet(tmp_path, safety=safety)
    fleet.angle = 0.002
    fleet.serve(10)
    fleet.angle = 0.02
    fleet.serve(6)
    assert fleet.forms_in_use == [form, form]


def test_form_that_answers_better_than_it_did_stays_on(fleet: _Fleet):
    """Its cosines rise: that is the better side."""
    fleet.angle = 0.02
    fleet.serve(10)
    fleet.angle = 0.002
    fleet.serve(20)
    assert fleet.forms_in_use == ["compiled", "compiled"]


def test_breaker_that_trips_waits_for_nothing(fleet: _Fleet):
    """The shortest time on is for soft disables: a form that raises is off within its first second. AR-074."""
    assert fleet.first.optimizer._breakers is not None
    fleet.first.optimizer._breakers.trip(FORM, "a kernel is gone")
    assert fleet.first.runtime.forms.name == "eager"
    fleet.turn()
    assert fleet.forms_in_use == ["eager", "eager"]
    assert fleet.counted("penstock_hysteresis_transitions", to="off") == 2


def test_form_returns_after_a_drift_like_after_any_trip(fleet: _Fleet):
    """300 s off and three trials in a row: then it is on again, with a new reference window."""
    fleet.angle = 0.002
    fleet.serve(10)
    fleet.angle = 0.02
    fleet.serve(6)
    assert fleet.forms_in_use == ["eager", "eager"]
    fleet.angle = 0.0
    fleet.clock.now += 320
    for _ in range(6):
        fleet.turn()
        for worker in fleet.workers:
            worker.settle()
    fleet.turn()
    assert fleet.forms_in_use == ["compiled", "compiled"]
    assert fleet.counted("penstock_hysteresis_transitions", to="on") >= 3


@pytest.mark.parametrize(("share", "spec"), [(0.0, {}), (1.0, {"deterministic": False})])
def test_there_are_no_checks_without_a_share_or_of_random_models(tmp_path: Path, share: float, spec: dict[str, Any]):
    """The setting switches them off, and a model that does not repeat its answers cannot be compared."""
    fleet = _Fleet(tmp_path, share, **spec)
    assert fleet.first.profiler.spot is None
    fleet.first.runtime.forms.use("compiled", fleet.first.runtime.forms.reference)
    calls = fleet.first.runtime.calls
    fleet.serve(5)
    assert fleet.first.runtime.calls == calls + 5


def test_share_bounds_the_batches_and_the_time(tmp_path: Path):
    """At a share of 0.1 of fast forwards one batch in ten runs again; a check of a second is followed by nine off."""
    clock, numbers = Clock(), iter([number % 10 / 10 for number in range(1000)])
    forms = Forms(lambda _: {})
    forms.use("compiled", lambda _: {})
    sampler = SpotSampler(forms, 0.1, random=lambda: next(numbers), clock=clock)
    job = AnsweredJob("a", {"x": np.zeros((1, WIDTH))}, {"y": np.zeros((1, WIDTH))})
    batch = BatchObservation(1, 0, 0.1, lambda _: [job], forms.generation)
    taken = 0
    for _ in range(1000):
        sampler.offer(batch)
        taken += sampler.take() is not None
    assert taken == 100
    numbers = iter([0.0] * 100)
    sampler.took(1.0)
    for _ in range(89):
        clock.now += 0.1
        sampler.offer(batch)
        assert sampler.take() is None
    clock.now += 0.2
    assert sampler.take() is not None


def test_batch_of_an_earlier_form_is_not_compared():
    """Between the batch and its check the form was replaced: its answers say nothing about the new one."""
    forms = Forms(lambda _: {})
    forms.use("compiled", lambda _: {})
    sampler = SpotSampler(forms, 1.0, random=lambda: 0.0, clock=Clock())
    job = AnsweredJob("a", {}, {})
    sampler.offer(BatchObservation(1, 0, 0.1, lambda _: [job], forms.generation))
    forms.use("bf16", lambda _: {})
    assert sampler.take() is None
    sampler.offer(BatchObservation(1, 0, 0.1, lambda _: [job], 1))
    assert sampler.take() is None


def test_candidate_that_errs_in_its_trial_is_one_alert(tmp_path: Path):
    """Wrong answers and an exception are failures; a form that is only slow is none. A broken hook changes nothing."""
    clock, alerts, got = Clock(), Alerts(), list[Alert]()

    def broken(_: Alert) -> None:
        raise RuntimeError("the pager is gone")

    alerts.register("broken", broken)
    alerts.register("sound", got.append)
    forms = {
        "compiled": Form(lambda rows: rows[:, ::-1].copy()),
        "prepacked": Form(lambda rows: rows, cost_s=5.0),
        "bf16": Form(lambda rows: rows, fails=ValueError("no such operator")),
    }
    worker = OptimizerHarness(tmp_path, Rotation(clock, forms), clock, InferenceConfig(max_level=3))
    worker.optimizer._alerts = alerts
    worker.serve(90)
    worker.settle()
    assert {step for step, action in worker.decided() if action == "refused"} == set(forms)
    told = sorted((alert.kind, alert.optimisation) for alert in got)
    assert told == [("gate", "bf16"), ("gate", "compiled")]
    assert alerts.count("broken", "failed") == 2
