"""Rollouts over drains in this process, with a real registry and state store: the driver, its death, its refusals.

AR-007, AR-092, AR-093, AR-094, AR-023 (rollout percentage).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

import msgspec
import pytest

from penstock.compose.deploy import Deployer
from penstock.compose.experiments.changes import Experiments
from penstock.compose.experiments.gradual import RolloutDriver, begin_rollout, rollout_report
from penstock.compose.rollout.active_version import active_deployment
from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.breakers import CANDIDATE, BreakerLimits, breaker_name
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.catalog.tables import Experiment
from penstock.registry.errors import (
    BrokerUnavailable,
    InvalidInput,
    ModelNotReady,
    PenstockError,
    TransitionConflict,
    TransitionRefused,
    UnknownModel,
)
from penstock.registry.package import load_package
from penstock.safety.alerts import Alert, Alerts
from penstock.safety.arm_figures import ArmFigures, observation_field
from penstock.safety.audit_chain import AuditEntry
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.experiment_replay import replayed_experiments
from penstock.safety.operator_key import OperatorKey
from penstock.safety.rollout import ROLLOUT_DECISION, STEPS, Action, HealthGate, RolloutPlan
from penstock.workers.observe.metrics import InferenceMetrics
from tests.compose.test_deploy import Site
from tests.compose.test_deploy import site as site
from tests.conformance.jobs import ROOMY
from tests.packages import write_package
from tests.servers import wait_until

NOW = 1_800_000_000.0
PLAN = RolloutPlan(dwell_s=60, gate=HealthGate(min_samples=10))


class Rollouts:
    """An operator of the site with a clock of its own, and figures that the test writes in the place of workers."""

    def __init__(self, site: Site, deployer: Deployer | None = None) -> None:
        self.site = site
        self.now = NOW
        self.log: list[tuple[str, Mapping[str, Any]]] = []
        self.progress: list[str] = []
        self.metrics = InferenceMetrics((1.0,))
        self.experiments = Experiments(
            deployer or site.deployer, lambda _model, result, details: self.log.append((result, details))
        )
        self.driver = self.new_driver()

    def new_driver(self) -> RolloutDriver:
        """A driver with the clock and the metrics of this operator."""
        return RolloutDriver(
            self.experiments,
            self.site.model,
            clock=lambda: self.now,
            pause=self._pass,
            on_progress=self.progress.append,
            on_decision=self.metrics.rollout_decision,
        )

    def decided(self) -> dict[str, float]:
        """The decisions about version 2 that the metrics have, by action."""
        (family,) = [each for each in self.metrics.collect() if each.name == "penstock_rollout_decisions"]
        labels = {"model_name": self.site.model, "model_version": "2", "endpoint": ""}
        return {each.labels["action"]: each.value for each in family.samples if labels.items() <= each.labels.items()}

    def _pass(self, seconds: float) -> None:
        """A pause of the driver: time passes, and both versions answer jobs."""
        self.now += 30
        self.observe()

    def begin(self, to: str = "2", plan: RolloutPlan = PLAN, **options: Any) -> Experiment:
        return begin_rollout(self.experiments, self.site.model, to, plan, now=self.now, **options)

    def observe(self, *, jobs: int = 50, errors: int = 0) -> None:
        """Both versions have answered so many jobs in the present epoch; the candidate with so many errors."""
        found = self.experiments.last(self.site.model, "rollout")
        active = active_deployment(self.site.broker, self.site.model)
        assert active is not None
        arms = {label: ArmFigures(jobs=jobs, errors=errors * (label == "2")) for label in ("1", "2")}
        for figures in arms.values():
            figures.add_latencies([0.01] * (jobs - figures.errors))
        field = observation_field(active.epoch, "w0:a")
        self.site.broker.observe(self.site.model, found.experiment, field, msgspec.json.encode(arms), 60_000)

    def share(self) -> float:
        """The candidate's share in the record of the claims; 0 without an experiment."""
        deployment = active_deployment(self.site.broker, self.site.model)
        assert deployment is not None
        return deployment.routing.arms[0].weight if deployment.routing is not None else 0.0

    def found(self) -> Experiment:
        return self.experiments.last(self.site.model, "rollout")


@pytest.fixture
def rollouts(site: Site) -> Rollouts:
    """A worker runs; version 1 is in production, 2 in staging."""
    site.start()
    site.register("1", "2")
    site.deployer.promote(site.model, "1")
    return Rollouts(site)


