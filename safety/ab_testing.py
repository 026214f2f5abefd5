"""Versions that answer beside each other -> which one is better, and how sure that is. Pure: no clock, no randomness.

    job -- assign --> version -- its outcome --> record --> ArmStatistics -- report --> plain data

`assign` follows `routing.py`. The statistics of several workers are merged; a report needs no more than those. It has
two kinds of figures. `any_time` may be read after every job, and an experiment may stop on it. `once` is Welch's test:
it has more power and holds for one look, at the planned number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, count
from threading import Lock
from typing import Any, Final, Literal, Protocol

import msgspec

from penstock.registry.errors import InvalidInput, described, shown
from penstock.safety.routing import WEIGHTS_WITHIN, Arm, RoutingTable, check_arm
from penstock.safety.statistics import (
    Interval,
    Moments,
    agresti_caffo,
    chi_square_p,
    confidence_sequence,
    detectable_difference,
    mean_interval,
    power,
    proportion_interval,
    sample_size,
    welch,
)

__all__ = [
    "ABModelComparison",
    "ABTestingServer",
    "ArmStatistics",
    "ExperimentPlan",
    "Metric",
    "Model",
    "MultiModelComparison",
]

Metric = Literal["latency_ms", "error_rate", "quality"]
Mode = Literal["split", "shadow"]

_METRICS: Final[tuple[Metric, ...]] = ("latency_ms", "error_rate", "quality")
_MISMATCH_BELOW: Final = 0.001
"""A p-value for the split below this means that jobs of one arm are missing, not that chance was unkind."""
_NOT_BEGUN: Final = {"low": None, "high": None, "verdict": "continue"}
"""The sequence of a pair before `min_samples`."""
_STICKY: Final = (
    "Jobs of one sticky key have one version. Intervals assume independent jobs: when jobs of a key are alike, the "
    "intervals are too narrow."
)
_SHADOWED: Final = "The candidate ran in the shadow: its latency is that of the shadow worker."
_SEVERAL: Final = "Each metric has its own alpha. Only the verdict on the primary metric keeps it for the experiment."


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """What is decided before the first job.

    planned_samples: jobs of all arms together at which the one look is due, and where the sequence is narrowest.
    alpha: the chance to call equal versions different; power: the chance to find a smallest effect in the one look.
    min_samples: per arm, before the sequence begins. Its guarantee is asymptotic: with less than 100 samples of a
    skewed metric in a small arm it errs more often than alpha.
    smallest_effects: by metric, the differences that matter, in the metric's unit: milliseconds, a share of jobs, or
    the quality's. Two versions whose difference is surely smaller are `equivalent`.
    quality_of_error: the quality of a failed job; None: it has none, and a version that fails hard cases looks better.
    """

    primary: Metric = "latency_ms"
    planned_samples: int = 10_000
    alpha: float = 0.05
    power: float = 0.8
    min_samples: int = 100
    smallest_effects: Mapping[Metric, float] = field(default_factory=dict)
    is_higher_quality_better: bool = True
    quality_of_error: float | None = None

    def check(self) -> None:
        """Raises InvalidInput (a ValueError) for a plan that cannot be carried out."""
        for metric in (self.primary, *self.smallest_effects):
            if metric not in _METRICS:
                raise InvalidInput(f"Unknown metric {described(metric)}. Expected one of: {', '.join(_METRICS)}")
        for name, share in (("alpha", self.alpha), ("power", self.power)):
            if not 0 < share < 1:
                raise InvalidInput(f"{name} is {described(share)}, expected a number between 0 and 1")
        sizes = (("planned_samples", self.planned_samples, 4), ("min_samples", self.min_samples, 2))
        for name, number, least in sizes:
            if number < least:
                raise InvalidInput(f"{name} is {described(number)}, expected at least {least}")
        for metric, effect in self.smallest_effects.items():
            if not (effect > 0 and math.isfinite(effect)):
                raise InvalidInput(f"The smallest effect of {metric} is {effect}, expected a number above 0")
            if metric == "error_rate" and effect >= 1:
                raise InvalidInput(f"The smallest effect of error_rate is {effect}, expected a share of jobs below 1")
        if self.quality_of_error is not None and not math.isfinite(self.quality_of_error):
            raise InvalidInput(f"quality_of_error is {self.quality_of_error}, expected a finite number or none")

    def is_better_when_higher(self, metric: Metric) -> bool:
        """Latency and errors are better when lower."""
        return metric == "quality" and self.is_higher_quality_better


class ArmStatistics(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one version did. requests: all jobs, failed ones too. latency_ms: of those that were answered.

    unrated: answers for which the quality metric gave no finite number.
    """

    requests: int = 0
    errors: int = 0
    unrated: int = 0
    latency_ms: Moments = Moments()
    quality: Moments = Moments()

    def observed(self, latency_ms: float, *, is_error: bool = False, quality: float | None = None) -> ArmStatistics:
        """With one more job. Raises InvalidInput for a latency that is negative or not finite."""
        if not (latency_ms >= 0 and math.isfinite(latency_ms)):
            raise InvalidInput(f"The latency is {described(latency_ms)} ms, expected a finite number of at least 0")
        is_rated = quality is not None and math.isfinite(quality)
        return ArmStatistics(
            self.requests + 1,
            self.errors + is_error,
            self.unrated + (quality is not None and not is_rated),
            # A version that fails at once is not a fast one.
            self.latency_ms if is_error else self.latency_ms.added(latency_ms),
            self.quality.added(quality) if quality is not None and is_rated else self.quality,
        )

    def merged(self, other: ArmStatistics) -> ArmStatistics:
        """Those of two workers."""
        return ArmStatistics(
            self.requests + other.requests,
            self.errors + other.errors,
            self.unrated + other.unrated,
            self.latency_ms.merged(other.latency_ms),
            self.quality.merged(other.quality),
        )

    def moments(self, metric: Metric) -> Moments:
        """Of a metric's observations. Those of the error rate are Agresti and Caffo's."""
        if metric == "error_rate":
            return agresti_caffo(self.errors, self.requests)
        return self.latency_ms if metric == "latency_ms" else self.quality

    def samples(self, metric: Metric) -> int:
        """How many jobs gave an observation of the metric."""
        return self.requests if metric == "error_rate" else self.moments(metric).count


