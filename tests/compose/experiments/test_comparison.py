"""A/B experiments over drains in this process, with a real registry: what is refused, and the order of the records.

AR-006, AR-085, and the bad input of an experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from penstock.compose.experiments.changes import Experiments
from penstock.compose.experiments.comparison import begin_comparison, comparison_report
from penstock.compose.experiments.gradual import begin_rollout
from penstock.compose.rollout.active_version import active_deployment
from penstock.registry.broker.breakers import CANDIDATE, BreakerLimits, breaker_name
from penstock.registry.catalog.stages import ModelStage
from penstock.registry.catalog.tables import Experiment
from penstock.registry.errors import (
    BrokerUnavailable,
    ConfigurationError,
    InvalidInput,
    PenstockError,
    TransitionRefused,
    UnknownModel,
)
from penstock.safety.ab_testing import ExperimentPlan
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.rollout import RolloutPlan
from tests.compose.experiments.test_gradual import write_wider
from tests.compose.test_deploy import Site
from tests.compose.test_deploy import site as site

HALVES = {"1": 0.5, "2": 0.5}


class Decision(NamedTuple):
    """An entry of the audit log, and what was in force when it was written."""

    result: str
    details: Mapping[str, Any]
    is_divided: bool
    experiments: int


class Comparisons:
    """An operator of the site. Version 1 is in production, 2 in staging."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.breakers = MemoryBreakers(lambda: 0)
        self.log: list[Decision] = []
        self.experiments = Experiments(site.deployer, self._record, breakers=self.breakers)

    def _record(self, _model: str, result: str, details: Mapping[str, Any]) -> None:
        count = len(self.site.registry.experiments(self.site.model))
        self.log.append(Decision(result, details, self.is_divided, count))

    def begin(self, weights: Mapping[str, float], plan: ExperimentPlan | None = None) -> Experiment:
        return begin_comparison(self.experiments, self.site.model, weights, plan or ExperimentPlan(), is_sticky=False)

    def begin_rollout(self) -> Experiment:
        return begin_rollout(self.experiments, self.site.model, "2", RolloutPlan(), now=0.0)

    def open_breaker(self) -> None:
        name = breaker_name(self.site.model, "2", CANDIDATE)
        self.breakers.force_open_breaker(name, "the canary says FAIL: y", "a", BreakerLimits())

    @property
    def is_divided(self) -> bool:
        """Whether the record of the claims divides the jobs."""
        deployment = active_deployment(self.site.broker, self.site.model)
        return deployment is not None and deployment.routing is not None

    def state(self) -> tuple[Any, ...]:
        """All that a refusal must leave as it is."""
        model = self.site.model
        stored = (self.site.registry.history(model), self.site.registry.experiments(model))
        return (*stored, self.site.broker.actives([model]), self.site.is_wanted("2") or False, list(self.log))


@pytest.fixture
def comparisons(site: Site) -> Comparisons:
    site.start()
    site.register("1", "2")
    site.deployer.promote(site.model, "1")
    return Comparisons(site)


@pytest.mark.parametrize(
    ("weights", "error", "expected"),
    [
        ({"1": 0.5, "2": 0.6}, InvalidInput, r"The weights add up to 1\.1, expected 1"),
        ({"1": 0.5, "2": 0.25}, InvalidInput, r"The weights add up to 0\.75, expected 1"),
        ({"1": 1.5, "2": -0.5}, InvalidInput, "has the weight 1.5, expected a number 0 to 1"),
        ({"1": 1.0}, InvalidInput, "There are 1 arms. Expected 2 to 8"),
        ({"2": 0.5, "3": 0.5}, InvalidInput, "Expected 1 among them: it is in production"),
        ({"1": 0.5, "9": 0.5}, UnknownModel, "Unknown version '9'.* Expected one of: 1"),
        ({"1": 0.5, "3": 0.5}, InvalidInput, r"output 'y' is float64\(batch, 4\)\. Expected float32\(batch, 4\)"),
    ],
    ids=["above-1", "below-1", "out-of-range", "one-arm", "without-production", "unknown", "signature"],
)
def test_bad_arms_change_nothing(
    comparisons: Comparisons, weights: dict[str, float], error: type[PenstockError], expected: str
):
    """Weights that divide no traffic, unknown versions, another signature: the message says what is expected."""
    site = comparisons.site
    write_wider(site, "3")
    site.deployer.register(site.stage.root / site.model / "3")
    site.registry.promote(site.model, "3", ModelStage.STAGING)
    before = comparisons.state()
    with pytest.raises(error, match=expected):
        comparisons.begin(weights)
    assert comparisons.state() == before


@pytest.mark.parametrize("begin", [Comparisons.begin_rollout, lambda each: each.begin(HALVES)], ids=["rollout", "ab"])
def test_second_experiment_is_refused(comparisons: Comparisons, begin: Callable[[Comparisons], Experiment]):
    """Whichever is open: the message names the command that ends it, and its shares stay."""
    begun = begin(comparisons)
    before = comparisons.state()
    for again in (comparisons.begin_rollout, lambda: comparisons.begin(HALVES)):
        with pytest.raises(TransitionRefused, match=f"is under way.* Expected `penstock {begun.kind} stop"):
            again()
    assert comparisons.state() == before
    assert comparisons.is_divided