def test_healthy_candidate_is_promoted_over_all_steps(rollouts: Rollouts):
    """Every step is in the record of the claims, in the registry's history and in the audit log."""
    site = rollouts.site
    begun = rollouts.begin()
    assert (begun.status, rollouts.share()) == ("running", 0.01)
    assert site.deployer.is_wanted(site.registry.find(site.model, "2"))
    ended = rollouts.driver.run()
    assert ended.status == "completed"
    assert site.registry.find(site.model).version == "2"
    assert site.stage.answer() == ("2", 10.0)
    routed = [each for each in site.registry.history(site.model) if each.action == "route"]
    assert [each.reason.partition(":")[0] for each in routed] == [
        "rollout of 2 begins with 1 %",
        *(f"2 advances to {step:g} %" for step in STEPS[1:]),
    ]
    assert [result for result, _ in rollouts.log] == ["begin", *["advance"] * 5, "complete"]
    assert [details["percent"] for result, details in rollouts.log if result == "advance"] == list(STEPS[1:])
    assert rollouts.log[1][1]["evidence"]["candidate_jobs"] == 50
    # AR-099: each decision once, and none for the looks between them.
    assert rollouts.decided() == {"advance": 5, "complete": 1}


def test_jobs_are_divided_by_workers_from_the_first_step_on(rollouts: Rollouts):
    """Half of the jobs at 50 %, none after the stop; the arms were loaded before the first of them."""
    site = rollouts.site
    rollouts.begin(plan=replace_steps(50, 100))
    answers = [site.stage.answer() for _ in range(40)]
    assert {version for version, _ in answers} == {"1", "2"}
    assert all(value == {"1": 1.0, "2": 10.0}[version] for version, value in answers)
    rollouts.experiments.stop(rollouts.found(), reason="enough")
    assert {site.stage.answer()[0] for _ in range(10)} == {"1"}
    assert site.is_wanted("2") is False


def test_shares_of_the_traffic_are_those_of_the_steps(rollouts: Rollouts):
    """AR-092: 1, 5, 10, 25, 50 and 100 percent of the jobs that a worker has answered, over its real claims.

    A share may miss its step by five sigma. The clients have what each version answers.
    """
    lenient = HealthGate(10, max_error_increase=0.9, max_mean_ratio=1e6, max_p95_ratio=1e6)
    rollouts.begin(plan=RolloutPlan(dwell_s=60, gate=lenient))
    shares = []
    for percent in STEPS:
        expected = percent / 100
        assert rollouts.share() == expected
        shares.append(candidates_share(rollouts.site, JOBS_OF_A_STEP))
        assert abs(shares[-1] - expected) <= 5 * sqrt(expected * (1 - expected) / JOBS_OF_A_STEP)
        if percent < 100:
            for _ in range(3):
                rollouts.driver._pause(1)
            assert rollouts.driver.turn(rollouts.found()).action is Action.ADVANCE
    assert (shares[-1], shares == sorted(set(shares))) == (1.0, True)


JOBS_OF_A_STEP = 1500


def candidates_share(site: Site, count: int) -> float:
    """The share of so many jobs that version 2 has answered."""
    stage = site.stage
    spec = load_package(stage.root / site.model / "1").spec
    jobs = [stage._builder.build(spec, {"x": [[float(number), 0, 0, 0]]}, SubmitOptions()) for number in range(count)]
    assert {receipt.outcome for receipt in site.broker.publish(site.model, jobs, ROOMY)} == {"accepted"}
    answers = [stage.result(job.job_id) for job in jobs]
    assert all(value == number * {"1": 1, "2": 10}[header.version] for number, (header, value) in enumerate(answers))
    return sum(header.version == "2" for header, _ in answers) / count


def test_driver_that_dies_loses_nothing(rollouts: Rollouts):
    """Another process goes on from the recorded step, with its dwell and its failures."""
    rollouts.begin()
    for _ in range(5):
        rollouts.driver._pause(1)
        rollouts.driver.turn(rollouts.found())
    at = rollouts.found()
    assert at.state["step"] == 2
    other = Rollouts(rollouts.site, rollouts.site.operator())
    other.now = rollouts.now + 3600
    assert other.found() == at
    assert other.driver.run().status == "completed"
    assert [details["step"] for result, details in other.log if result == "advance"] == [4, 5, 6]


