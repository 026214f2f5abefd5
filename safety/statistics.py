"""Observations of two versions -> intervals, p-values, sample sizes, and a test that may be looked at any time. Pure.

    observations -- Moments --> welch                  a p-value and an interval, for ONE look at a planned size
                            '-> confidence_sequence    an interval that holds at all looks at once, for stopping

Welch's test that is looked at again and again finds a difference where there is none: at a nominal 5 %, in more than
one of four experiments. `make bench` measures both (`peeking`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, NamedTuple

import msgspec

from penstock.registry.errors import InvalidInput, described

__all__ = [
    "Interval",
    "Moments",
    "WelchTest",
    "agresti_caffo",
    "chi_square_p",
    "confidence_sequence",
    "detectable_difference",
    "mean_interval",
    "power",
    "proportion_interval",
    "sample_size",
    "sequence_width",
    "student_p",
    "student_quantile",
    "welch",
    "wilson_interval",
]

_NORMAL: Final = NormalDist()
_TINY: Final = 1e-300
_PRECISION: Final = 1e-15
_MAX_TERMS: Final = 1000
_MANY: Final = 1000.0
"""From so many degrees of freedom on a series in their inverse has more digits than the continued fraction."""


class Interval(NamedTuple):
    """Both ends belong to it."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


class Moments(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Number, mean and sum of squared deviations of observations; those of two workers can be merged.

    Updates follow Welford 1962, merges follow Chan, Golub and LeVeque 1979: no digits are lost where the mean is
    large and the variance small.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Moments:
        """The moments of these observations. Raises InvalidInput for NaN and infinity."""
        moments = cls()
        for value in values:
            moments = moments.added(value)
        return moments

    def added(self, value: float) -> Moments:
        """With one more observation. Raises InvalidInput for NaN and infinity."""
        if not math.isfinite(value):
            raise InvalidInput(f"The observation is {value}, expected a finite number")
        count = self.count + 1
        delta = value - self.mean
        mean = self.mean + delta / count
        return Moments(count, mean, self.m2 + delta * (value - mean))

    def merged(self, other: Moments) -> Moments:
        """The moments of both sets of observations."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Moments(count, mean, self.m2 + other.m2 + delta * delta * self.count * other.count / count)

    @property
    def variance(self) -> float:
        """The unbiased estimate. Raises InvalidInput for fewer than two observations."""
        if self.count < 2:
            raise InvalidInput(f"{self.count} observations, expected at least 2 for a variance")
        return self.m2 / (self.count - 1)


@dataclass(frozen=True, slots=True)
class WelchTest:
    """difference: mean of b minus mean of a. The p-value is two-sided and NaN if all observations are equal."""

    statistic: float
    degrees_of_freedom: float
    p_value: float
    difference: float
    standard_error: float

    def interval(self, confidence: float = 0.95) -> Interval:
        """Of the difference. It holds for one look at a planned number of samples."""
        if self.standard_error == 0:
            return Interval(self.difference, self.difference)
        radius = student_quantile((1 + _checked_share(confidence)) / 2, self.degrees_of_freedom) * self.standard_error
        return Interval(self.difference - radius, self.difference + radius)


def welch(a: Moments, b: Moments) -> WelchTest:
    """Welch's t-test for two means with unequal variances: is the mean of b that of a?

    The degrees of freedom are those of Welch 1947 and Satterthwaite 1946. The p-value is of Student's t distribution
    at any size, never of the normal one. Raises InvalidInput for an arm with fewer than two observations.
    """
    share_a, share_b = a.variance / a.count, b.variance / b.count
    error = math.sqrt(share_a + share_b)
    difference = b.mean - a.mean
    if error == 0:
        # Two constants: there is no noise to compare a difference with.
        statistic = math.copysign(math.inf, difference) if difference else math.nan
        return WelchTest(statistic, math.nan, 0.0 if difference else math.nan, difference, 0.0)
    # As shares of their sum, because squares of small variances would underflow.
    part_a, part_b = share_a / (share_a + share_b), share_b / (share_a + share_b)
    freedom = 1 / (part_a**2 / (a.count - 1) + part_b**2 / (b.count - 1))
    statistic = difference / error
    return WelchTest(statistic, freedom, student_p(statistic, freedom), difference, error)


def student_p(statistic: float, degrees_of_freedom: float) -> float:
    """The two-sided p-value of Student's t distribution: P(|T| >= |statistic|).

    It is the regularised incomplete beta function I_x(df/2, 1/2) at x = df / (df + t^2), DLMF 8.17; the error is
    below 1e-12.
    Raises InvalidInput unless there are degrees of freedom.
    """
    if not degrees_of_freedom > 0:
        raise InvalidInput(f"{degrees_of_freedom} degrees of freedom, expected more than 0")
    if math.isnan(statistic):
        return math.nan
    ratio = statistic / degrees_of_freedom * statistic
    if math.isinf(ratio):
        return 0.0
    if degrees_of_freedom >= _MANY:
        return math.erfc(_hill_normal(ratio, degrees_of_freedom) / math.sqrt(2))
    half, x, y = degrees_of_freedom / 2, 1 / (1 + ratio), ratio / (1 + ratio)
    if y == 0:
        return 1.0
    # log x as log1p of a small ratio: 1 - x would lose its digits.
    scale = math.exp(math.log(y) / 2 - half * math.log1p(ratio) - _log_beta_half(half))
    if x < (half + 1) / (half + 2.5):
        return min(1.0, scale * _beta_fraction(half, 0.5, x) / half)
    return max(0.0, 1 - scale * _beta_fraction(0.5, half, y) / 0.5)


def student_quantile(probability: float, degrees_of_freedom: float) -> float:
    """The point that a Student's t variable exceeds with 1 - probability.

    Raises InvalidInput unless 0 < probability < 1.
    """
    tail = 2 * min(_checked_share(probability), 1 - probability)
    if tail == 1:
        return 0.0
    # The tail is convex and above the normal one, so that Newton's method climbs to the point and never passes it.
    point = -_NORMAL.inv_cdf(tail / 2)
    for _ in range(_MAX_TERMS):
        step = (student_p(point, degrees_of_freedom) - tail) / (2 * _student_density(point, degrees_of_freedom))
        point += step
        if step <= _PRECISION * point:
            break
    return point if probability > 0.5 else -point


def _student_density(point: float, degrees_of_freedom: float) -> float:
    half = degrees_of_freedom / 2
    log_kernel = (half + 0.5) * math.log1p(point / degrees_of_freedom * point)
    return math.exp(-log_kernel - _log_beta_half(half)) / math.sqrt(degrees_of_freedom)


def _log_beta_half(a: float) -> float:
    """log B(a, 1/2)."""
    return math.lgamma(a) + math.log(math.pi) / 2 - math.lgamma(a + 0.5)


def _hill_normal(ratio: float, degrees_of_freedom: float) -> float:
    """The normal deviate with the tail of Student's t at t^2 / df = ratio: Hill 1970, algorithm 395 of the CACM."""
    a = degrees_of_freedom - 0.5
    b = 48 * a * a
    z = math.sqrt(a * math.log1p(ratio))
    third = (((4 * z * z + 33) * z * z + 240) * z * z + 855) * z
    return z + ((z * z + 3) * z - third / (10 * (b + 0.8 * z**4 + 100))) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, DLMF 8.17.22, by the method of Lentz and Thompson."""
    d = 1 / _nonzero(1 - (a + b) * x / (a + 1))
    c, product = 1.0, d
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            d, c = 1 / _nonzero(1 + term * d), _nonzero(1 + term / c)
            step *= c * d
        product *= step
        if abs(step - 1) <= _PRECISION:
            break
    return product


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def mean_interval(moments: Moments, confidence: float = 0.95) -> Interval:
    """Of a mean, by Student's t distribution; for one look. Raises InvalidInput below two observations."""
    error = math.sqrt(moments.variance / moments.count)
    radius = student_quantile((1 + _checked_share(confidence)) / 2, moments.count - 1) * error
    return Interval(moments.mean - radius, moments.mean + radius)


def proportion_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927): it has a width even after no success at all.

    Raises InvalidInput unless 0 <= successes <= trials and trials > 0.
    """
    if not 0 <= successes <= trials or not trials:
        raise InvalidInput(f"{successes} of {trials}, expected at least one trial and no more successes than trials")
    return wilson_interval(successes, trials, _NORMAL.inv_cdf((1 + _checked_share(confidence)) / 2))


def wilson_interval(successes: int, trials: int, z: float) -> Interval:
    """The same for a quantile of the normal distribution, for callers in a loop. (0, 1) for no trial."""
    if trials < 1:
        return Interval(0.0, 1.0)
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    radius = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    # At 0 and at all successes the ends are exact, and rounding would leave a trace.
    low = 0.0 if successes == 0 else max(0.0, centre - radius)
    return Interval(low, 1.0 if successes == trials else min(1.0, centre + radius))


def agresti_caffo(successes: int, trials: int) -> Moments:
    """The moments of a proportion with one more success and one more failure (Agresti and Caffo 2000).

    Without them the variance is 0 as long as nothing has failed, and any first failure would be a proof.
    """
    count, share = trials + 2, (successes + 1) / (trials + 2)
    return Moments(count, share, count * share * (1 - share))


def sample_size(
    difference: float,
    variance_a: float,
    variance_b: float,
    *,
    share_b: float = 0.5,
    alpha: float = 0.05,
    power: float = 0.8,
) -> int:
    """Observations of both arms together that find this difference of means with this power, in a two-sided test.

    share_b: the share of b in the traffic. The formula is the usual one of the normal distribution: about two
    observations per arm too few for Student's. Raises InvalidInput for a difference of 0.
    """
    spread = _spread(variance_a, variance_b, share_b)
    if not difference or not math.isfinite(difference):
        raise InvalidInput(f"A difference of {difference}, expected a finite number other than 0")
    reach = _reach(alpha, power)
    return max(4, math.ceil(reach * reach * spread / (difference * difference)))


def power(difference: float, standard_error: float, degrees_of_freedom: float, *, alpha: float = 0.05) -> float:
    """The chance that one look finds a difference of this true size, in the unit of the standard error.

    It is Student's t distribution, shifted by the difference: within 0.02 of the noncentral one from 20 degrees of
    freedom, within 0.002 from 200. The size must be chosen before: with the observed difference it would only repeat
    the p-value (Hoenig and Heisey 2001).
    """
    if not standard_error > 0:
        raise InvalidInput(f"A standard error of {standard_error}, expected more than 0")
    critical = student_quantile(1 - _checked_share(alpha) / 2, degrees_of_freedom)
    shift = abs(difference) / standard_error
    return _student_tail(critical - shift, degrees_of_freedom) + _student_tail(critical + shift, degrees_of_freedom)


def detectable_difference(standard_error: float, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest true difference that one look finds with this power, by the normal distribution."""
    return _reach(alpha, power) * standard_error


