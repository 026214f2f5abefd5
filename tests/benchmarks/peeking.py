"""How often a test finds a difference between two equal versions, and how often it finds one that is there.

Welch's test is looked at once or, wrongly, again and again; the confidence sequence is looked at every 50 samples. The
observations are normal, as skewed as latencies are, or failures of one in twenty; the split is even, or one in ten.
Beside it: the coverage of the intervals, and the split of jobs between arms. The seed is in the table; no server runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import process_time
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.safety.ab_testing import ExperimentPlan
from penstock.safety.routing import Arm, RoutingTable
from penstock.safety.statistics import (
    Moments,
    agresti_caffo,
    chi_square_p,
    confidence_sequence,
    mean_interval,
    proportion_interval,
    sequence_width,
    student_p,
    student_quantile,
    welch,
)
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale

__all__ = ["Experiments", "Looks", "coverage", "looked_at", "measure", "welch_band"]

SEED: Final = 20_261_123
SAMPLES: Final = 2_000
STEP: Final = 50
JOBS: Final = 20_000
ALPHA: Final = 0.05
_BAND: Final = 0.01
"""About ALPHA: what is required of Welch's test in 10,000 repeats."""
EFFECT: Final = 0.18
"""Standard deviations: the one look finds it in nearly all experiments."""
_CHUNK: Final = 500
_CHECKED: Final = 20

Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return rng.standard_normal(shape)


