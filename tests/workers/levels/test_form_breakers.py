"""A form that fails on one worker serves on none, and returns only through a probe that the gate judges.

Two optimizers with one model each share their breakers in memory; the test is every thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.broker.breakers import BreakerLimits, BreakerReading
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.settings_sections import InferenceConfig, SafetyConfig
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

    def __init__(self, home: Path, **safety: float) -> None:
        self.clock = Clock()
        self._config = InferenceConfig.model_validate({"max_level": 2, "safety": safety})
        self.is_broken = self.is_wrong = False
        self.breakers = _Breakers(lambda: int(self.clock.now * 1000))
        self.first, self.second = (self._worker(home / name) for name in ("first", "second"))
        for worker in (self.first, self.second):
            worker.serve(61)
            worker.settle()
        self.turn()

    def _worker(self, home: Path) -> OptimizerHarness:
        runtime = Rotation(self.clock, {"compiled": Form(self._change, cost_s=0.25)})
        log = AuditLogger(config=AuditConfig(home / "audit", KEY))
        audit = partial(audit_decision, log)
        return OptimizerHarness(home, runtime, self.clock, self._config, breakers=self.breakers, audit=audit)

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


class _Worker:
    """The breakers of one worker that has used the form, stepped by the test."""

    def __init__(self, **safety: float) -> None:
        self.now_s = 1000.0
        self.store = MemoryBreakers(lambda: int(self.now_s * 1000))
        self.clock: Callable[[], float] = lambda: self.now_s
        self.config = SafetyConfig.model_validate(safety)
        self.breakers = self._opened([FORM])
        self.breakers.switched_on(FORM)
        self.breakers.shared.turn()

    def _opened(self, forms: Sequence[str]) -> FormBreakers:
        return FormBreakers(
            self.store,
            lambda: ["rotation"],
            lambda name, record: None,
            self.clock,
            config=self.config,
            forms=lambda: forms,
        )

    def beside(self, forms: Sequence[str] = (FORM,)) -> _Worker:
        """Another worker that has just started, with the same clock and the same breakers."""
        other = copy(self)
        other.breakers = other._opened(forms)
        return other

    def fail(self) -> None:
        """The form fails here."""
        self.breakers.trip(FORM, "it raised")
        self.breakers.shared.turn()

    def come_back(self, prober: FormBreakers) -> None:
        """The probe passes on this worker, and the gate switches the form on."""
        probe = prober.take_probe(FORM)
        assert probe
        while prober.judged(FORM, probe, Verdict.PASS, ""):
            pass
        for each in (prober, self.breakers):
            each.shared.turn()
        self.breakers.switched_on(FORM)

    @property
    def pause_s(self) -> float:
        """How long the shared record keeps the form off."""
        record = self.store.breakers("rotation").records[FORM]
        return (record.retry_ms - record.opened_ms) / 1000


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
    """It has never seen the failure. It does not even build the form, and takes part in its probes later."""
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
    assert (actions(third), third.optimizer.tick()) == ([], False)
    fleet.clock.now += MIN_OFF_S + 10
    for _ in range(3):
        third.optimizer._breakers.shared.turn()
        third.settle()
    assert (actions(third), fleet._serves(third)) == (["enabled"], True)


def test_form_is_tried_while_the_breakers_cannot_be_asked_about(tmp_path: Path):
    """Its trial needs no broker, and no job comes to it before its breaker was read."""
    fleet = _Fleet(tmp_path)
    fleet.breakers.is_away = True
    third = fleet._worker(tmp_path / "third")
    third.serve(61)
    third.settle()
    assert (actions(third), fleet._serves(third)) == (["enabled"], False)
    fleet.breakers.is_away = False
    assert third.optimizer._breakers is not None
    third.optimizer._breakers.shared.turn()
    assert fleet._serves(third)


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


# The settings


def back_after(fleet: _Fleet, seconds: float) -> list[bool]:
    """Whether each worker uses the form again so long after it failed on the first one."""
    fleet.is_broken = True
    fleet.first.serve(1)
    fleet.turn()
    fleet.is_broken = False
    fleet.clock.now += seconds
    fleet.settle()
    return fleet.serving


@pytest.mark.parametrize(("min_off_s", "is_back"), [(1, True), (300, False)])
def test_shortest_time_off_is_that_of_the_settings(tmp_path: Path, min_off_s: float, is_back: bool):
    """AR-075: min_off_s of a second lets the form come back after two."""
    fleet = _Fleet(tmp_path, min_off_s=min_off_s)
    assert back_after(fleet, 2) == [is_back, is_back]


@pytest.mark.parametrize(("max_off_s", "pauses"), [(3600, [300, 600, 1200]), (400, [300, 400, 400])])
def test_time_off_doubles_up_to_the_longest_of_the_settings(tmp_path: Path, max_off_s: float, pauses: list[float]):
    """max_off_s bounds it. The shared record has the same time, for workers that know nothing of the form."""
    fleet = _Fleet(tmp_path, max_off_s=max_off_s)
    found = []
    for pause in pauses:
        assert back_after(fleet, 0) == [False, False]
        record = fleet.breakers.breakers("rotation").records[FORM]
        found.append((record.retry_ms - record.opened_ms) / 1000)
        fleet.clock.now += pause
        fleet.settle()
        assert fleet.serving == [True, True]
    assert found == pytest.approx(pauses, abs=1)


@pytest.mark.parametrize("min_passes", [1, 5])
def test_trials_of_a_probe_are_those_of_the_settings(min_passes: int):
    """min_passes: so many in a row close the breaker."""
    worker = _Worker(min_passes=min_passes)
    worker.fail()
    worker.now_s += MIN_OFF_S
    worker.breakers.shared.turn()
    probe, trials = worker.breakers.take_probe(FORM), 1
    while worker.breakers.judged(FORM, probe, Verdict.PASS, ""):
        trials += 1
    worker.breakers.shared.turn()
    assert (trials, worker.breakers.is_open(FORM)) == (min_passes, False)


@pytest.mark.parametrize(
    ("safety", "opens"),
    [
        ({}, True),
        ({"breaker_failures": 4}, False),
        ({"breaker_window_s": 10}, False),
    ],
)
def test_failures_that_open_a_breaker_are_those_of_the_settings(safety: dict[str, float], opens: bool):
    """breaker_failures within breaker_window_s: here three within 20 seconds."""
    worker = _Worker(**safety)
    for _ in range(3):
        worker.breakers.failed(FORM, "a batch failed")
        worker.breakers.shared.turn()
        worker.now_s += 10
    assert worker.breakers.is_open(FORM) is opens


@pytest.mark.parametrize(("probe_lease_s", "gets_it"), [(600, False), (20, True)])
def test_lease_of_a_probe_is_that_of_the_settings(probe_lease_s: float, gets_it: bool):
    """probe_lease_s: when a worker dies with the probe, another one has it after so long."""
    dead, other = (worker := _Worker(probe_lease_s=probe_lease_s)), worker.beside()
    dead.fail()
    other.breakers.shared.turn()
    worker.now_s += MIN_OFF_S
    dead.breakers.shared.turn()
    assert dead.breakers.take_probe(FORM)
    worker.now_s += 30
    other.breakers.shared.turn()
    assert bool(other.breakers.take_probe(FORM)) is gets_it


# A restart


def test_worker_that_restarts_waits_for_the_doubled_time():
    """The form went off again soon after its return, so it is off for 600 s: also for a worker that starts then."""
    worker = _Worker()
    for pause in (300, 600):
        worker.fail()
        restarted = worker.beside()
        restarted.breakers.shared.turn()
        worker.now_s += pause - 2
        restarted.breakers.shared.turn()
        assert not restarted.breakers.take_probe(FORM)
        worker.now_s += 2
        restarted.breakers.shared.turn()
        worker.come_back(restarted.breakers)


@pytest.mark.parametrize(("on_s", "pause_s"), [(10, 600), (400, 300)])
def test_worker_that_restarts_while_the_form_is_on_doubles_its_time(on_s: float, pause_s: float):
    """It knows from the shared record that the form returned a short time ago, or long ago."""
    worker = _Worker()
    worker.fail()
    worker.now_s += 300
    worker.breakers.shared.turn()
    worker.come_back(worker.breakers)
    worker.now_s += on_s
    restarted = worker.beside()
    restarted.breakers.switched_on(FORM)
    restarted.breakers.shared.turn()
    restarted.fail()
    assert restarted.pause_s == pause_s


def test_worker_that_restarts_while_the_form_is_off_waits_for_the_rest():
    """200 of the 300 s are over when it starts."""
    worker = _Worker()
    worker.fail()
    worker.now_s += 200
    restarted = worker.beside().breakers
    restarted.shared.turn()
    restarted.shared.turn()
    worker.now_s += 99
    restarted.shared.turn()
    assert not restarted.take_probe(FORM)
    worker.now_s += 1
    restarted.shared.turn()
    assert restarted.take_probe(FORM)


def test_form_that_a_canary_refused_is_off_for_as_long_as_the_record_says():
    """The shadow opens the breaker for an hour. What fails again soon after its return is off for no shorter time."""
    worker = _Worker()
    worker.store.force_open_breaker(FORM, "the canary says FAIL", "a", BreakerLimits(open_ms=3_600_000))
    worker.breakers.shared.turn()
    worker.now_s += 3599
    worker.breakers.shared.turn()
    assert not worker.breakers.take_probe(FORM)
    worker.now_s += 1
    worker.breakers.shared.turn()
    worker.come_back(worker.breakers)
    worker.now_s += 10
    worker.fail()
    assert worker.pause_s == 3600


def test_worker_probes_the_forms_that_it_has():
    """Nobody else would carry the probe out, and the worker that could would wait for its lease."""
    worker = _Worker()
    other = worker.beside(forms=["rotation/2:compiled"])
    for each in (worker, other):
        each.breakers.shared.turn()
    worker.fail()
    worker.store.force_open_breaker("rotation/1:candidate", "drift", "a", BreakerLimits(open_ms=1))
    other.breakers.shared.turn()
    worker.now_s += MIN_OFF_S
    other.breakers.shared.turn()
    worker.breakers.shared.turn()
    records = worker.store.breakers("rotation").records
    assert {name: record.circuit for name, record in records.items()} == {
        FORM: "half-open",
        "rotation/1:candidate": "open",
    }
    assert worker.breakers.take_probe(FORM)


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
            config=SafetyConfig(),
            forms=lambda: [FORM],
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
