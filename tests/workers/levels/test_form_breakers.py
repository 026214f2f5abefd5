"""A form that fails on one worker serves on none, and returns only through a probe that the gate judges.

Two optimizers with one model each share their breakers in memory; the test is every thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.broker.breakers import BreakerReading
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array
from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.fallback import FallbackChain
from penstock.safety.hysteresis import HysteresisLimits, StateChange
from penstock.safety.orchestrator import replayed
from penstock.safety.validators import Verdict
from penstock.workers.levels.decision_audit import audit_decision
from penstock.workers.levels.form_breakers import FormBreakers
from tests.safety.audits import KEY
from tests.workers.levels.fake_model import Clock, Form, Rotation
from tests.workers.levels.test_optimizer import OptimizerHarness

FORM = "rotation/1:compiled"
MIN_OFF_S = 300.0


class _Breakers(MemoryBreakers):
    """Breakers whose broker can be away."""

    is_away = False

    def breakers(self, model: str) -> BreakerReading:
        if self.is_away:
            raise BrokerUnavailable("away")
        return super().breakers(model)


class _Fleet:
    """Two workers of one model, whose compiled form raises or answers wrongly when the test says so."""

    def __init__(self, home: Path) -> None:
        self.clock = Clock()
        self.is_broken = self.is_wrong = False
        self.breakers = _Breakers(lambda: int(self.clock.now * 1000))
        self.first, self.second = (self._worker(home / name) for name in ("first", "second"))
        for worker in (self.first, self.second):
            worker.serve(61)
            worker.settle()
        self.turn()

    def _worker(self, home: Path) -> OptimizerHarness:
        runtime = Rotation(self.clock, {"compiled": Form(self._change, cost_s=0.25)})
        config = InferenceConfig.model_validate({"max_level": 2})
        log = AuditLogger(config=AuditConfig(home / "audit", KEY))
        audit = partial(audit_decision, log)
        return OptimizerHarness(home, runtime, self.clock, config, breakers=self.breakers, audit=audit)

    def replayed(self, worker: OptimizerHarness) -> set[str]:
        """The optimisations that are on here, by the files of the audit log alone."""
        states = replayed(AuditLogger(config=AuditConfig(worker.home / "audit", KEY)).get_entries_since(0))
        return {key.optimization for key, state in states.items() if state.is_on}

    def _change(self, rows: Array) -> Array:
        if self.is_broken:
            raise RuntimeError("a kernel is gone")
        return rows + 1 if self.is_wrong else rows

    def turn(self) -> None:
        """The breakers' threads exchange what they know; nobody else's clock goes on."""
        for worker in (self.first, self.second, self.first):
            assert worker.optimizer._breakers is not None
            worker.optimizer._breakers.shared.turn()

    def settle(self) -> None:
        """Exchanges and ticks until nobody has anything to do."""
        for _ in range(4):
            self.turn()
            self.first.settle()
            self.second.settle()

    @property
    def serving(self) -> list[bool]:
        """Whether each worker runs the compiled form for the next batch."""
        return [self._serves(worker) for worker in (self.first, self.second)]

    def _serves(self, worker: OptimizerHarness) -> bool:
        """The compiled form takes a quarter of the reference's second."""
        begun = self.clock.now
        worker.serve(1)
        return self.clock.now - begun < 1


@pytest.fixture
def fleet(tmp_path: Path) -> _Fleet:
    return _Fleet(tmp_path)


def actions(worker: OptimizerHarness) -> list[Any]:
    return [action for step, action in worker.decided() if step == "compiled"]


def open_breakers(worker: OptimizerHarness) -> float:
    (family,) = [each for each in worker.metrics.collect() if each.name == "penstock_breaker_open"]
    return sum(sample.value for sample in family.samples)


def test_a_form_that_fails_on_one_worker_serves_on_none(fleet: _Fleet):
    """Both workers record that it is off, the batch that failed is answered, and the answers stay right."""
    assert fleet.serving == [True, True]
    fleet.is_broken = True
    assert len(fleet.first.serve(1)) == 32
    fleet.turn()
    assert fleet.second.runtime.forms.name == "eager"
    assert fleet.serving == [False, False]
    assert actions(fleet.first) == actions(fleet.second) == ["enabled", "disabled"]
    assert fleet.second.records[-1]["criterion"] == "its circuit breaker opened"
    assert fleet.second.records[-1]["reason"] == "RuntimeError: a kernel is gone"
    assert (open_breakers(fleet.first), open_breakers(fleet.second)) == (1, 1)
    fleet.settle()
    assert actions(fleet.second) == ["enabled", "disabled"], "nobody tries an optimization that is off"


def test_it_returns_after_its_time_by_one_probe_and_the_gate_of_each_worker(fleet: _Fleet):
    """Three trials of one worker pass; then each worker has a decision of its own to switch it on."""
    fleet.is_broken = True
    fleet.first.serve(1)
    fleet.turn()
    fleet.is_broken = False
    fleet.clock.now += MIN_OFF_S - 10
    fleet.settle()
    assert fleet.serving == [False, False]
    fleet.clock.now += 20
    fleet.settle()
    assert fleet.serving == [True, True]
    assert actions(fleet.first) == actions(fleet.second) == ["enabled", "disabled", "enabled"]
    assert (open_breakers(fleet.first), open_breakers(fleet.second)) == (0, 0)