class MultiModelComparison:
    """Two or more versions with shares of the traffic. One thread at a time; each worker has its own.

    Every pair of arms is compared. alpha is divided by the number of pairs (Bonferroni), so that it holds for all of
    them together. Raises InvalidInput (a ValueError) for a table or a plan that cannot be used.
    """

    def __init__(self, table: RoutingTable, plan: ExperimentPlan | None = None) -> None:
        self.table = table
        self.plan = plan or ExperimentPlan()
        table.check()
        self.plan.check()
        if len(table.arms) < 2:
            raise InvalidInput(f"{len(table.arms)} arm, expected at least 2 for a comparison")
        self._statistics = {arm.version: ArmStatistics() for arm in table.arms}

    @property
    def statistics(self) -> Mapping[str, ArmStatistics]:
        """By version."""
        return dict(self._statistics)

    def assign(self, job_id: str, sticky_key: str = "") -> str:
        """The version that answers this job."""
        return self.table.version_for(self.table.key_of(job_id, sticky_key))

    def record(self, version: str, latency_ms: float, *, is_error: bool = False, quality: float | None = None) -> None:
        """The outcome of one job. quality: the user's metric of the answer, NaN if the metric failed.

        Raises InvalidInput for a version that is no arm, or an impossible latency; nothing is recorded then.
        """
        if is_error:
            quality = self.plan.quality_of_error
        self._statistics[version] = self._of(version).observed(latency_ms, is_error=is_error, quality=quality)

    def merge(self, statistics: Mapping[str, ArmStatistics]) -> None:
        """Adds what another worker recorded. Raises InvalidInput for a version that is no arm."""
        merged = {version: self._of(version).merged(theirs) for version, theirs in statistics.items()}
        self._statistics |= merged

    def report(self) -> dict[str, Any]:
        """All figures as plain data: numbers, text, None for what cannot be known yet; ready for JSON.

        arms: shares, counts, and each metric with its interval at 1 - alpha. comparisons: see the module. split:
        whether the counts fit the shares. verdict: the version that is better than all others by the primary metric,
        `equivalent`, or `continue`. It may be read any time. opposed_by: other metrics that speak against it.
        """
        comparisons = [self._compared(a, b) for a, b in combinations(self._statistics, 2)]
        verdict = self._verdict(comparisons)
        return {
            "primary": self.plan.primary,
            "verdict": verdict,
            "opposed_by": self._opposition(comparisons, verdict),
            "planned_samples": self.plan.planned_samples,
            "is_planned_look_due": self._total() >= self.plan.planned_samples,
            "arms": [self._described(arm) for arm in self.table.arms],
            "comparisons": comparisons,
            "split": self._split(),
            "caveats": [_SEVERAL, *self._caveats()],
        }

    def _of(self, version: str) -> ArmStatistics:
        if version not in self._statistics:
            expected = ", ".join(map(shown, self._statistics))
            raise InvalidInput(f"Unknown arm {shown(version)!r}. Expected one of: {expected}")
        return self._statistics[version]

    def _total(self) -> int:
        return sum(arm.samples(self.plan.primary) for arm in self._statistics.values())

    def _caveats(self) -> list[str]:
        return [_STICKY] if self.table.is_sticky else []

    def _described(self, arm: Arm) -> dict[str, Any]:
        seen, confidence = self._statistics[arm.version], 1 - self.plan.alpha
        rate = {"mean": None, "low": None, "high": None, "samples": 0}
        if seen.requests:
            rate = _estimate(
                seen.errors / seen.requests,
                proportion_interval(seen.errors, seen.requests, confidence),
                seen.requests,
            )
        return {
            "version": arm.version,
            "weight": arm.weight,
            "requests": seen.requests,
            "errors": seen.errors,
            "unrated": seen.unrated,
            "latency_ms": _estimated(seen.latency_ms, confidence),
            "error_rate": rate,
            "quality": _estimated(seen.quality, confidence),
        }

    def _compared(self, a: str, b: str) -> dict[str, Any]:
        pairs = math.comb(len(self._statistics), 2)
        metrics = {metric: self._metric(metric, a, b, self.plan.alpha / pairs) for metric in _METRICS}
        return {"a": a, "b": b, "alpha": self.plan.alpha / pairs, "metrics": metrics}

    def _metric(self, metric: Metric, a: str, b: str, alpha: float) -> dict[str, Any]:
        seen = (self._statistics[a], self._statistics[b])
        samples = [arm.samples(metric) for arm in seen]
        if min(samples) < 2:
            return {"samples": samples, "once": None, "any_time": dict(_NOT_BEGUN)}
        moments = (seen[0].moments(metric), seen[1].moments(metric))
        once = self._look(metric, moments, alpha, self._share_of_second(a, b))
        return {"samples": samples, "once": once, "any_time": self._sequence(metric, (a, b), moments, alpha)}

    def _look(self, metric: Metric, moments: tuple[Moments, Moments], alpha: float, share_b: float) -> dict[str, Any]:
        test = welch(*moments)
        interval, error = test.interval(1 - alpha), test.standard_error
        effect = self.plan.smallest_effects.get(metric)
        needed = reached = None
        if effect is not None and error > 0:
            reached = power(effect, error, test.degrees_of_freedom, alpha=alpha)
            variances = (moments[0].variance, moments[1].variance)
            needed = sample_size(effect, *variances, share_b=share_b, alpha=alpha, power=self.plan.power)
        return {
            "difference": test.difference,
            **interval._asdict(),
            "statistic": _finite(test.statistic),
            "degrees_of_freedom": _finite(test.degrees_of_freedom),
            # Two constants differ without noise, which is no evidence of a test.
            "p_value": _finite(test.p_value) if error > 0 else None,
            "smallest_effect": effect,
            "power_for_smallest_effect": reached,
            "samples_for_smallest_effect": needed,
            "detectable_difference": detectable_difference(error, alpha=alpha, power=self.plan.power),
        }

    def _sequence(
        self, metric: Metric, names: tuple[str, str], moments: tuple[Moments, Moments], alpha: float
    ) -> dict[str, Any]:
        interval = confidence_sequence(*moments, self.plan.planned_samples, alpha)
        samples = [self._statistics[name].samples(metric) for name in names]
        # Without any variance it would be as narrow after two jobs as after a million.
        if min(samples) < self.plan.min_samples or interval.low == interval.high:
            return dict(_NOT_BEGUN)
        return {**interval._asdict(), "verdict": self._decided(metric, names, interval)}

    def _decided(self, metric: Metric, names: tuple[str, str], interval: Interval) -> str:
        if 0 not in interval:
            is_second = (interval.low > 0) == self.plan.is_better_when_higher(metric)
            return names[is_second]
        effect = self.plan.smallest_effects.get(metric)
        return "equivalent" if effect is not None and max(-interval.low, interval.high) < effect else "continue"

    def _verdict(self, comparisons: list[dict[str, Any]]) -> str:
        found = [pair["metrics"][self.plan.primary]["any_time"]["verdict"] for pair in comparisons]
        for version in self._statistics:
            # An arm has as many pairs as there are other arms.
            if found.count(version) == len(self._statistics) - 1:
                return version
        return "equivalent" if set(found) == {"equivalent"} else "continue"

    def _opposition(self, comparisons: list[dict[str, Any]], verdict: str) -> list[str]:
        if verdict not in self._statistics:
            return []
        others = set(self._statistics) - {verdict}
        return [
            metric
            for metric in _METRICS
            if any(
                verdict in (pair["a"], pair["b"]) and pair["metrics"][metric]["any_time"]["verdict"] in others
                for pair in comparisons
            )
        ]

    def _share_of_second(self, a: str, b: str) -> float:
        seen: list[float] = [self._statistics[version].requests for version in (a, b)]
        if not all(seen):
            # Clients may report quality before the workers report their counts.
            weights = {arm.version: arm.weight for arm in self.table.arms}
            seen = [weights[version] or 1e-9 for version in (a, b)]
        return seen[1] / sum(seen)

    def _split(self) -> dict[str, Any]:
        """The check for a sample ratio mismatch: a wrong split is a fault of the experiment, for example lost jobs."""
        counts = [self._statistics[arm.version].requests for arm in self.table.arms]
        shares = [arm.weight for arm in self.table.arms]
        p_value = chi_square_p(counts, shares) if self._is_split_testable() else None
        return {
            "requests": counts,
            "expected_shares": shares,
            "p_value": p_value,
            "is_as_planned": None if p_value is None else p_value >= _MISMATCH_BELOW,
        }

    def _is_split_testable(self) -> bool:
        # Jobs of one sticky key come together, so that their counts vary more than those of independent jobs.
        has_shares = sum(arm.weight > 0 for arm in self.table.arms) > 1
        return has_shares and not self.table.is_sticky and any(seen.requests for seen in self._statistics.values())


