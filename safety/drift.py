"""Drift of a validator's metric: a series of values -> steady or drift, against a reference window. Pure: no clock.

    reference window -> sorted once -> normal score of each new value -> EWMA -> beyond its control limit: ONE alert
                                                                     `-> ADWIN (if asked for) -> the mean has changed

Most metrics are skewed and bounded: cosines end at 1, agreement is 0 or 1. Control limits in standard deviations of the
raw values would be wrong for them. So each value becomes the normal score of its rank in the reference window
(Conover, Tercero-Gomez and Cordero-Franco 2017, "The sequential normal scores transformation"). In a steady state
scores are standard normal for any distribution, and no single outlier is larger than the window allows.

The chart of the scores is the EWMA of Roberts 1959, with the limits of Lucas and Saccucci 1990.

A chart sees that the metric changed, not why: other inputs than those of the reference window look like drift, too.
Take the reference from the same traffic, over a time in which its kinds of inputs have come.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, log, nan, sqrt
from statistics import NormalDist
from typing import Any, Final, Literal

from penstock.registry.errors import InvalidInput, described
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.validators import WorseSide

__all__ = ["Adwin", "DriftAlert", "DriftLimits", "DriftMonitor", "Ewma", "Reference"]

_SIDES: Final = ("lower", "higher", "either")
_STANDARD: Final = NormalDist()
_MOST_COUNTED: Final = 10**9
"""Of a stored state: by then the weight of the first values is zero."""
_MOST_ROWS: Final = 50
"""Of a stored window of ADWIN: 2 ** 50 values are more than a candidate ever has."""


@dataclass(frozen=True, slots=True)
class DriftLimits:
    """smoothing: the weight of the newest value, in (0, 1]; a shift is seen after some 1 / smoothing values. width: the
    control limit in standard deviations of the smoothed score. reference_size: values of the reference window, and
    the fewest of one that is given. adwin_delta: the confidence of ADWIN; None: without it.

    By default a shift of two standard deviations is found within 50 values, and a steady series alarms less than once
    in 100,000: `python -m tests.benchmarks --only drift` measures both. Raises InvalidInput.
    """

    smoothing: float = 0.05
    width: float = 5.5
    reference_size: int = 200
    adwin_delta: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.smoothing <= 1:
            raise InvalidInput(f"smoothing is {self.smoothing:g}. Expected more than 0 and at most 1")
        if not 0 < self.width < float("inf"):
            raise InvalidInput(f"width is {self.width:g}. Expected a positive number")
        if self.reference_size < 2:
            raise InvalidInput(f"reference_size is {self.reference_size}. Expected at least 2 values")
        if self.adwin_delta is not None and not 0 < self.adwin_delta < 1:
            raise InvalidInput(f"adwin_delta is {self.adwin_delta:g}. Expected a number between 0 and 1")

    @classmethod
    def of(cls, config: SafetyConfig) -> DriftLimits:
        """The limits of the settings."""
        return cls(
            config.drift_smoothing,
            config.drift_width,
            config.drift_reference_size,
            config.drift_adwin_delta or None,
        )


class Ewma:
    """z(0) = 0, z(t) = smoothing * x(t) + (1 - smoothing) * z(t-1), for values of mean 0 and variance 1.

    Closed form: z(t) = smoothing * sum of (1 - smoothing)^(t-i) * x(i) over i = 1..t.
    """

    def __init__(self, smoothing: float, value: float = 0.0, count: int = 0) -> None:
        self.smoothing: Final = smoothing
        self.value = value
        self.count = count

    def add(self, value: float) -> float:
        """The smoothed value with this one."""
        self.count += 1
        self.value += self.smoothing * (value - self.value)
        return self.value

    def deviation(self, reference: int) -> float:
        """The standard deviation of `value` in a steady state, when mean 0 was estimated from so many values.

        The variance is smoothing / (2 - smoothing) * (1 - (1 - smoothing)^(2t)); the estimate adds 1 / reference.
        """
        share = self.smoothing / (2 - self.smoothing)
        weight = 1 - (1 - self.smoothing) ** self.count
        return sqrt(share * (1 - (1 - self.smoothing) ** (2 * self.count)) + weight**2 / reference)


class Reference:
    """The values of a steady state: canary pairs that passed, or the first shadow pairs after it.

    Raises InvalidInput for a value that is not finite.
    """

    def __init__(self, values: Sequence[float]) -> None:
        if not all(isfinite(value) for value in values):
            raise InvalidInput("The reference window contains NaN or infinity. Expected finite numbers")
        self.values: Final = tuple(sorted(map(float, values)))
        """In ascending order."""

    def __len__(self) -> int:
        return len(self.values)

    def rank(self, value: float) -> float:
        """The share of the reference below the value, in (0, 1); equal values count half (a mid-rank)."""
        below, upto = bisect_left(self.values, value), bisect_right(self.values, value)
        return ((below + upto) / 2 + 0.5) / (len(self.values) + 1)

    def score(self, value: float) -> float:
        """The normal score of the value: standard normal while the series is as it was in the window."""
        return _STANDARD.inv_cdf(self.rank(value))


@dataclass(frozen=True, slots=True)
class DriftAlert:
    """The metric has drifted. `score`: the smoothed score, whose limit is `limit`; for ADWIN the change of the mean
    rank, and the least change that it takes. `count`: values since the reference window."""

    metric: str
    detector: Literal["ewma", "adwin"]
    score: float
    limit: float
    count: int

    @property
    def reason(self) -> str:
        """The alert in words, for a breaker and for people."""
        way = "lower" if self.score < 0 else "higher"
        return (
            f"drift: {self.metric} is {way} than in its reference window "
            f"({self.detector} {abs(self.score):.2f} > {self.limit:.2f}, after {self.count} values)"
        )


@dataclass(slots=True)
class DriftMonitor:
    """Watches one metric of one candidate. The first values are its reference, unless one is given.

    A monitor alerts once; `reset` lets it begin anew. NaN and infinity count as the worst value: a validator that gets
    no figure has not got a good one.
    """

    metric: str
    worse: WorseSide
    limits: DriftLimits = field(default_factory=DriftLimits)
    reference: Reference | None = None
    alert: DriftAlert | None = field(default=None, init=False)
    """The alert, once there is one."""
    _ewma: Ewma = field(init=False)
    _adwin: Adwin | None = field(init=False)
    _window: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Raises InvalidInput for an unknown side and for a reference window that is too small."""
        if self.worse not in _SIDES:
            raise InvalidInput(f"Unknown side {described(self.worse)}. Expected one of: {', '.join(_SIDES)}")
        if self.reference is not None:
            self._check(self.reference)
        self._begin()

    @property
    def count(self) -> int:
        """Values since the reference window."""
        return self._ewma.count

    @property
    def score(self) -> float:
        """The smoothed score: 0 in the middle of a steady state."""
        return self._ewma.value

    @property
    def limit(self) -> float:
        """The smoothed score beyond which the metric has drifted; infinite without a reference."""
        if self.reference is None or not self._ewma.count:
            return float("inf")
        return self.limits.width * self._ewma.deviation(len(self.reference))

    def observe(self, value: float) -> DriftAlert | None:
        """A new value. Returns the alert when this value raises it; None otherwise, also while the drift lasts."""
        reference = self.reference
        if reference is None:
            self._gather(value)
            return None
        if not isfinite(value):
            value = float("inf") if self.worse == "higher" else float("-inf")
        score = self._ewma.add(reference.score(value))
        found = self._adwin.add(reference.rank(value)) if self._adwin is not None else None
        if self.alert is not None:
            return None
        if self._is_worse(score) and abs(score) > (limit := self.limit):
            self.alert = DriftAlert(self.metric, "ewma", score, limit, self.count)
        elif found is not None and self._is_worse(found[0]):
            self.alert = DriftAlert(self.metric, "adwin", *found, self.count)
        return self.alert

    def reset(self, reference: Reference | None = None) -> None:
        """Begin anew, with this reference window or with the present one."""
        if reference is not None:
            self._check(reference)
            self.reference = reference
        self._begin()

    def as_data(self) -> dict[str, Any]:
        """The state as plain data, for a worker that restarts; see `from_data`. Of the alert it has nothing."""
        return {
            "metric": self.metric,
            "worse": self.worse,
            "reference": list(self.reference.values if self.reference else self._window),
            "is_complete": self.reference is not None,
            "score": self._ewma.value,
            "count": self._ewma.count,
            "adwin": self._adwin.as_data() if self._adwin is not None else None,
        }

    @classmethod
    def from_data(cls, data: dict[str, Any], limits: DriftLimits | None = None) -> DriftMonitor:
        """The monitor of `as_data`. A drift that lasts alerts again.

        Raises InvalidInput for data of another form, and for a reference window that is too small for these limits.
        """
        try:
            monitor = cls(str(data["metric"]), data["worse"], limits or DriftLimits())
            values = [float(value) for value in data["reference"]]
            score, count = float(data["score"]), min(int(data["count"]), _MOST_COUNTED)
            is_complete, adwin = bool(data["is_complete"]), data["adwin"]
            if not isfinite(score) or count < 0:
                raise ValueError
            if is_complete:
                monitor.reset(Reference(values))
                monitor._ewma = Ewma(monitor.limits.smoothing, score, count)
                if adwin is not None and monitor.limits.adwin_delta is not None:
                    monitor._adwin = Adwin.from_data(adwin, monitor.limits.adwin_delta)
            else:
                monitor._window = list(Reference(values).values)
        except InvalidInput:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError):
            raise InvalidInput("The state of a drift monitor is not usable. Expected that of as_data") from None
        return monitor

    def _begin(self) -> None:
        self.alert = None
        self._ewma = Ewma(self.limits.smoothing)
        delta = self.limits.adwin_delta
        self._adwin = None if delta is None else Adwin(delta)

    def _gather(self, value: float) -> None:
        if not isfinite(value):
            # It is a failure of the candidate, which the canary counts. A reference has finite values only.
            return
        self._window.append(value)
        if len(self._window) >= self.limits.reference_size:
            self.reference, self._window = Reference(self._window), []

    def _is_worse(self, change: float) -> bool:
        return self.worse == "either" or (change < 0) == (self.worse == "lower")

    def _check(self, reference: Reference) -> None:
        if len(reference) < (least := self.limits.reference_size):
            raise InvalidInput(
                f"The reference window of {self.metric} has {len(reference)} values. Expected at least {least}"
            )