def _skewed(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return rng.lognormal(0.0, 1.0, shape)


def _failures(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return (rng.random(shape) < 0.05).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Experiments:
    """share_b: of the jobs. effect: what is added to each observation of b. Failures are counted as the report does."""

    draw: Draw = _normal
    share_b: float = 0.5
    effect: float = 0.0

    @property
    def counts_failures(self) -> bool:
        """Whether the observations are 0 and 1."""
        return self.draw is _failures


class Looks(NamedTuple):
    """Shares of the experiments in which a difference was found."""

    sequence: float
    welch_once: float
    welch_peeked: float


@dataclass(frozen=True, slots=True)
class _Arms:
    """By experiment and look: (R, K). `variance` is the unbiased one."""

    count: Floats
    mean: Floats
    variance: Floats

    def moments(self, row: int, look: int) -> Moments:
        count = int(self.count[row, look])
        return Moments(count, float(self.mean[row, look]), float(self.variance[row, look]) * (count - 1))


def measure(scale: Scale, say: Progress) -> list[Row]:
    """The rows of the table; `scale.experiments` repeats each."""
    say(f"peeking: {scale.experiments:,} repeats, seed {SEED}")
    rows = []
    for what, experiments in (
        ("equal versions, normal", Experiments()),
        ("equal versions, log-normal, 10 % on B", Experiments(_skewed, 0.1)),
        ("equal versions, 5 % failures, 10 % on B", Experiments(_failures, 0.1)),
    ):
        found = looked_at(experiments, scale.experiments, SEED)
        say(f"peeking: {what}: {found}")
        rows += _false_positives(what, found, scale.experiments, is_judged=experiments == Experiments())
    powers = looked_at(Experiments(effect=EFFECT), scale.experiments, SEED)
    measured = f"sequence {powers.sequence:.1%}, Welch once {powers.welch_once:.1%}"
    rows.append(Row(f"power at a difference of {EFFECT:g} sigma, normal", measured, figures=powers._asdict()))
    return rows + _coverages(scale.experiments, say) + _splits()


def _false_positives(what: str, found: Looks, repeats: int, *, is_judged: bool) -> list[Row]:
    described = f"{repeats:,} repeats of {SAMPLES:,}, seed {SEED}"
    low, high = welch_band(repeats)
    sequence = Row(
        f"false positives, confidence sequence every {STEP}: {what}",
        f"{found.sequence:.2%} ({described})",
        "<= 5 %",
        "",
        verdict(required=found.sequence <= ALPHA),
        {"share": found.sequence},
    )
    once = f"{found.welch_once:.2%} ({described})"
    ok = verdict(required=low <= found.welch_once <= high) if is_judged else None
    band = f"{low * 100:.3g}-{high * 100:.3g} %"
    return [
        sequence,
        Row(f"false positives, Welch once: {what}", once, band, "", ok, {"share": found.welch_once}),
        Row(f"mistake: Welch every {STEP}: {what}", f"{found.welch_peeked:.1%}", figures={"share": found.welch_peeked}),
    ]


def welch_band(repeats: int) -> tuple[float, float]:
    """The shares of false positives that pass, for so many repeats: 4 to 6 % from 10,000 on.

    With fewer repeats it is four sigma wide, because chance alone leaves the narrow one.
    """
    width = max(_BAND, 4 * math.sqrt(ALPHA * (1 - ALPHA) / repeats))
    return max(0.0, ALPHA - width), ALPHA + width


def looked_at(experiments: Experiments, repeats: int, seed: int) -> Looks:
    """Runs the experiments, each with a look after every 50 samples of both arms together.

    The arrays are checked against the functions of the product in some experiments. Raises ValueError where they
    differ.
    """
    rng, found = np.random.default_rng(seed), np.zeros(3)
    for start in range(0, repeats, _CHUNK):
        a, b = _drawn(experiments, rng, min(_CHUNK, repeats - start))
        if not start:
            _check(a, b)
        difference = b.mean - a.mean
        error = np.sqrt(a.variance / np.maximum(a.count, 1) + b.variance / np.maximum(b.count, 1))
        least = ExperimentPlan().min_samples + 2 * experiments.counts_failures
        has_begun = np.minimum(a.count, b.count) >= least
        stops = (np.abs(difference) > _widths(difference.shape[1]) * error) & has_begun
        statistic, freedom = _welch(a, b)
        peeked = (np.abs(statistic) > _critical(freedom)) & (freedom > 1)
        p_values = np.array([student_p(*pair) for pair in zip(statistic[:, -1], freedom[:, -1], strict=True)])
        found += [stops.any(axis=1).sum(), (p_values < ALPHA).sum(), peeked.any(axis=1).sum()]
    return Looks(*(found / repeats).tolist())


def _drawn(experiments: Experiments, rng: np.random.Generator, repeats: int) -> tuple[_Arms, _Arms]:
    is_b = rng.random((repeats, SAMPLES)) < experiments.share_b
    values = experiments.draw(rng, is_b.shape) + experiments.effect * is_b
    pseudo = 1 if experiments.counts_failures else 0
    return _seen(values, ~is_b, pseudo), _seen(values, is_b, pseudo)


def _seen(values: Floats, is_there: npt.NDArray[np.bool_], pseudo: int) -> _Arms:
    """pseudo: successes and failures that are added, as Agresti and Caffo do."""
    count = _sums(is_there.astype(np.float64)) + 2 * pseudo
    first, second = _sums(values * is_there) + pseudo, _sums(values * values * is_there) + pseudo
    mean = first / np.maximum(count, 1)
    return _Arms(count, mean, np.maximum(0.0, second - count * mean * mean) / np.maximum(count - 1, 1))


def _sums(values: Floats) -> Floats:
    return np.add.reduceat(values, np.arange(0, SAMPLES, STEP), axis=1).cumsum(axis=1)


def _widths(looks: int) -> Floats:
    return np.array([sequence_width(STEP * (look + 1), SAMPLES, ALPHA) for look in range(looks)])


def _welch(a: _Arms, b: _Arms) -> tuple[Floats, Floats]:
    share_a, share_b = a.variance / np.maximum(a.count, 1), b.variance / np.maximum(b.count, 1)
    both = np.maximum(share_a + share_b, 1e-300)
    parts = share_a**2 / np.maximum(a.count - 1, 1) + share_b**2 / np.maximum(b.count - 1, 1)
    freedom = both**2 / np.maximum(parts, 1e-300)
    return (b.mean - a.mean) / np.sqrt(both), freedom


def _critical(freedom: Floats) -> Floats:
    """The critical values are so even between whole degrees of freedom that a line joins them."""
    return np.interp(freedom, np.arange(1, SAMPLES + 2), _criticals())


@cache
def _criticals() -> Floats:
    return np.array([student_quantile(1 - ALPHA / 2, float(number)) for number in range(1, SAMPLES + 2)])


def _check(a: _Arms, b: _Arms) -> None:
    """The product's own functions see the same."""
    statistic, freedom = _welch(a, b)
    widths = _widths(a.count.shape[1])
    for row in range(min(_CHECKED, len(a.count))):
        for look in (len(widths) // 2, -1):
            ours, theirs = a.moments(row, look), b.moments(row, look)
            test = welch(ours, theirs)
            sequence = confidence_sequence(ours, theirs, SAMPLES, ALPHA)
            radius = sequence_width(ours.count + theirs.count, SAMPLES, ALPHA) * test.standard_error
            found = (test.statistic, test.degrees_of_freedom, (sequence.high - sequence.low) / 2)
            expected = (statistic[row, look], freedom[row, look], radius)
            if not np.allclose(found, expected, rtol=1e-9):
                raise ValueError(f"The simulation has {expected}, the product {found}")


def coverage(repeats: int, seed: int) -> dict[str, float]:
    """How often 95 % intervals hold the true value: a mean, a difference with unequal variances, proportions.

    The coverage for one proportion jumps with it, because counts are whole. So each repeat draws another one.
    """
    rng, held = np.random.default_rng(seed), np.zeros(4)
    for _ in range(repeats):
        a, b = rng.normal(3.0, 1.0, 12), rng.normal(5.0, 4.0, 30)
        ours, theirs = Moments.of(a.tolist()), Moments.of(b.tolist())
        share, other = rng.uniform(0.02, 0.3, 2).tolist()
        failures, others = int(rng.binomial(200, share)), int(rng.binomial(100, other))
        held += [
            3.0 in mean_interval(ours),
            2.0 in welch(ours, theirs).interval(),
            share in proportion_interval(failures, 200),
            other - share in welch(agresti_caffo(failures, 200), agresti_caffo(others, 100)).interval(),
        ]
    names = (
        "a mean of 12",
        "a difference, 12 and 30",
        "a proportion of 200",
        "a difference of proportions, 200 and 100",
    )
    return dict(zip(names, (held / repeats).tolist(), strict=True))


def _coverages(repeats: int, say: Progress) -> list[Row]:
    rows = []
    for what, share in coverage(repeats, SEED).items():
        say(f"peeking: coverage of {what}: {share:.2%}")
        required = abs(share - 0.95) <= max(0.015, 4 * math.sqrt(0.95 * 0.05 / repeats))
        measured = f"{share:.2%} ({repeats:,} repeats, seed {SEED})"
        rows.append(
            Row(f"95 % interval of {what}", measured, "95 +/- 1.5 %", "", verdict(required=required), {"share": share})
        )
    return rows


def _splits() -> list[Row]:
    """20,000 jobs on 60 : 30 : 10, by their ids and by sticky keys. The CPU for one is a remark, without a target."""
    arms = (Arm("1", 0.6), Arm("2", 0.3), Arm("3", 0.1))
    rows = []
    for way, is_sticky in (("weighted", False), ("sticky", True)):
        table = RoutingTable(arms, f"{way} {SEED}", is_sticky)
        keys = [table.key_of(f"mlp.{job:032x}", f"tenant {job}") for job in range(JOBS)]
        begun = process_time()
        counts = Counter(map(table.version_for, keys))
        cpu_us = (process_time() - begun) / JOBS * 1e6
        observed = [counts[arm.version] for arm in arms]
        p_value = chi_square_p(observed, [arm.weight for arm in arms])
        sigmas = max(
            abs(seen - JOBS * arm.weight) / math.sqrt(JOBS * arm.weight * (1 - arm.weight))
            for seen, arm in zip(observed, arms, strict=True)
        )
        measured = f"p = {p_value:.3f}, {sigmas:.1f} sigma ({' : '.join(map(str, observed))})"
        what = f"A/B/n split of {JOBS:,} jobs, {way}, chi-square"
        ok = verdict(required=p_value > 0.001 and sigmas <= 4)
        rows.append(Row(what, measured, "p > 0.001, <= 4 sigma", "", ok, {"p_value": p_value, "sigmas": sigmas}))
        rows.append(Row(f"CPU of an assignment, {way}", f"{cpu_us:.2f} us", figures={"us": cpu_us}))
    return rows
