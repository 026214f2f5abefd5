"""The statistics equal SciPy's where it has them, and keep their promises in simulations (AR-016, AR-089, AR-090)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from penstock.registry.errors import InvalidInput
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
    sequence_width,
    student_p,
    student_quantile,
    welch,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two samples of 2 to 40, of any spread."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 41, 2)
    return tuple(rng.normal(rng.normal(), np.exp(2 * rng.normal()), size) for size in sizes)


@pytest.mark.parametrize("seed", range(40))
def test_welch_equals_scipy(seed: int):
    """Statistic, degrees of freedom, p-value and interval, also for 2 observations: Student's t, not the normal."""
    a, b = drawn(seed)
    ours = welch(Moments.of(a.tolist()), Moments.of(b.tolist()))
    theirs = stats.ttest_ind(b, a, equal_var=False)
    assert ours.p_value == pytest.approx(theirs.pvalue, abs=1e-9)
    assert ours.statistic == pytest.approx(theirs.statistic, rel=1e-9)
    assert ours.degrees_of_freedom == pytest.approx(theirs.df, rel=1e-9)
    interval = theirs.confidence_interval(0.95)
    assert ours.interval(0.95) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_students_tail_equals_scipy_at_any_size():
    """From less than one to a thousand million degrees of freedom, and far into the tail."""
    rng = np.random.default_rng(1)
    freedoms = np.exp(rng.uniform(math.log(0.6), math.log(1e9), 2000))
    points = stats.t.rvs(np.maximum(freedoms, 3), random_state=rng) * np.exp(rng.normal(size=2000))
    ours = [student_p(float(point), float(freedom)) for point, freedom in zip(points, freedoms, strict=True)]
    np.testing.assert_allclose(ours, 2 * stats.t.sf(np.abs(points), freedoms), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("freedom", [1.0, 2.0, 5.5, 30.0, 999.0, 1001.0, 1e7])
def test_students_quantile_equals_scipy(freedom: float):
    """In both tails, and at the median."""
    probabilities = [1e-6, 0.025, 0.3, 0.5, 0.8, 0.975, 0.9999]
    ours = [student_quantile(probability, freedom) for probability in probabilities]
    np.testing.assert_allclose(ours, stats.t.ppf(probabilities, freedom), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 10, 500])
def test_the_interval_of_a_mean_equals_scipy(size: int):
    """By Student's t, for one arm."""
    values = np.random.default_rng(size).normal(7, 3, size)
    expected = stats.t.interval(0.9, size - 1, values.mean(), stats.sem(values))
    assert mean_interval(Moments.of(values.tolist()), 0.9) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (0, 50), (1, 10), (37, 100), (9_999, 10_000), (8, 8)])
def test_the_interval_of_a_proportion_is_wilsons(successes: int, trials: int):
    """As SciPy has it, and with a width even after no failure at all."""
    expected = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    found = proportion_interval(successes, trials)
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert found.low < found.high


@pytest.mark.parametrize("cells", [2, 3, 4, 7, 32])
def test_chi_square_equals_scipy(cells: int):
    """For even and odd degrees of freedom, near and far."""
    rng = np.random.default_rng(cells)
    shares = rng.dirichlet(np.full(cells, 5.0))
    for scale in (50, 5_000):
        observed = rng.multinomial(scale, rng.dirichlet(np.full(cells, 200.0)))
        expected = stats.chisquare(observed, shares * scale).pvalue
        assert chi_square_p(observed.tolist(), shares.tolist()) == pytest.approx(expected, abs=1e-12)


def test_counts_where_none_can_be_are_no_chance():
    """Jobs on an arm without weight did not come there by chance; an empty one without weight is no cell."""
    assert chi_square_p([50, 50, 1], [0.5, 0.5, 0.0]) == 0.0
    assert chi_square_p([50, 50, 0], [0.5, 0.5, 0.0]) == chi_square_p([50, 50], [0.5, 0.5]) == 1.0


@given(VALUES, VALUES)
def test_merged_moments_are_those_of_all_values(one: list[float], other: list[float]):
    """Two workers count apart and lose nothing."""
    merged, whole = Moments.of(one).merged(Moments.of(other)), np.array(one + other)
    assert merged.count == len(whole)
    assert merged.mean == pytest.approx(whole.mean(), rel=1e-9, abs=1e-6)
    assert merged.m2 == pytest.approx(((whole - whole.mean()) ** 2).sum(), rel=1e-6, abs=1e-3)
    assert Moments().merged(merged) == merged == merged.merged(Moments())


def test_moments_keep_the_digits_of_a_small_variance():
    """At a mean of a thousand million the sum of squares would have no digit of it left."""
    values = [1e9 + step for step in (4.0, 7.0, 13.0, 16.0)]
    assert Moments.of(values).variance == pytest.approx(30.0, rel=1e-9)
    assert Moments.of(values[:2]).merged(Moments.of(values[2:])).variance == pytest.approx(30.0, rel=1e-9)


def test_equal_observations_give_no_p_value():
    """Without variance there is nothing to measure a difference with, and SciPy says the same."""
    one, other = Moments.of([2.0] * 5), Moments.of([3.0] * 5)
    assert math.isnan(welch(one, one).p_value)
    assert welch(one, other).statistic == math.inf
    assert welch(one, other).interval() == (1.0, 1.0)


