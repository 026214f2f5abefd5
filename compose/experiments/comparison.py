"""A/B experiments: versions that answer their shares of a model's jobs side by side, and the comparison of them.

begin_comparison -> the arms share the jobs -> workers count -> comparison_report, at any time
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

import msgspec

from penstock.compose.experiments.changes import Experiments, deployed_arms, new_experiment_id
from penstock.registry.catalog.tables import Experiment
from penstock.registry.errors import InvalidInput
from penstock.safety.ab_testing import ArmStatistics, ExperimentPlan, Metric, MultiModelComparison
from penstock.safety.arm_figures import ArmFigures, merged
from penstock.safety.routing import Arm, RoutingTable
from penstock.safety.statistics import Moments

__all__ = ["begin_comparison", "comparison_report", "parse_arms", "parse_effects"]


def parse_arms(text: str) -> dict[str, float]:
    """`1=0.9,2=0.1` -> the weights by version, in this order. Raises InvalidInput."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        version, sign, weight = part.strip().rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = -1.0
        if not sign or not version or not 0 <= value <= 1:
            raise InvalidInput(f"Bad arm {part.strip()!r:.80}. Expected VERSION=WEIGHT with a weight from 0 to 1")
        if version in weights:
            raise InvalidInput(f"The arm {version!r:.80} is there twice. Expected each version once")
        weights[version] = value
    return weights


def parse_effects(parts: Iterable[str]) -> dict[Metric, float]:
    """`latency_ms=2` -> the smallest effects by metric; ExperimentPlan checks both. Raises InvalidInput."""
    effects: dict[Metric, float] = {}
    for part in parts:
        name, _, number = part.partition("=")
        metric = cast("Metric", name.strip())
        try:
            effect = float(number)
        except ValueError:
            raise InvalidInput(
                f"Bad smallest effect {part!r:.80}. Expected METRIC=VALUE, such as latency_ms=2"
            ) from None
        if metric in effects:
            raise InvalidInput(f"The smallest effect of {metric!r:.80} is there twice. Expected each metric once")
        effects[metric] = effect
    return effects


def begin_comparison(
    experiments: Experiments,
    name: str,
    weights: Mapping[str, float],
    plan: ExperimentPlan,
    *,
    is_sticky: bool,
    reason: str = "",
    timeout_s: float | None = None,
) -> Experiment:
    """Lets these versions share the jobs. weights: by version label or hash prefix; they add up to 1.

    The plan is part of the signed record, and of the audit log: what matters is declared before the first job. Raises
    UnknownModel, TransitionRefused, InvalidInput and ModelNotReady; then nothing has changed.
    """
    plan.check()
    labels = {experiments.registry.find(name, version).version: weight for version, weight in weights.items()}
    versions = experiments.check(name, tuple(labels))
    arms = deployed_arms(versions, labels)
    experiment = Experiment(
        name=name,
        experiment=new_experiment_id("ab"),
        kind="ab",
        status="running",
        epoch=0,
        arms=arms,
        assignment="sticky" if is_sticky else "weighted",
        plan={"comparison": asdict(plan)},
        state={},
        begun_at="",
        changed_at="",
        actor="",
    )
    shares = ", ".join(f"{arm.version}={arm.weight:g}" for arm in arms)
    text = reason or f"A/B experiment of {shares}"
    facts = {"plan": asdict(plan)}
    return experiments.start(experiment, facts, reason=text, timeout_s=timeout_s)


def comparison_report(experiments: Experiments, experiment: Experiment) -> dict[str, Any]:
    """The comparison so far, as plain data. Its `any_time` figures hold at every look. Raises BrokerUnavailable."""
    epochs = experiments.observed(experiment).values()
    arms = tuple(Arm(arm.version, arm.weight) for arm in experiment.arms)
    table = RoutingTable(arms, experiment.experiment, experiment.assignment == "sticky")
    plan = msgspec.convert(experiment.plan["comparison"], ExperimentPlan)
    comparison, ratings = MultiModelComparison(table, plan), experiments.ratings(experiment)
    found = {arm.version: merged(each[arm.version] for each in epochs if arm.version in each) for arm in arms}
    comparison.merge(
        {
            version: _statistics(figures, ratings.get(version, Moments()), plan.quality_of_error)
            for version, figures in found.items()
        }
    )
    return {
        "model": experiment.name,
        "experiment": experiment.experiment,
        "status": experiment.status,
        "assignment": experiment.assignment,
        "begun_at": experiment.begun_at,
        "changed_at": experiment.changed_at,
        "actor": experiment.actor,
        "cached": {version: figures.cached for version, figures in found.items()},
        "plan": asdict(plan),
        **comparison.report(),
    }


def _statistics(figures: ArmFigures, ratings: Moments, quality_of_error: float | None) -> ArmStatistics:
    """Cached answers have no latency, and have not failed. Failed jobs have the plan's quality, if it has one."""
    count, mean_s, m2 = figures.latency_s.count, figures.latency_s.mean, figures.latency_s.m2
    failed = Moments(figures.errors, quality_of_error, 0.0) if quality_of_error is not None else Moments()
    return ArmStatistics(
        requests=figures.jobs,
        errors=figures.errors,
        latency_ms=Moments(count, mean_s * 1e3, m2 * 1e6),
        quality=ratings.merged(failed),
    )