def sequence_width(samples: int, planned_samples: int, alpha: float = 0.05) -> float:
    """The half-width of a confidence sequence at this number of samples, in standard errors.

    Normal mixture of Robbins 1970 in the asymptotic form of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-
    uniform central limit theory and asymptotic confidence sequences", Annals of Statistics 2024, theorem 2.2:
    sqrt(2 (t rho^2 + 1) / (t rho^2) log(sqrt(t rho^2 + 1) / alpha)), with their rho for the time when it is to be
    narrowest. The level holds for any number of looks, and for all of them together, at any choice of that time.
    """
    _checked_share(alpha)
    if samples < 1 or planned_samples < 1:
        raise InvalidInput(f"{samples} samples of {planned_samples} planned, expected at least 1")
    surprise = -2 * math.log(alpha)
    scaled = samples * (surprise + math.log(surprise + 1)) / planned_samples
    return math.sqrt(2 * (scaled + 1) / scaled * (math.log(scaled + 1) / 2 - math.log(alpha)))


def confidence_sequence(a: Moments, b: Moments, planned_samples: int, alpha: float = 0.05) -> Interval:
    """An interval of mean b - mean a that may be looked at after every observation, as often as one likes.

    With probability 1 - alpha the true difference is inside at all looks. If 0 is outside once, the experiment may
    stop there. planned_samples: of both arms together, where the interval is to be narrowest; it is no limit.

    The difference of means of a randomised experiment is the mean of one influence value per observation, so its
    squared standard error takes the place of sigma^2 / t in `sequence_width`. The guarantee is asymptotic, as that of
    Welch's test is: the caller sets the first look. Raises InvalidInput for an arm with fewer than two observations.
    """
    error = math.sqrt(a.variance / a.count + b.variance / b.count)
    radius = sequence_width(a.count + b.count, planned_samples, alpha) * error
    difference = b.mean - a.mean
    return Interval(difference - radius, difference + radius)