class Adwin:
    """ADWIN2, for values in [0, 1]: Bifet and Gavalda 2007, "Learning from time-changing data with adaptive windowing".

    A window of the latest values, kept as an exponential histogram: at most 5 buckets of 1, 2, 4, ... values each, so
    that memory and time grow with the logarithm of its length. It is cut where the means of its two parts differ by
    more than

        sqrt(2 / m * v * ln(2 / d)) + 2 / (3 * m) * ln(2 / d),    1 / m = 1 / n0 + 1 / n1,    d = delta / ln(n)

    for n values with variance v in parts of n0 and n1. delta bounds the false alarms of one look, not those of a day.
    """

    _BUCKETS: Final = 5
    _EVERY: Final = 8
    """Values between two looks for a cut."""
    _SHORTEST: Final = 5
    """Values of a part."""

    def __init__(self, delta: float = 0.002) -> None:
        self.delta: Final = delta
        # By size exponent: (sum, sum of squares) of each bucket, newest first.
        self._rows: list[deque[tuple[float, float]]] = [deque()]
        self._count = 0
        self._added = 0
        self._sum = self._squares = 0.0

    def __len__(self) -> int:
        return self._count

    @property
    def mean(self) -> float:
        """The mean of the window; NaN while it is empty."""
        return self._sum / self._count if self._count else nan

    def add(self, value: float) -> tuple[float, float] | None:
        """A new value. When the mean has changed: (new mean - old mean, the least change that counts); the window then
        holds the newer part. Raises InvalidInput for a value outside [0, 1]."""
        if not 0 <= value <= 1:
            raise InvalidInput(f"ADWIN got {value}. Expected a number from 0 to 1")
        self._rows[0].appendleft((value, value * value))
        self._count += 1
        self._added += 1
        self._sum += value
        self._squares += value * value
        self._compress()
        found = None
        while self._added % self._EVERY == 0 and (cut := self._cut()) is not None:
            found = found or cut
            self._drop_oldest()
        return found

    def as_data(self) -> dict[str, Any]:
        """The state as plain data; see `from_data`."""
        return {"rows": [[list(bucket) for bucket in row] for row in self._rows], "added": self._added}

    @classmethod
    def from_data(cls, data: dict[str, Any], delta: float) -> Adwin:
        """The window of `as_data`. Raises LookupError, TypeError or ValueError for data of another form."""
        adwin = cls(delta)
        rows = [deque((float(total), float(squares)) for total, squares in row) for row in data["rows"]]
        buckets = [(1 << exponent, bucket) for exponent, row in enumerate(rows) for bucket in row]
        is_sound = all(0 <= squares <= total <= size for size, (total, squares) in buckets)
        if not 0 < len(rows) <= _MOST_ROWS or not is_sound or any(len(row) > cls._BUCKETS for row in rows):
            raise ValueError
        adwin._rows, adwin._added = rows, int(data["added"])
        adwin._count = sum(size for size, _ in buckets)
        adwin._sum, adwin._squares = (sum(bucket[place] for _, bucket in buckets) for place in range(2))
        return adwin

    def _compress(self) -> None:
        row = 0
        while len(self._rows[row]) > self._BUCKETS:
            (older, older_squares), (newer, newer_squares) = self._rows[row].pop(), self._rows[row].pop()
            if row + 1 == len(self._rows):
                self._rows.append(deque())
            self._rows[row + 1].appendleft((older + newer, older_squares + newer_squares))
            row += 1

    def _cut(self) -> tuple[float, float] | None:
        """The first cut, from the oldest values on, whose parts differ; None: they do not."""
        if self._count < 2 * self._SHORTEST:
            return None
        variance = max(0.0, self._squares / self._count - self.mean**2)
        term = log(2 * log(self._count) / self.delta)
        old, old_sum = 0, 0.0
        for exponent in range(len(self._rows) - 1, -1, -1):
            for total, _ in reversed(self._rows[exponent]):
                old, old_sum = old + (1 << exponent), old_sum + total
                new = self._count - old
                if new < self._SHORTEST:
                    return None
                if old < self._SHORTEST:
                    continue
                inverse = 1 / old + 1 / new
                least = sqrt(2 * inverse * variance * term) + 2 / 3 * inverse * term
                change = (self._sum - old_sum) / new - old_sum / old
                if abs(change) > least:
                    return change, least
        return None

    def _drop_oldest(self) -> None:
        total, squares = self._rows[-1].pop()
        self._count -= 1 << (len(self._rows) - 1)
        self._sum -= total
        self._squares -= squares
        while len(self._rows) > 1 and not self._rows[-1]:
            self._rows.pop()