def test_driver_that_dies_between_registry_and_broker_is_made_good(rollouts: Rollouts):
    """The recorded shares are activated by the next driver before it looks at anything."""
    site = rollouts.site
    begun = rollouts.begin()
    arms = tuple(
        msgspec.structs.replace(arm, weight=weight) for arm, weight in zip(begun.arms, (0.5, 0.5), strict=True)
    )
    site.registry.change_experiment(begun, replace(begun, arms=arms))
    assert rollouts.share() == 0.01
    paused = rollouts.experiments.change(
        rollouts.found(), replace(rollouts.found(), status="paused"), reason="for the test"
    )
    assert rollouts.driver.run() == paused
    assert rollouts.share() == 0.5


def test_driver_that_dies_after_the_promotion_is_made_good(rollouts: Rollouts):
    """The registry has the candidate in production; `resume` activates it."""
    site = rollouts.site
    begun = rollouts.begin()
    site.registry.promote(site.model, "2", ModelStage.PRODUCTION, completes=replace(begun, status="completed"))
    assert rollouts.share() == 0.01
    assert rollouts.driver.run().status == "completed"
    assert (rollouts.share(), site.active()) == (0.0, "2")


def test_sick_candidate_is_rolled_back_and_unloaded(rollouts: Rollouts):
    """The jobs are production's again, the decision has its evidence, and the load request is withdrawn."""
    site = rollouts.site
    rollouts.begin()
    rollouts.observe(jobs=60, errors=50)
    decision = rollouts.driver.turn(rollouts.found())
    assert decision.action is Action.ROLL_BACK
    assert (rollouts.found().status, rollouts.share(), site.active()) == ("stopped", 0.0, "1")
    assert site.is_wanted("2") is False
    assert rollouts.log[-1][0] == "roll_back"
    assert rollouts.log[-1][1]["evidence"]["candidate_errors"] == 50
    report = rollout_report(rollouts.experiments, rollouts.found(), rollouts.now)
    assert (report["status"], report["percent"], report["gate"]["verdict"]) == ("stopped", 0.0, "FAIL")


def test_sick_step_goes_back_and_its_figures_are_not_those_of_the_next(rollouts: Rollouts):
    """AR-093: hold and step back; the errors of a step do not fail the step after."""
    rollouts.begin()
    rollouts.driver._pause(1)
    rollouts.driver._pause(1)
    assert rollouts.driver.turn(rollouts.found()).action is Action.ADVANCE
    rollouts.observe(jobs=60, errors=50)
    assert rollouts.driver.turn(rollouts.found()).action is Action.STEP_BACK
    assert rollouts.share() == 0.01
    rollouts.observe()
    assert rollouts.driver.turn(rollouts.found()).gate.verdict == "PASS"
    assert rollouts.found().state["failures"] == 1


def set_policy(rollouts: Rollouts) -> None:
    """A change of the model that gives its record another epoch, and leaves the rollout as it was."""
    rollouts.site.deployer.set_policy(rollouts.site.model, "infer", {"window_ms": 5})


def test_step_after_a_change_of_the_policy_waits_for_jobs_of_its_own(rollouts: Rollouts):
    """Workers count under the epoch of the policy; the next step does not count these jobs again."""
    rollouts.begin()
    set_policy(rollouts)
    rollouts.driver._pause(1)
    rollouts.driver._pause(1)
    assert rollouts.driver.turn(rollouts.found()).action is Action.ADVANCE
    rollouts.now += 60
    decision = rollouts.driver.turn(rollouts.found())
    assert (decision.action, decision.gate.verdict) == (Action.WAIT, "INSUFFICIENT")
    assert decision.gate.evidence["candidate_jobs"] == 0
    rollouts.observe()
    assert rollouts.driver.turn(rollouts.found()).action is Action.ADVANCE


def test_a_step_that_fails_after_a_change_of_the_policy_is_one_failure(rollouts: Rollouts):
    """The errors of a step do not fail the step after, when both follow a change of the policy."""
    rollouts.begin()
    rollouts.driver._pause(1)
    rollouts.driver._pause(1)
    assert rollouts.driver.turn(rollouts.found()).action is Action.ADVANCE
    set_policy(rollouts)
    rollouts.observe(jobs=60, errors=50)
    assert rollouts.driver.turn(rollouts.found()).action is Action.STEP_BACK
    assert rollouts.driver.turn(rollouts.found()).action is Action.WAIT
    assert (rollouts.found().status, rollouts.found().state["failures"]) == ("running", 1)


def test_pause_keeps_the_share_and_ends_the_driver(rollouts: Rollouts):
    """Nothing is decided while it is paused, whatever the figures say; `resume` is a change like any other."""
    rollouts.begin()
    found = rollouts.found()
    paused = rollouts.experiments.change(found, replace(found, status="paused"), reason="the weekend")
    rollouts.observe(jobs=60, errors=60)
    assert rollouts.driver.run() == paused
    assert rollouts.share() == 0.01


