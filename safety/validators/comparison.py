"""What a comparison of outputs found -> figures with limits -> a verdict.

    Validator.compare(candidate, expected) -> Comparison: figures, problems -- merged with other rows --> verdict

A figure has a limit, and an ideal value that equal outputs reach. The way from the ideal to the limit is its allowance:

    PASS           every figure is within its limit, with a margin
    MARGINAL       within the limit, but most of the allowance is used, or the interval reaches beyond the limit
    FAIL           beyond a limit, or an output that cannot be compared: NaN, another shape, an exception
    INSUFFICIENT   there are too few rows

Shares have the interval of Wilson (1927), means that of the normal distribution. The largest and the smallest value
have none: they are judged as they are. Pure NumPy and arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from penstock.registry.errors import InvalidInput
from penstock.registry.tensors import Array
from penstock.safety.statistics import wilson_interval

__all__ = ["Comparison", "Figure", "Validator", "Verdict", "WorseSide", "Z_95", "Z_999"]

Z_95: Final = 1.959963984540054
"""Quantile of the normal distribution for a two-sided interval of 95 %."""
Z_999: Final = 3.2905267314919255
"""The same for 99.9 %: for a verdict that is looked at again and again."""
_MARGIN: Final = 0.8
"""A figure that uses more than this part of its allowance is marginal."""
_FEWEST: Final = 30
"""The mean of fewer numbers is not distributed normally enough for a sure verdict, and the largest of fewer numbers is
no scale."""
_ROUNDING: Final = 1e-9
"""Relative: a limit that is met exactly is not missed by the rounding of a sum."""


class Verdict(StrEnum):
    """What a comparison says about a candidate."""

    PASS = "PASS"  # noqa: S105 - no password
    MARGINAL = "MARGINAL"
    FAIL = "FAIL"
    INSUFFICIENT = "INSUFFICIENT"

    @property
    def is_accepted(self) -> bool:
        """Whether the candidate is within its limits: PASS or MARGINAL."""
        return self in (Verdict.PASS, Verdict.MARGINAL)


_WORST_FIRST: Final = (Verdict.FAIL, Verdict.INSUFFICIENT, Verdict.MARGINAL, Verdict.PASS)

Kind = Literal["largest", "smallest", "share", "mean"]
WorseSide: TypeAlias = Literal["lower", "higher", "either"]
"""The direction in which a figure gets worse: a cosine lower, an error higher."""
_WORSE_SIDES: Final[dict[Kind, WorseSide]] = {
    "largest": "higher",
    "smallest": "lower",
    "share": "lower",
    "mean": "either",
}
"""Of figures without a limit."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure over some rows, and its limit. `largest`, `smallest`, `share` and `mean` make one.

    Attributes:
        value: the figure. A share is between 0 and 1.
        limit: None for a figure that is only reported.
        ideal: the value of equal outputs. A limit above it is an upper one.
        count: observations behind the value.
        squares: of a mean, the sum of squared differences from it.
        scale: of a largest error that is a share of the largest number seen, this number.
    """

    kind: Kind
    value: float
    limit: float | None
    ideal: float
    count: int = 1
    squares: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.limit is not None and not math.isfinite(self.limit):
            raise InvalidInput(f"limit: found {self.limit}, expected a finite number, or None for a report only")
        if self.count < 0 or math.isnan(self.value):
            raise InvalidInput(f"figure: found {self.value} of {self.count} observations, expected a number of some")

    @classmethod
    def largest(cls, value: float, at_most: float | None, count: int = 1, *, scale: float = 1.0) -> Figure:
        """The largest error, as a share of `scale`: 0 for equal outputs."""
        return cls("largest", float(value) / scale, at_most, 0.0, count, scale=scale)

    @classmethod
    def smallest(cls, value: float, at_least: float | None, count: int = 1) -> Figure:
        """The smallest likeness: 1 for equal outputs."""
        return cls("smallest", float(value), at_least, 1.0, count)

    @classmethod
    def share(cls, hits: int, count: int, at_least: float | None) -> Figure:
        """The share of hits among `count` observations; 1 for none."""
        return cls("share", hits / count if count else 1.0, at_least, 1.0, count)

    @classmethod
    def mean(cls, values: Array, limit: float | None, *, ideal: float) -> Figure:
        """The mean of some numbers; the ideal for none. ideal: 0 for an error, 1 for a likeness."""
        if not values.size:
            return cls("mean", ideal, limit, ideal, 0)
        numbers = values.astype(np.float64).ravel()
        mean = float(numbers.mean())
        return cls("mean", mean, limit, ideal, numbers.size, float(np.square(numbers - mean).sum()))

    def merged(self, other: Figure) -> Figure:
        """The figure over the observations of both. Raises InvalidInput for figures of another kind or limit."""
        if (self.kind, self.limit, self.ideal) != (other.kind, other.limit, other.ideal):
            raise InvalidInput(
                f"figure: found a {other.kind} with limit {other.limit}, expected a {self.kind} with limit {self.limit}"
            )
        count = self.count + other.count
        if not self.count or not other.count:
            return other if other.count else self
        if self.kind == "largest":
            scale = max(self.scale, other.scale)
            value = max(self.value * (self.scale / scale), other.value * (other.scale / scale))
            return replace(self, value=value, count=count, scale=scale)
        if self.kind == "smallest":
            return replace(self, value=min(self.value, other.value), count=count)
        # Chan, Golub and LeVeque 1983: exact for any split of the observations.
        apart = other.value - self.value
        value = self.value + apart * other.count / count
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        return replace(self, value=value, count=count, squares=squares)

    def interval(self, z: float = Z_95) -> tuple[float, float] | None:
        """The confidence interval; None where there is none. z: the quantile, such as Z_95."""
        if self.kind == "share":
            return wilson_interval(round(self.value * self.count), self.count, z)
        if self.kind == "mean" and self.count > 1:
            half = z * math.sqrt(self.squares / (self.count - 1) / self.count)
            return self.value - half, self.value + half
        return None

    @property
    def verdict(self) -> Verdict:
        """PASS, MARGINAL or FAIL. The value itself decides about FAIL, the interval about MARGINAL."""
        if self.limit is None or not self.count:
            return Verdict.PASS
        if self._is_beyond(self.value):
            return Verdict.FAIL
        interval = self.interval()
        if interval is not None:
            return Verdict.MARGINAL if any(map(self._is_beyond, interval)) else Verdict.PASS
        used = abs(self.value - self.ideal)
        return Verdict.MARGINAL if used > _MARGIN * abs(self.limit - self.ideal) else Verdict.PASS

    @property
    def is_surely_beyond(self) -> bool:
        """Whether the whole interval of 99.9 % is beyond the limit; for a figure without one, the value itself."""
        if self.limit is None or not self.count:
            return False
        is_uncertain = self.kind == "mean" or self.scale != 1.0
        if is_uncertain and self.count < _FEWEST:
            return False
        return all(map(self._is_beyond, self.interval(Z_999) or (self.value,)))

    @property
    def reason(self) -> str:
        """`0.98, expected at least 0.99`; empty where there is no limit."""
        if self.limit is None:
            return ""
        bound = "at most" if self._is_upper else "at least"
        return f"{self.value:.4g}, expected {bound} {self.limit:g}"

    @property
    def worse_side(self) -> WorseSide:
        """The direction in which it gets worse; either: it is a mean without a limit."""
        if self.limit is not None:
            return "higher" if self._is_upper else "lower"
        return _WORSE_SIDES[self.kind]

    @property
    def _is_upper(self) -> bool:
        if self.kind != "mean":
            return self.kind == "largest"
        # A limit at the ideal allows nothing: more of an error, whose ideal is 0, or less of a likeness.
        return self.limit is not None and (self.limit > self.ideal or self.limit == self.ideal == 0)

    def _is_beyond(self, value: float) -> bool:
        if self.limit is None:
            return False
        slack = _ROUNDING * abs(self.limit)
        return value > self.limit + slack if self._is_upper else value < self.limit - slack


@dataclass(frozen=True, slots=True)
class Comparison:
    """Figures of an output by name, over `rows` rows.

    problems: why rows could not be compared, with the number of these rows. A comparison with a problem has failed,
    whatever the figures.
    """

    rows: int = 0
    figures: Mapping[str, Figure] = field(default_factory=dict)
    problems: Mapping[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its figures. INSUFFICIENT without rows."""
        if self.problems:
            return Verdict.FAIL
        found = {figure.verdict for figure in self.figures.values()}
        if not self.rows:
            found.add(Verdict.INSUFFICIENT)
        return next((verdict for verdict in _WORST_FIRST if verdict in found), Verdict.PASS)

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against the output. Of no rows nothing does."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason against the output."""
        failed = ((name, each) for name, each in self.figures.items() if each.verdict is Verdict.FAIL)
        return (*self._of_problems, *(f"{name} {figure.reason}" for name, figure in failed))

    @property
    def sure_reasons(self) -> tuple[str, ...]:
        """The reasons that more rows will not remove; see Figure.is_surely_beyond."""
        sure = ((name, each) for name, each in self.figures.items() if each.is_surely_beyond)
        return (*self._of_problems, *(f"{name} {figure.reason}" for name, figure in sure))

    @property
    def reason(self) -> str:
        """All reasons in one line; empty where the output is accepted."""
        return "; ".join(self.reasons)

    @property
    def values(self) -> dict[str, float]:
        """The figures as plain numbers."""
        return {name: figure.value for name, figure in self.figures.items()}

    def merged(self, other: Comparison) -> Comparison:
        """The comparison over the rows of both. Raises InvalidInput for figures of another kind or limit."""
        figures, problems = dict(self.figures), dict(self.problems)
        for name, figure in other.figures.items():
            figures[name] = figures[name].merged(figure) if name in figures else figure
        for problem, rows in other.problems.items():
            problems[problem] = problems.get(problem, 0) + rows
        return Comparison(self.rows + other.rows, figures, problems)

    @classmethod
    def failed(cls, problem: str, rows: int = 0, bad_rows: int | None = None) -> Comparison:
        """A comparison that could not be made. bad_rows: those with the problem; None: all."""
        return cls(rows, {}, {problem: rows if bad_rows is None else bad_rows})

    @property
    def _of_problems(self) -> list[str]:
        return [f"{problem} ({bad} of {self.rows} rows)" for problem, bad in self.problems.items()]


class Validator(Protocol):
    """Judges one output over some rows. `compare` may be an `async def`; see validator_registry.py.

    A validator may have an attribute `is_per_job`. If it is true, it is called with the rows of one job at a time: a
    ranking, for example, is the order of the rows of a job.
    """

    def compare(self, candidate: Array, expected: Array) -> Comparison | Awaitable[Comparison]:
        """Compares the same rows in the same order. A wrong shape is a problem, not an error."""