def test_open_breaker_of_an_arm_is_refused(comparisons: Comparisons):
    """No experiment gives jobs to a version that a canary has refused; a closed breaker allows one."""
    comparisons.open_breaker()
    before = comparisons.state()
    for begin in (comparisons.begin_rollout, lambda: comparisons.begin(HALVES)):
        with pytest.raises(TransitionRefused, match=r"breaker of .*/2 is open: the canary says FAIL.*canary run"):
            begin()
    assert comparisons.state() == before
    comparisons.breakers.reset_breaker(breaker_name(comparisons.site.model, "2", CANDIDATE))
    assert comparisons.begin(HALVES).status == "running"


@pytest.mark.parametrize("begin", [Comparisons.begin_rollout, lambda each: each.begin(HALVES)], ids=["rollout", "ab"])
def test_both_records_are_written_before_jobs_are_divided(
    comparisons: Comparisons, begin: Callable[[Comparisons], Experiment], monkeypatch: pytest.MonkeyPatch
):
    """The audit log has the beginning before the registry does, and the registry before the broker."""
    stored_first: list[bool] = []
    sync = comparisons.site.deployer.sync

    def watched(*arguments: Any) -> Any:
        stored_first.append(bool(comparisons.site.registry.experiments(comparisons.site.model)))
        return sync(*arguments)

    monkeypatch.setattr(comparisons.site.deployer, "sync", watched)
    begun = begin(comparisons)
    (entry,) = comparisons.log
    assert (entry.result, entry.details["experiment"]) == ("begin", begun.experiment)
    assert (entry.is_divided, entry.experiments) == (False, 0)
    assert stored_first == [True]
    assert comparisons.is_divided


@pytest.mark.parametrize("begin", [Comparisons.begin_rollout, lambda each: each.begin(HALVES)], ids=["rollout", "ab"])
def test_death_between_the_records_and_the_shares_leaves_no_job_divided(
    comparisons: Comparisons, begin: Callable[[Comparisons], Experiment], monkeypatch: pytest.MonkeyPatch
):
    """The broker is away at that moment: the log and the registry know of the experiment, and no job is divided."""
    model = comparisons.site.model
    experiments = comparisons.experiments
    monkeypatch.setattr(experiments, "activate", away)
    with pytest.raises(BrokerUnavailable):
        begin(comparisons)
    assert not comparisons.is_divided
    assert [entry.result for entry in comparisons.log] == ["begin"]
    assert len(comparisons.site.registry.experiments(model)) == 1
    assert comparisons.site.stage.answer() == ("1", 1.0)


def test_plan_is_declared_before_the_first_job(comparisons: Comparisons):
    """The signed record and the audit log have the effects that matter, so that no report can choose them later."""
    plan = ExperimentPlan(power=0.9, min_samples=50, smallest_effects={"latency_ms": 2.0, "quality": 0.05})
    begun = comparisons.begin(HALVES, plan)
    (stored,) = comparisons.site.registry.experiments(comparisons.site.model)
    for kept in (stored.plan["comparison"], comparisons.log[0].details["plan"]):
        assert kept["smallest_effects"] == {"latency_ms": 2.0, "quality": 0.05}
        assert (kept["power"], kept["min_samples"]) == (0.9, 50)
    report = comparison_report(comparisons.experiments, begun)
    assert report["plan"] == stored.plan["comparison"]


def away(_: Experiment) -> None:
    raise BrokerUnavailable("away")


def test_begin_that_cannot_be_recorded_begins_nothing(comparisons: Comparisons, monkeypatch: pytest.MonkeyPatch):
    """The disk of the audit log is full: no experiment is stored, and the candidate may be unloaded again."""

    def full(_model: str, _result: str, _details: Mapping[str, Any]) -> None:
        raise ConfigurationError("The audit log cannot be written")

    monkeypatch.setattr(comparisons.experiments, "record", full)
    before = comparisons.state()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        comparisons.begin(HALVES)
    assert comparisons.state() == before


def test_begin_that_the_registry_refuses_is_recorded_as_refused(comparisons: Comparisons):
    """A draft gets no traffic: the log says that the experiment did not begin."""
    site = comparisons.site
    write_wider(site, "3")
    folder = site.stage.root / site.model / "3" / "model.yaml"
    folder.write_text(folder.read_text().replace("float64", "float32"))
    site.deployer.register(site.stage.root / site.model / "3")
    with pytest.raises(TransitionRefused, match="is in draft and gets no traffic"):
        comparisons.begin({"1": 0.5, "3": 0.5})
    assert [entry.result for entry in comparisons.log] == ["begin", "refused"]
    assert len({entry.details["experiment"] for entry in comparisons.log}) == 1
    assert not comparisons.is_divided