def test_driver_waits_while_the_broker_is_away(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch):
    """The present step goes on; the driver says why it decides nothing."""
    rollouts.begin()
    fleet, calls = rollouts.experiments.deployer.fleet, []
    observations = fleet.observations

    def away_twice(slot: str, experiment: str) -> dict[str, bytes]:
        calls.append(slot)
        if len(calls) <= 2:
            raise BrokerUnavailable("The broker does not answer")
        return observations(slot, experiment)

    monkeypatch.setattr(fleet, "observations", away_twice)
    assert rollouts.driver.run().status == "completed"
    assert rollouts.progress[:2] == ["no decision now: The broker does not answer"] * 2


def replayed_state(rollouts: Rollouts) -> tuple[str, float]:
    """(status, the candidate's share) of the last rollout, from the audit log alone."""
    entries = [
        AuditEntry(number, float(number), ROLLOUT_DECISION, rollouts.site.model, "", result, dict(details))
        for number, (result, details) in enumerate(rollouts.log)
    ]
    state = replayed_experiments(entries)[rollouts.site.model, rollouts.found().experiment]
    return state.status, state.shares.get("2", 0.0)


def test_the_audit_log_alone_gives_the_state_of_a_rollout(rollouts: Rollouts):
    """After each decision it says what registry and claims say: a step, a step back, a pause, a stop, the promotion."""

    def check() -> None:
        status, share = replayed_state(rollouts)
        assert status == rollouts.found().status
        assert share == pytest.approx(rollouts.share())

    rollouts.begin()
    check()
    rollouts.driver._pause(1)
    rollouts.driver._pause(1)
    assert rollouts.driver.turn(rollouts.found()).action is Action.ADVANCE
    check()
    rollouts.observe(jobs=60, errors=50)
    assert rollouts.driver.turn(rollouts.found()).action is Action.STEP_BACK
    check()
    assert replayed_state(rollouts) == ("running", 0.01)
    rollouts.observe(jobs=60, errors=50)
    assert rollouts.driver.turn(rollouts.found()).action is Action.ROLL_BACK
    check()
    rollouts.begin()
    check()
    assert rollouts.driver.run().status == "completed"
    assert replayed_state(rollouts) == ("completed", 0.0)


def test_second_driver_that_comes_late_looks_again(rollouts: Rollouts):
    """Of two drivers with the same decision one is refused, and the step is taken once."""
    rollouts.begin()
    rollouts.driver._pause(1)
    rollouts.driver._pause(1)
    seen = rollouts.found()
    assert rollouts.driver.turn(seen).action is Action.ADVANCE
    with pytest.raises(TransitionConflict, match="was changed meanwhile"):
        rollouts.driver.turn(seen)
    assert rollouts.found().state["step"] == 1
    assert rollouts.decided() == {"advance": 1}


def test_decision_that_the_broker_missed_is_told_once_and_activated(
    guarded: tuple[Rollouts, MemoryBreakers, list[Alert]], monkeypatch: pytest.MonkeyPatch
):
    """The roll-back is in the registry, and the broker is away: once it is back, the candidate has no jobs."""
    rollouts, _, told = guarded
    rollouts.begin()
    rollouts.observe(jobs=60, errors=50)
    broker, shares = rollouts.site.broker, []
    activate = broker.activate

    def away_twice(*arguments: Any) -> bool:
        shares.append(rollouts.share())
        if len(shares) in (2, 3):
            raise BrokerUnavailable("The broker does not answer")
        return activate(*arguments)

    monkeypatch.setattr(broker, "activate", away_twice)
    assert rollouts.driver.run().status == "stopped"
    # At the start, for the roll-back, and for two looks: the second one reaches the broker.
    assert shares == [0.01] * 4
    assert rollouts.share() == 0.0
    assert rollouts.site.is_wanted("2") is False
    assert rollouts.decided() == {"roll_back": 1}
    assert [alert.kind for alert in told] == ["rollout"]


def replace_steps(*steps: float) -> RolloutPlan:
    return msgspec.structs.replace(PLAN, steps=steps)


def write_wider(site: Site, version: str) -> None:
    """A version whose output has another dtype."""
    spec = write_package(
        site.stage.root, site.model, "def build():\n    return lambda inputs: {'y': inputs['x']}\n", version=version
    )
    text = (spec / "model.yaml").read_text()
    (spec / "model.yaml").write_text(text.replace("name: y\n  dtype: float32", "name: y\n  dtype: float64"))