class ABModelComparison(MultiModelComparison):
    """Two versions: A, which serves now, and B, the candidate. The verdict is `A`, `B`, `equivalent` or `continue`.

    mode "split": B answers its share of the jobs. mode "shadow": A answers all of them, and B runs its share again in
    the shadow, where its errors harm nobody.
    """

    def __init__(
        self,
        a: str,
        b: str,
        *,
        share_b: float,
        salt: str,
        is_sticky: bool = False,
        mode: Mode = "split",
        plan: ExperimentPlan | None = None,
    ) -> None:
        if mode not in ("split", "shadow"):
            raise InvalidInput(f"Unknown mode {described(mode)}. Expected one of: split, shadow")
        if not 0 <= share_b <= 1:
            raise InvalidInput(f"share_b is {described(share_b)}, expected a number 0 to 1")
        super().__init__(RoutingTable((Arm(a, 1 - share_b), Arm(b, share_b)), salt, is_sticky), plan)
        self.mode = mode
        self._names = {a: "A", b: "B"}

    def assign(self, job_id: str, sticky_key: str = "") -> str:
        """The version that answers this job; in the shadow mode always A."""
        return self.table.arms[0].version if self.mode == "shadow" else super().assign(job_id, sticky_key)

    def shadow(self, job_id: str, sticky_key: str = "") -> str | None:
        """The version that runs this job again in the shadow: B for its share of the jobs, otherwise None."""
        if self.mode == "split":
            return None
        chosen = super().assign(job_id, sticky_key)
        return chosen if chosen == self.table.arms[1].version else None

    def report(self) -> dict[str, Any]:
        """As of any comparison. The verdict, and each arm's `name`, is A or B; the other verdicts are versions."""
        report = super().report()
        report["mode"] = self.mode
        report["verdict"] = self._names.get(report["verdict"], report["verdict"])
        report["arms"] = [{"name": self._names[arm["version"]], **arm} for arm in report["arms"]]
        return report

    def _caveats(self) -> list[str]:
        return [*super()._caveats(), *([_SHADOWED] if self.mode == "shadow" else [])]

    def _is_split_testable(self) -> bool:
        # In the shadow mode A has all jobs, so that the counts say nothing about the shares.
        return self.mode == "split" and super()._is_split_testable()


