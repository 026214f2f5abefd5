"""A candidate beside the version that serves, on goldens and on shadow pairs -> a running verdict with its reasons.

    chunks of Pair: expected outputs, the candidate's outputs or its exception, both latencies
        --> Canary.observe --> CanaryVerdict so far --> FAIL: stop; else the next chunk

FAIL comes as soon as more pairs cannot change it: an exception, NaN, another shape, a worst case beyond its limit, or a
share whose interval of 99.9 % lies beyond its limit. PASS needs `min_pairs`: 1,500 pairs without an error leave less
than 5 % for a candidate that errs in one of 500 (0.998 ** 1500). Pure: no clock, no model; latencies are arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Final

import msgspec
import numpy as np

from penstock.registry.errors import InvalidInput
from penstock.registry.shadow import CANARY_PAIRS
from penstock.registry.tensors import Array
from penstock.safety.validator_registry import compare_outputs
from penstock.safety.validators import Comparison, Validator, Verdict

__all__ = ["MIN_PAIRS", "Canary", "CanaryState", "CanaryVerdict", "NoOutputs", "Pair"]

Outputs = Mapping[str, Array]

MIN_PAIRS: Final = CANARY_PAIRS
_WORST_KEPT: Final = 5
_MIN_LATENCIES: Final = 100
"""Fewer pairs say nothing about the latency: the first forwards of a candidate are slow."""


class NoOutputs(Exception):
    """The candidate gave none. Its text is shown and counted, so it must be the same for all pairs of its kind."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One job, answered by the version that serves and by the candidate.

    candidate: its outputs, or the exception that it raised. Latencies are seconds of the forwards; 0: not measured.
    """

    expected: Outputs
    candidate: Outputs | BaseException
    expected_s: float = 0.0
    candidate_s: float = 0.0
    name: str = ""
    """The job's id or the golden's digest, to find it again."""


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """What the pairs so far say. `comparisons`: by output.

    worst: the names of pairs that failed alone, the first ones. latency_ratio: seconds of the candidate over those of
    the version that serves; None where nothing was measured.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    pairs: int
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    latency_ratio: float | None = None
    worst: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether more pairs cannot improve the verdict."""
        return self.verdict is Verdict.FAIL

    @property
    def figures(self) -> dict[str, float]:
        """Every finite figure as `<output>.<figure>`, with the pairs and the ratio of latencies."""
        found = {
            f"{output}.{name}": value
            for output, comparison in self.comparisons.items()
            for name, value in comparison.values.items()
            if isfinite(value)
        }
        ratio = {} if self.latency_ratio is None else {"latency_ratio": self.latency_ratio}
        return {"pairs": float(self.pairs), **found, **ratio}

    def as_data(self) -> dict[str, Any]:
        """The verdict as plain data for JSON: figures with their limits and their intervals of 95 %."""
        figures = {}
        for output, comparison in self.comparisons.items():
            for name, figure in comparison.figures.items():
                value = figure.value if isfinite(figure.value) else None
                entry = {"value": value, "limit": figure.limit, "count": figure.count, "verdict": str(figure.verdict)}
                figures[f"{output}.{name}"] = {**entry, "interval": figure.interval()}
        return {
            "verdict": str(self.verdict),
            "reasons": list(self.reasons),
            "pairs": self.pairs,
            "latency_ratio": self.latency_ratio,
            "worst": list(self.worst),
            "figures": figures,
        }


@dataclass(frozen=True, slots=True)
class CanaryState:
    """What the pairs so far have shown, as plain data: several canaries of one candidate can be merged.

    comparisons: by output. timed: pairs with both latencies, whose sums are expected_s and candidate_s. problems: why
    pairs could not be compared, with their number. worst: names of pairs that failed alone.
    """

    pairs: int = 0
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    timed: int = 0
    expected_s: float = 0.0
    candidate_s: float = 0.0
    problems: Mapping[str, int] = field(default_factory=dict)
    worst: tuple[str, ...] = ()

    def merged(self, other: CanaryState) -> CanaryState:
        """What both have shown together."""
        names = {**self.comparisons, **other.comparisons}
        problems = dict(self.problems)
        for problem, count in other.problems.items():
            problems[problem] = problems.get(problem, 0) + count
        return CanaryState(
            self.pairs + other.pairs,
            {name: _merged([each.comparisons.get(name, Comparison()) for each in (self, other)]) for name in names},
            self.timed + other.timed,
            self.expected_s + other.expected_s,
            self.candidate_s + other.candidate_s,
            problems,
            tuple(dict.fromkeys((*self.worst, *other.worst)))[:_WORST_KEPT],
        )

    def verdict(self, min_pairs: int = MIN_PAIRS, max_latency_ratio: float = inf) -> CanaryVerdict:
        """The verdict on the pairs so far; see Canary for the limits."""
        has_enough = self.pairs >= min_pairs
        reasons = [f"{problem} ({count} of {self.pairs} pairs)" for problem, count in self.problems.items()]
        for name, comparison in self.comparisons.items():
            found = comparison.reasons if has_enough else comparison.sure_reasons
            reasons += [f"{name}: {reason}" for reason in found]
        ratio = self.candidate_s / self.expected_s if self.expected_s else None
        if ratio is not None and self.timed >= _MIN_LATENCIES and ratio > max_latency_ratio:
            reasons.append(f"latency_ratio {ratio:.4g}, expected at most {max_latency_ratio:g}")
        return CanaryVerdict(
            self._verdict(reasons, has_enough=has_enough),
            tuple(reasons) or (() if has_enough else (f"{self.pairs} pairs, expected at least {min_pairs}",)),
            self.pairs,
            dict(self.comparisons),
            ratio,
            self.worst,
        )

    def encode(self) -> str:
        """As JSON, for `decode`. A figure may be infinite."""
        return json.dumps(msgspec.to_builtins(self))

    @classmethod
    def decode(cls, text: str) -> CanaryState:
        """Raises InvalidInput for a text that `encode` did not make."""
        try:
            return msgspec.convert(json.loads(text), cls)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"The state of a canary cannot be read: {error!s:.200}") from None

    def _verdict(self, reasons: Sequence[str], *, has_enough: bool) -> Verdict:
        if reasons:
            return Verdict.FAIL
        if not has_enough:
            return Verdict.INSUFFICIENT
        found = {comparison.verdict for comparison in self.comparisons.values()}
        return next(each for each in (Verdict.INSUFFICIENT, Verdict.MARGINAL, Verdict.PASS) if each in found)


class Canary:
    """Judges one candidate. One thread at a time.

    validators: by output; outputs without one are not compared. min_pairs: with fewer, the verdict is INSUFFICIENT.
    max_latency_ratio: a candidate that takes longer than so many times the served seconds fails, from 100 pairs on.

    Raises InvalidInput for limits that no candidate can meet.
    """

    def __init__(
        self,
        validators: Mapping[str, Validator],
        *,
        min_pairs: int = MIN_PAIRS,
        max_latency_ratio: float = inf,
    ) -> None:
        if not validators:
            raise InvalidInput("validators: found none, expected one for at least one output")
        if min_pairs < 1:
            raise InvalidInput(f"min_pairs: found {min_pairs}, expected at least 1")
        if not max_latency_ratio > 0:
            raise InvalidInput(f"max_latency_ratio: found {max_latency_ratio}, expected a number above 0")
        self._validators = dict(validators)
        self._min_pairs = min_pairs
        self._max_latency_ratio = max_latency_ratio
        self._comparisons: dict[str, Comparison] = {}
        self._pairs = 0
        self._timed = 0
        self._expected_s = self._candidate_s = 0.0
        self._problems: dict[str, int] = {}
        """Reason -> pairs that could not be compared for it."""
        self._worst: list[str] = []

    def run(self, chunks: Iterable[Sequence[Pair]]) -> CanaryVerdict:
        """Observes chunk after chunk until the first FAIL or the end. Takes no chunk after that."""
        verdict = self.verdict
        for chunk in chunks:
            verdict = self.observe(chunk)
            if verdict.is_final:
                break
        return verdict

    def observe(self, pairs: Sequence[Pair]) -> CanaryVerdict:
        """Takes in a chunk of pairs. Larger chunks find more about the neighbours of embeddings."""
        fitting = [pair for pair in pairs if self._fits(pair)]
        self._pairs += len(pairs)
        for pair in fitting:
            if pair.expected_s > 0 and pair.candidate_s > 0:
                self._timed += 1
                self._expected_s += pair.expected_s
                self._candidate_s += pair.candidate_s
        for name, validator in self._validators.items() if fitting else ():
            self._add(name, self._compared(name, validator, fitting))
        return self.verdict

    @property
    def verdict(self) -> CanaryVerdict:
        """The verdict on the pairs so far."""
        return self.state.verdict(self._min_pairs, self._max_latency_ratio)

    @property
    def state(self) -> CanaryState:
        """What the pairs so far have shown."""
        return CanaryState(
            self._pairs,
            dict(self._comparisons),
            self._timed,
            self._expected_s,
            self._candidate_s,
            dict(self._problems),
            tuple(self._worst),
        )

    def _fits(self, pair: Pair) -> bool:
        """Whether the pair's outputs can be compared. Otherwise its problem counts."""
        problem = self._problem_of(pair)
        if problem:
            self._problems[problem] = self._problems.get(problem, 0) + 1
            self._note_worst([pair])
        return not problem

    def _problem_of(self, pair: Pair) -> str:
        if isinstance(pair.candidate, NoOutputs):
            return str(pair.candidate)
        if isinstance(pair.candidate, BaseException):
            # Its text may repeat an input.
            return f"the candidate raised {type(pair.candidate).__name__}"
        for name in self._validators:
            if name not in pair.expected:
                raise InvalidInput(f"{name}: missing in the expected outputs. Expected: {', '.join(self._validators)}")
            if name not in pair.candidate:
                return f"{name}: missing"
        return ""

    def _compared(self, name: str, validator: Validator, pairs: Sequence[Pair]) -> Comparison:
        """One comparison over the rows of all pairs that have the same extents, or job by job."""
        if getattr(validator, "is_per_job", False):
            groups = [[pair] for pair in pairs]
        else:
            by_extents: dict[object, list[Pair]] = {}
            for pair in pairs:
                by_extents.setdefault(_extents(name, pair), []).append(pair)
            groups = list(by_extents.values())
        total = Comparison()
        for group in groups:
            found = self._compared_group(name, validator, group)
            if found.problems and len(group) > 1:
                # The rest of the group is right or wrong for itself, and the bad pair has a name.
                found = _merged([self._compared_group(name, validator, [pair]) for pair in group])
            total = _merged([total, found])
        return total

    def _compared_group(self, name: str, validator: Validator, group: Sequence[Pair]) -> Comparison:
        ours, expected = _joined_outputs(name, group)
        found = compare_outputs(validator, ours, expected)
        if len(group) == 1 and found.sure_reasons:
            self._note_worst(group)
        return found

    def _note_worst(self, pairs: Sequence[Pair]) -> None:
        names = [pair.name for pair in pairs if pair.name and pair.name not in self._worst]
        self._worst += names[: _WORST_KEPT - len(self._worst)]

    def _add(self, name: str, found: Comparison) -> None:
        self._comparisons[name] = _merged([self._comparisons.get(name, Comparison()), found])


def _merged(comparisons: Sequence[Comparison]) -> Comparison:
    total = Comparison()
    for comparison in comparisons:
        try:
            total = total.merged(comparison)
        except InvalidInput as error:
            # A custom validator whose limits change from call to call proves nothing.
            total = Comparison.failed(str(error), total.rows + comparison.rows)
    return total


def _joined_outputs(name: str, group: Sequence[Pair]) -> tuple[Array, Array]:
    ours = [pair.candidate[name] for pair in group if not isinstance(pair.candidate, BaseException)]
    expected = [pair.expected[name] for pair in group]
    return (ours[0], expected[0]) if len(group) == 1 else (np.concatenate(ours), np.concatenate(expected))


def _extents(name: str, pair: Pair) -> object:
    """Pairs with equal values can be joined. A pair with another number of rows on both sides stays alone."""
    if isinstance(pair.candidate, BaseException):
        return object()
    ours, theirs = pair.candidate[name], pair.expected[name]
    if not ours.ndim or not theirs.ndim or len(ours) != len(theirs):
        return object()
    return ours.shape[1:], ours.dtype.str, theirs.shape[1:], theirs.dtype.str