@pytest.mark.parametrize(
    ("to", "error", "expected"),
    [
        ("9", UnknownModel, "Unknown version '9'.* Expected one of: 1"),
        ("1", TransitionRefused, "is in production already"),
        ("3", TransitionRefused, "is in draft. A promote does not lead from there to production"),
        ("4", InvalidInput, r"output 'y' is float64\(batch, 4\)\. Expected float32\(batch, 4\)"),
        ("5", ModelNotReady, "no weights"),
    ],
)
def test_what_cannot_be_rolled_out_is_refused_and_nothing_changes(
    rollouts: Rollouts, to: str, error: type[PenstockError], expected: str
):
    """An unknown version, that in production, a draft, another signature, one that a worker cannot load."""
    site = rollouts.site
    write_package(
        site.stage.root, site.model, "def build():\n    return lambda inputs: {'y': inputs['x'] * 3}\n", version="3"
    )
    write_wider(site, "4")
    write_package(site.stage.root, site.model, "def build():\n    raise ValueError('no weights')\n", version="5")
    for label in ("3", "4", "5"):
        site.deployer.register(site.stage.root / site.model / label)
    for label in ("4", "5"):
        site.registry.promote(site.model, label, ModelStage.STAGING)
    before = (site.registry.history(site.model), site.broker.actives([site.model]))
    with pytest.raises(error, match=expected):
        rollouts.begin(to)
    assert (site.registry.history(site.model), site.broker.actives([site.model])) == before
    assert site.registry.experiments(site.model) == ()
    assert site.is_wanted("5") in (None, False)


def test_two_rollouts_at_once_are_refused(rollouts: Rollouts):
    """The second one is told which is under way; the first goes on."""
    rollouts.begin()
    with pytest.raises(TransitionRefused, match="is under way"):
        rollouts.begin()
    assert rollouts.share() == 0.01
    assert rollouts.found().status == "running"


def test_model_without_production_has_no_rollout(site: Site):
    """There is no version to compare with, and none to go back to."""
    site.start()
    site.register("1", "2")
    with pytest.raises(UnknownModel, match="no version in production"):
        Rollouts(site).begin()


@pytest.mark.parametrize(("percent", "first"), [("20", 0.2), ("0.5", 0.005)])
def test_rollout_percent_of_a_package_is_the_first_step(site: Site, percent: str, first: float):
    """AR-023: two versions with two values of `rollout_percent` begin with two shares of the traffic."""
    site.start()
    spec = site.stage.root / site.model / "2" / "model.yaml"
    spec.write_text(spec.read_text() + f"policy:\n  endpoints:\n    infer:\n      rollout_percent: {percent}\n")
    site.register("1", "2")
    site.deployer.promote(site.model, "1")
    rollouts = Rollouts(site)
    rollouts.begin(takes_own_steps=True)
    assert rollouts.share() == first
    rollouts.experiments.stop(rollouts.found(), reason="and with an order")
    rollouts.begin()
    assert rollouts.share() == 0.01


def test_rollout_percent_of_zero_allows_no_rollout(site: Site):
    """The author of the package has the word, unless an operator gives the steps."""
    site.start()
    spec = site.stage.root / site.model / "2" / "model.yaml"
    spec.write_text(spec.read_text() + "policy:\n  default:\n    rollout_percent: 0\n")
    site.register("1", "2")
    site.deployer.promote(site.model, "1")
    with pytest.raises(TransitionRefused, match="has rollout_percent 0 at infer, which allows no rollout"):
        Rollouts(site).begin(takes_own_steps=True)
    assert Rollouts(site).begin().status == "running"


def test_arm_of_an_open_rollout_is_not_unloaded(rollouts: Rollouts):
    """`models unload` is refused with the command that ends the rollout."""
    rollouts.begin()
    with pytest.raises(TransitionRefused, match="is an arm of an open experiment"):
        rollouts.site.deployer.unload(rollouts.site.model, "2")