class Model(Protocol):
    """A model as the server calls it."""

    def __call__(self, inputs: Any, /) -> Any:
        """The predictions for these inputs."""


class ABTestingServer:
    """Versions of a model in this process, each with its traffic. Any number of threads may call it.

    The traffic is cumulative in the order of registration. If it adds up to less than 1, the first version gets the
    remainder. clock: seconds that only grow, for latencies. quality: rates (inputs, predictions); higher is better
    unless the plan says otherwise. A quality that raises, or is not finite, leaves the answer `unrated`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        salt: str = "ab",
        quality: Callable[[Any, Any], float] | None = None,
        plan: ExperimentPlan | None = None,
    ) -> None:
        self._clock = clock
        self._salt = salt
        self._quality = quality
        self._plan = plan or ExperimentPlan()
        self._plan.check()
        self._models: dict[str, Model] = {}
        self._traffic: dict[str, float] = {}
        self._statistics: dict[str, ArmStatistics] = {}
        self._table: RoutingTable | None = None
        self._numbers = count()
        self._lock = Lock()

    def register_model(self, version: str, model: Model, traffic: float) -> None:
        """Adds a version with its share of the traffic, 0 to 1. A new experiment begins: earlier outcomes are dropped.

        Raises InvalidInput (a ValueError) for a share outside 0 to 1, a version that is there already, or shares that
        add up to more than 1. Nothing changes then.
        """
        if not callable(model):
            raise InvalidInput(f"The model is {described(model)}, expected a callable")
        with self._lock:
            if version in self._traffic:
                raise InvalidInput(f"The version {shown(version)!r} is registered already, expected a new one")
            table = _table_of({**self._traffic, version: traffic}, self._salt)
            self._models[version], self._traffic[version], self._table = model, traffic, table
            self._statistics = dict.fromkeys(self._models, ArmStatistics())

    def predict(self, inputs: Any, key: str | None = None) -> tuple[Any, str]:
        """(predictions, version). key: equal keys get one version; without one, requests are divided by their number.

        Raises the model's own error, which counts for its version, and InvalidInput if no model is registered.
        """
        with self._lock:
            if self._table is None:
                raise InvalidInput("No model is registered, expected `register_model` before")
            # Read under the lock: a version that is registered meanwhile must not meet the table of before.
            version = self._table.version_for(f"#{next(self._numbers)}" if key is None else key)
            model, experiment = self._models[version], self._table
        begun = self._clock()
        try:
            predictions = model(inputs)
        except Exception:
            seconds, quality = self._since(begun), self._plan.quality_of_error
            self._record(experiment, version, seconds, is_error=True, quality=quality)
            raise
        seconds = self._since(begun)
        self._record(experiment, version, seconds, quality=self._rated(inputs, predictions))
        return predictions, version

    def report(self) -> dict[str, Any]:
        """As of `MultiModelComparison`. Raises InvalidInput for fewer than two versions."""
        with self._lock:
            comparison = MultiModelComparison(self._table or RoutingTable((), self._salt), self._plan)
            comparison.merge(self._statistics)
        return comparison.report()

    def _since(self, begun: float) -> float:
        return max(0.0, self._clock() - begun)

    def _rated(self, inputs: Any, predictions: Any) -> float | None:
        if self._quality is None:
            return None
        try:
            return float(self._quality(inputs, predictions))
        except Exception:
            # The caller has its answer, whatever the metric thinks of it.
            return math.nan

    def _record(
        self, experiment: RoutingTable, version: str, seconds: float, *, is_error: bool = False, quality: float | None
    ) -> None:
        with self._lock:
            # The outcome of an experiment that has ended meanwhile belongs to no arm.
            if experiment is self._table:
                observed = self._statistics[version].observed(seconds * 1000, is_error=is_error, quality=quality)
                self._statistics[version] = observed


def _table_of(traffic: Mapping[str, float], salt: str) -> RoutingTable:
    """The remainder of a sum below 1 goes to the first version."""
    for version, share in traffic.items():
        check_arm(Arm(version, share))
    remainder = 1 - math.fsum(traffic.values())
    if remainder < -WEIGHTS_WITHIN:
        raise InvalidInput(f"The traffic adds up to {1 - remainder:g}, expected at most 1")
    first = next(iter(traffic))
    arms = (Arm(name, min(1.0, share + max(0.0, remainder) * (name == first))) for name, share in traffic.items())
    table = RoutingTable(tuple(arms), salt)
    table.check()
    return table


def _estimate(mean: float, interval: Interval, samples: int) -> dict[str, Any]:
    return {"mean": mean, **interval._asdict(), "samples": samples}


def _estimated(moments: Moments, confidence: float) -> dict[str, Any]:
    if not moments.count:
        return {"mean": None, "low": None, "high": None, "samples": 0}
    if moments.count == 1:
        return {"mean": moments.mean, "low": None, "high": None, "samples": 1}
    return _estimate(moments.mean, mean_interval(moments, confidence), moments.count)


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