def chi_square_p(observed: Sequence[int], shares: Sequence[float]) -> float:
    """Pearson's test of counts against shares that add up to 1: the p-value.

    It is 0 where a cell whose share is 0 has counts. Raises InvalidInput for fewer than two shares above 0, and
    without any counts.
    """
    total = sum(observed)
    cells = [(count, share * total) for count, share in zip(observed, shares, strict=True)]
    if any(count and not expected for count, expected in cells):
        return 0.0
    cells = [cell for cell in cells if cell[1] > 0]
    if len(cells) < 2:
        raise InvalidInput(f"{len(cells)} cells with a share and {total} counts, expected at least 2 and some counts")
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return _chi_square_tail(statistic, len(cells) - 1)


def _chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square >= statistic): a finite sum for whole degrees of freedom (Abramowitz and Stegun 26.4.4, 26.4.5)."""
    half = statistic / 2
    if half == 0:
        return 1.0
    is_odd = freedom % 2
    tail = math.erfc(math.sqrt(half)) if is_odd else math.exp(-half)
    for step in range(1 if is_odd else 2, freedom, 2):
        # step + 2 degrees of freedom have one term more than step.
        tail += math.exp(step / 2 * math.log(half) - half - math.lgamma(step / 2 + 1))
    return min(1.0, tail)


def _student_tail(point: float, degrees_of_freedom: float) -> float:
    """P(T >= point)."""
    beyond = student_p(point, degrees_of_freedom) / 2
    return beyond if point >= 0 else 1 - beyond


def _reach(alpha: float, power: float) -> float:
    return _NORMAL.inv_cdf(1 - _checked_share(alpha) / 2) + _NORMAL.inv_cdf(_checked_share(power))


def _spread(variance_a: float, variance_b: float, share_b: float) -> float:
    if not (variance_a >= 0 and variance_b >= 0 and math.isfinite(variance_a + variance_b)):
        raise InvalidInput(f"Variances of {variance_a} and {variance_b}, expected finite numbers of at least 0")
    return variance_a / (1 - _checked_share(share_b)) + variance_b / share_b


def _checked_share(value: float) -> float:
    if not 0 < value < 1:
        raise InvalidInput(f"Got {described(value)}, expected a number between 0 and 1")
    return value