@pytest.mark.parametrize("fault", ["is_broken", "is_wrong"])
def test_a_probe_that_fails_keeps_it_off(fleet: _Fleet, fault: str):
    """A form that still raises, or that answers wrongly now, is judged on golden jobs: no client meets it."""
    fleet.is_broken = True
    fleet.first.serve(1)
    fleet.turn()
    fleet.is_broken = False
    setattr(fleet, fault, True)
    opened = fleet.breakers.breakers("rotation").records[FORM].epoch
    fleet.clock.now += MIN_OFF_S + 10
    fleet.settle()
    record = fleet.breakers.breakers("rotation").records[FORM]
    assert (record.circuit, record.epoch) == ("open", opened + 1)
    assert fleet.serving == [False, False]
    assert actions(fleet.first) == ["enabled", "disabled"]


def test_a_form_without_a_fallback_is_stopped_by_its_breaker(fleet: _Fleet):
    """Its jobs fail; at the third failure within a minute every worker goes back to the reference (AR-023)."""
    fleet.first.runtime.forms.chain = FallbackChain(("micro-batched", "plain"))
    fleet.is_broken = True
    for _ in range(3):
        assert fleet.second.runtime.forms.name == "compiled"
        with pytest.raises(RuntimeError, match="a kernel is gone"):
            fleet.first.serve(1)
        fleet.turn()
    assert fleet.serving == [False, False]
    assert actions(fleet.first) == actions(fleet.second) == ["enabled", "disabled"]


def test_the_plain_path_serves_while_the_breakers_cannot_be_read(fleet: _Fleet):
    """A second without a reading, and the reference answers; the form is back with the next reading."""
    fleet.breakers.is_away = True
    fleet.clock.now += 1.5
    fleet.turn()
    assert fleet.serving == [False, False]
    assert actions(fleet.first) == ["enabled"], "nothing was decided about the form"
    fleet.breakers.is_away = False
    fleet.turn()
    assert fleet._serves(fleet.first)


def test_a_worker_that_starts_later_does_not_use_what_is_off(fleet: _Fleet, tmp_path: Path):
    """It has never seen the failure."""
    fleet.is_broken = True
    fleet.first.serve(1)
    fleet.turn()
    fleet.is_broken = False
    third = fleet._worker(tmp_path / "third")
    third.serve(61)
    third.settle()
    assert third.optimizer._breakers is not None
    third.optimizer._breakers.shared.turn()
    third.settle()
    assert third.runtime.forms.name == "eager"
    assert not fleet._serves(third)


def test_audit_log_alone_gives_what_each_worker_runs(fleet: _Fleet):
    """AR-029: on, off by the breaker of another worker, on again; at each moment the log on disk says so."""

    def running(worker: OptimizerHarness) -> set[str]:
        return {step["step"] for step in worker.entry["steps"] if step["state"] == "on"}

    def check(*, is_on: bool) -> None:
        for worker in (fleet.first, fleet.second):
            assert fleet.replayed(worker) == running(worker)
            assert ("compiled" in running(worker)) is is_on

    check(is_on=True)
    fleet.is_broken = True
    fleet.first.serve(1)
    fleet.turn()
    check(is_on=False)
    fleet.is_broken = False
    fleet.clock.now += MIN_OFF_S + 10
    fleet.settle()
    check(is_on=True)


# A simulated day

DAY_S = 86_400


class _Day:
    """Two workers whose form flaps, second by second. Each of them tells its own changes."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.store = MemoryBreakers(lambda: int(self.now_s * 1000))
        self.changes: list[list[StateChange]] = [[], []]
        self.workers = [self._worker(told) for told in self.changes]
        for worker in self.workers:
            worker.switched_on(FORM)

    def _worker(self, told: list[StateChange]) -> FormBreakers:
        return FormBreakers(
            self.store,
            lambda: ["rotation"],
            lambda name, record: None,
            lambda: self.now_s,
            on_transition=lambda name, change: told.append(change),
        )

    def live(self, second: Callable[[FormBreakers, int], None]) -> None:
        """A day; a granted probe passes, and a form whose breaker is closed is switched on by the gate."""
        for number in range(DAY_S):
            for worker in self.workers:
                worker.shared.turn()
                if probe := worker.take_probe(FORM):
                    while worker.judged(FORM, probe, Verdict.PASS, ""):
                        pass
                elif not worker.is_open(FORM) and worker.admits(FORM):
                    worker.switched_on(FORM)
                    second(worker, number)
                worker.advance(FORM)
            self.now_s += 1


_draws = random.Random(15)
DRAWS = [_draws.random() for _ in range(DAY_S)]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda worker, _: worker.trip(FORM, "it raised"), id="trips-at-once"),
        pytest.param(lambda worker, _: worker.observed(FORM, Verdict.FAIL, "it drifts"), id="fails-softly"),
        pytest.param(lambda worker, _: worker.failed(FORM, "a batch failed"), id="fails-batches"),
        pytest.param(
            lambda worker, number: worker.trip(FORM, "chance") if DRAWS[number] < 0.01 else None, id="by-chance"
        ),
    ],
)
def test_flapping_day_changes_a_form_rarely(second: Callable[[FormBreakers, int], None]):
    """On each worker: at most one change per minimum time off, and never two returns within one."""
    day = _Day()
    day.live(second)
    limits = HysteresisLimits()
    for changes in day.changes:
        # The first one is the start of the day.
        assert len(changes) - 1 <= DAY_S / limits.min_off_s
        returns = [change.at_s for change in changes if change.is_on]
        assert all(later - earlier >= limits.min_off_s for earlier, later in pairwise(returns))
        assert len(changes) > 20, "the form did flap"