def test_95_percent_intervals_hold_the_truth_in_95_percent():
    """Of a mean of 8, and of a difference with unequal sizes and variances (AR-090); 2,000 repeats, 3 sigma wide."""
    rng, held = np.random.default_rng(90), np.zeros(2)
    for _ in range(2000):
        a, b = (Moments.of(rng.normal(mean, sigma, size).tolist()) for mean, sigma, size in ((3, 1, 8), (5, 4, 20)))
        held += [3.0 in mean_interval(a), 2.0 in welch(a, b).interval()]
    assert np.all(np.abs(held / 2000 - 0.95) <= 0.015)


def test_the_power_is_that_of_the_noncentral_t():
    """As close as the docstring says."""
    for freedom, within in ((20.0, 0.02), (200.0, 0.002)):
        critical = stats.t.ppf(0.975, freedom)
        for shift in np.linspace(0.1, 6, 30):
            exact = stats.nct.sf(critical, freedom, shift) + stats.nct.cdf(-critical, freedom, shift)
            assert power(float(shift), 1.0, freedom) == pytest.approx(exact, abs=within)


@pytest.mark.parametrize("share_b", [0.5, 0.1])
def test_the_sample_size_has_the_power_that_was_asked_for(share_b: float):
    """And one with half the samples has less; the detectable difference of that size is the one asked for."""
    needed = sample_size(0.2, 1.0, 4.0, share_b=share_b, power=0.9)
    error = math.sqrt(1.0 / (needed * (1 - share_b)) + 4.0 / (needed * share_b))
    assert power(0.2, error, needed - 2.0) == pytest.approx(0.9, abs=0.003)
    assert power(0.2, error * math.sqrt(2), needed / 2) < 0.7
    assert detectable_difference(error, power=0.9) == pytest.approx(0.2, rel=1e-3)


def test_the_sequence_is_narrowest_at_the_planned_size():
    """Of all choices of rho the one for that time gives the smallest width there, but for its own approximation."""

    def width(log_rho: float, samples: int) -> float:
        scaled = samples * math.exp(2 * log_rho)
        return math.sqrt(2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / 0.05))

    best = optimize.minimize_scalar(lambda log_rho: width(log_rho, 5000), bounds=(-10, 2), method="bounded")
    assert sequence_width(5000, 5000) == pytest.approx(best.fun, rel=1e-3)
    assert sequence_width(5000, 5000) < min(sequence_width(5000, 500), sequence_width(5000, 50_000))


def test_a_look_at_any_time_costs_width():
    """The sequence is wider than the interval for one look, at every size, and shrinks in absolute terms."""
    widths = [sequence_width(samples, 2000) for samples in (10, 100, 2000, 100_000, 10_000_000)]
    assert min(widths) > 1.96
    errors = [1 / math.sqrt(samples) for samples in (10, 100, 2000, 100_000, 10_000_000)]
    radii = [width * error for width, error in zip(widths, errors, strict=True)]
    assert radii == sorted(radii, reverse=True)


def test_the_sequence_follows_the_difference():
    """Its centre is mean b minus mean a, and its width the standard error times `sequence_width`."""
    a, b = Moments.of([1.0, 2.0, 3.0, 6.0]), Moments.of([2.0, 5.0, 5.0])
    found = confidence_sequence(a, b, 100, 0.1)
    radius = sequence_width(7, 100, 0.1) * welch(a, b).standard_error
    assert found == pytest.approx((1.0 - radius, 1.0 + radius))


def test_a_first_failure_is_no_proof():
    """One arm without any failure would have no variance: Agresti and Caffo's counts give it one."""
    nothing, some = agresti_caffo(0, 100), agresti_caffo(9, 900)
    assert nothing.variance > 0
    assert 0 in confidence_sequence(some, nothing, 2000)
    whole = Moments.of([1.0] * 10 + [0.0] * 892)
    assert (some.count, some.mean, some.m2) == pytest.approx((whole.count, whole.mean, whole.m2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Moments.of([1.0, math.nan]), "expected a finite number"),
        (lambda: Moments.of([1.0, math.inf]), "expected a finite number"),
        (lambda: welch(Moments.of([1.0]), Moments.of([1.0, 2.0])), "expected at least 2"),
        (lambda: mean_interval(Moments()), "expected at least 2"),
        (lambda: proportion_interval(3, 2), "no more successes than trials"),
        (lambda: proportion_interval(0, 0), "expected at least one trial"),
        (lambda: sample_size(0.0, 1.0, 1.0), "other than 0"),
        (lambda: sample_size(1.0, -1.0, 1.0), "at least 0"),
        (lambda: sample_size(1.0, 1.0, 1.0, share_b=1.0), "between 0 and 1"),
        (lambda: power(1.0, 0.0, 10.0), "more than 0"),
        (lambda: student_p(1.0, 0.0), "more than 0"),
        (lambda: student_quantile(1.0, 5.0), "between 0 and 1"),
        (lambda: sequence_width(0, 100), "at least 1"),
        (lambda: sequence_width(10, 100, alpha=0.0), "between 0 and 1"),
        (lambda: chi_square_p([5], [1.0]), "at least 2"),
        (lambda: chi_square_p([0, 0], [0.5, 0.5]), "some counts"),
    ],
)
def test_impossible_input_is_refused(call, message: str):
    """The error says what is expected."""
    with pytest.raises(InvalidInput, match=message):
        call()


def test_an_interval_holds_its_ends():
    """And nothing beyond them."""
    interval = Interval(-1.0, 2.0)
    assert all(value in interval for value in (-1.0, 0, 2.0))
    assert not any(value in interval for value in (-1.1, 2.1, math.nan))