def test_signing_again_keeps_the_shares(rollouts: Rollouts):
    """After a key rotation the arms share the jobs as before, and the step's figures still count."""
    site = rollouts.site
    rollouts.begin(plan=replace_steps(20, 100))
    rollouts.observe()
    epoch = active_epoch(site)
    key = OperatorKey.generate(site.stage.root.parent / "new.pem")
    operator = Deployer(
        type(site.registry)(f"sqlite:///{site.stage.root.parent}/registry.db", sign=key.sign),
        site.broker,
        states=site.store,
        sign=key.sign,
    )
    operator.sign(site.model)
    assert active_epoch(site) > epoch
    assert rollouts.share() == 0.2
    report = rollout_report(rollouts.experiments, rollouts.found(), rollouts.now)
    assert report["gate"]["evidence"]["candidate_jobs"] == 50


def active_epoch(site: Site) -> int:
    deployment = active_deployment(site.broker, site.model)
    assert deployment is not None
    return deployment.epoch


def test_worker_that_starts_during_a_rollout_has_both_arms(rollouts: Rollouts):
    """It reads the record at its start, and loads the candidate without a job that asks for it."""
    site = rollouts.site
    rollouts.begin()
    late = site.stage.start()
    wait_until(lambda: site.stage.state("2", late) == "ready", 10, "the candidate is loaded")


@pytest.fixture
def guarded(rollouts: Rollouts, site: Site) -> tuple[Rollouts, MemoryBreakers, list[Alert]]:
    """Rollouts whose candidates have breakers, and the alerts about them."""
    breakers, told = MemoryBreakers(lambda: 0), list[Alert]()
    alerts = Alerts()

    def broken(_: Alert) -> None:
        raise RuntimeError("the pager is gone")

    alerts.register("broken", broken)
    alerts.register("test", told.append)
    rollouts.experiments = Experiments(site.deployer, breakers=breakers, alerts=alerts)
    rollouts.driver = rollouts.new_driver()
    return rollouts, breakers, told


def test_open_breaker_of_the_candidate_ends_its_rollout(guarded: tuple[Rollouts, MemoryBreakers, list[Alert]]):
    """The shadow found drift: the candidate loses its traffic at the next look, whatever its figures are. One alert."""
    rollouts, breakers, told = guarded
    rollouts.begin()
    assert rollouts.share() > 0
    rollouts.driver.turn(rollouts.found())
    name = breaker_name(rollouts.site.model, "2", CANDIDATE)
    breakers.force_open_breaker(name, "drift: y.min_cosine", "a", BreakerLimits())
    ended = rollouts.driver.run()
    assert (ended.status, rollouts.share()) == ("stopped", 0.0)
    assert [(alert.kind, alert.version) for alert in told] == [("rollout", "2")]
    assert "drift: y.min_cosine" in told[0].reason
    with pytest.raises(TransitionRefused, match="is open: drift: y"):
        rollouts.begin()
    breakers.reset_breaker(name)
    assert rollouts.begin().status == "running"


def test_rollout_that_is_rolled_back_is_one_alert(guarded: tuple[Rollouts, MemoryBreakers, list[Alert]]):
    """Its gate fails in the first step. A hook that raises does not keep it from ending."""
    rollouts, _, told = guarded
    rollouts.begin()
    rollouts.now += 61
    rollouts.observe(jobs=100, errors=60)
    rollouts.driver.turn(rollouts.found())
    assert rollouts.found().status == "stopped"
    assert [alert.kind for alert in told] == ["rollout"]


def test_each_step_back_is_one_alert(guarded: tuple[Rollouts, MemoryBreakers, list[Alert]]):
    """Two steps back and the end are three failures; looks without a decision, and two drivers, send no other."""
    rollouts, _, told = guarded
    rollouts.begin()
    for number in range(2):
        for _ in range(3):
            rollouts.driver._pause(1)
        assert rollouts.driver.turn(rollouts.found()).action is Action.ADVANCE
        rollouts.observe(jobs=60, errors=50)
        seen = rollouts.found()
        assert rollouts.driver.turn(seen).action is Action.STEP_BACK
        with pytest.raises(TransitionConflict):
            rollouts.driver.turn(seen)
        assert rollouts.driver.turn(rollouts.found()).action is Action.WAIT
        assert [alert.reason.partition(":")[0] for alert in told] == ["2 goes back to 1 %"] * (number + 1)
    assert {(alert.kind, alert.version) for alert in told} == {("rollout", "2")}
    rollouts.observe(jobs=60, errors=50)
    assert rollouts.driver.turn(rollouts.found()).action is Action.ROLL_BACK
    assert [alert.reason.partition(":")[0] for alert in told] == ["2 goes back to 1 %"] * 2 + ["2 is rolled back"]
    assert len({alert.id for alert in told}) == 3
    assert rollouts.decided() == {"advance": 2, "step_back": 2, "roll_back": 1}
