"""A candidate's share of the traffic, step by step: figures of two versions -> the next decision. Pure.

    begin -> step 1 --- dwell is over, gate PASS ---> next step ... -> last step -> COMPLETE
               |  ^--- gate FAIL, at any time: STEP_BACK ---'
               '------ gate FAIL in the first step, or too many failures: ROLL_BACK

The gate compares what both versions did in the present step:

    PASS          no limit is exceeded                                            -> the next step, after the dwell
    MARGINAL      a limit is exceeded, and it may be chance                       -> HOLD: one more dwell
    FAIL          a limit is surely exceeded                                      -> back
    INSUFFICIENT  too few jobs of either version                                  -> wait

The gate is looked at again and again. Its FAIL therefore comes from confidence sequences (safety/statistics.py), which
keep their level over any number of looks. A PASS counts only once per dwell.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from math import isfinite
from typing import Any, Final, NamedTuple

import msgspec

from penstock.registry.errors import InvalidInput, TransitionRefused
from penstock.safety.arm_figures import ArmFigures, merged
from penstock.safety.statistics import Moments, agresti_caffo, confidence_sequence
from penstock.safety.validators import Verdict

__all__ = [
    "ROLLOUT_DECISION",
    "STEPS",
    "Action",
    "GateVerdict",
    "GradualRollout",
    "HealthGate",
    "RolloutDecision",
    "RolloutPlan",
    "RolloutState",
    "StepFigures",
    "figures_of_step",
    "steps_from",
]

ROLLOUT_DECISION: Final = "rollout_decision"
"""The operation in the audit log: one decision about a rollout."""
STEPS: Final = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Shares of the candidate, in percent."""
_SURE_FROM: Final = 10
"""Jobs of the candidate from which on errors alone may be a FAIL."""
_TAIL: Final = 0.05
_LIMITS: Final = 3
"""The gate has three limits, which share its alpha."""


class Action(StrEnum):
    """What follows from a verdict. WAIT changes nothing and needs no record."""

    WAIT = "wait"
    HOLD = "hold"
    ADVANCE = "advance"
    STEP_BACK = "step_back"
    ROLL_BACK = "roll_back"
    COMPLETE = "complete"


class StepFigures(NamedTuple):
    """What both versions did in one step."""

    stable: ArmFigures
    candidate: ArmFigures


class GateVerdict(NamedTuple):
    """A verdict, the limits that decided it, and the compared figures. Times are in seconds."""

    verdict: Verdict
    reason: str
    evidence: Mapping[str, float | int | None]


class HealthGate(msgspec.Struct, frozen=True):
    """The limits that the candidate must keep, compared with the stable version."""

    min_samples: int = 100
    """Jobs of each version, and forwards of each, before a PASS."""
    max_error_increase: float = 0.01
    """Share of jobs, 0 to 1, that may fail in addition."""
    max_mean_ratio: float = 1.25
    """Mean latency over that of the stable version."""
    max_p95_ratio: float = 1.5
    """The same for the 95th percentile."""
    alpha: float = 0.05
    """The chance that a candidate within all limits fails in one step, however often one looks."""

    def check(self) -> None:
        """Raises InvalidInput for limits that no gate can keep."""
        if self.min_samples < 2:
            raise InvalidInput(f"min_samples is {self.min_samples}. Expected at least 2")
        if not 0 <= self.max_error_increase < 1:
            raise InvalidInput(f"max_error_increase is {self.max_error_increase:g}. Expected a share from 0 to 1")
        for name, ratio in (("max_mean_ratio", self.max_mean_ratio), ("max_p95_ratio", self.max_p95_ratio)):
            if not (isfinite(ratio) and ratio > 0):
                raise InvalidInput(f"{name} is {ratio:g}. Expected a positive number, such as 1.25")
        if not 0 < self.alpha < 1:
            raise InvalidInput(f"alpha is {self.alpha:g}. Expected a number between 0 and 1")

    def judge(self, figures: StepFigures) -> GateVerdict:
        """The verdict on one step. The latency is judged from `min_samples` on: below, a few slow jobs decide."""
        stable, candidate = figures
        evidence = _evidence(figures)
        failed, doubtful = [], []
        has_few = min(stable.jobs, candidate.jobs, stable.latency_s.count, candidate.latency_s.count) < self.min_samples
        limits = [self._errors(figures), *([] if has_few else (self._mean(figures), self._tail(figures)))]
        for text, is_exceeded, is_sure in limits:
            if is_sure:
                failed.append(text)
            elif is_exceeded:
                doubtful.append(text)
        if failed:
            return GateVerdict(Verdict.FAIL, "; ".join(failed), evidence)
        if has_few:
            few = f"{candidate.jobs} jobs of the candidate and {stable.jobs} of the stable version"
            return GateVerdict(Verdict.INSUFFICIENT, f"{few}, expected {self.min_samples} with a forward", evidence)
        if doubtful:
            return GateVerdict(Verdict.MARGINAL, "; ".join(doubtful), evidence)
        return GateVerdict(Verdict.PASS, "; ".join(text for text, _, _ in limits), evidence)

    def _errors(self, figures: StepFigures) -> tuple[str, bool, bool]:
        """(text, whether the limit is exceeded, whether that is sure), like the other limits."""
        stable, candidate = figures
        rates = [arm.error_rate or 0.0 for arm in figures]
        text = f"errors {rates[1]:.2%} against {rates[0]:.2%}"
        is_exceeded = rates[1] > rates[0] + self.max_error_increase
        if not is_exceeded or candidate.jobs < _SURE_FROM:
            return text, is_exceeded, False
        known = agresti_caffo(stable.errors, stable.jobs)
        bound = self._sequence_low(known, agresti_caffo(candidate.errors, candidate.jobs))
        return text, True, bound > self.max_error_increase

    def _mean(self, figures: StepFigures) -> tuple[str, bool, bool]:
        stable, candidate = (arm.latency_s for arm in figures)
        text = f"mean {candidate.mean * 1e3:.3g} ms against {stable.mean * 1e3:.3g} ms"
        limit = self.max_mean_ratio
        allowed = Moments(stable.count, stable.mean * limit, stable.m2 * limit * limit)
        is_exceeded = candidate.mean > allowed.mean
        return text, is_exceeded, is_exceeded and self._sequence_low(allowed, candidate) > 0

    def _tail(self, figures: StepFigures) -> tuple[str, bool, bool]:
        """The candidate's share of jobs above the allowed p95, against the 5 % that may be there."""
        stable_s, candidate_s = (arm.quantile_s(1 - _TAIL) or 0.0 for arm in figures)
        text = f"p95 {candidate_s * 1e3:.3g} ms against {stable_s * 1e3:.3g} ms"
        allowed_s = stable_s * self.max_p95_ratio
        if candidate_s <= allowed_s:
            return text, False, False
        counts = [arm.latency_s.count for arm in figures]
        beyond = agresti_caffo(figures.candidate.beyond(allowed_s), counts[1])
        expected = agresti_caffo(round(_TAIL * counts[0]), counts[0])
        return text, True, self._sequence_low(expected, beyond) > 0

    def _sequence_low(self, stable: Moments, candidate: Moments) -> float:
        return confidence_sequence(stable, candidate, 10 * self.min_samples, self.alpha / _LIMITS).low


class RolloutPlan(msgspec.Struct, frozen=True):
    """What is ordered at the start of a rollout.

    steps: the candidate's shares in percent, ascending, the last one 100. dwell_s: the least time in a step.
    max_failures: the FAIL with this number rolls back. max_holds: the MARGINAL with this number in one step is a FAIL.
    """

    steps: tuple[float, ...] = STEPS
    dwell_s: float = 300.0
    gate: HealthGate = HealthGate()
    max_failures: int = 3
    max_holds: int = 3

    def check(self) -> None:
        """Raises InvalidInput for a plan that cannot be carried out."""
        shown = ", ".join(f"{step:g}" for step in self.steps) or "none"
        is_ascending = all(low < high for low, high in pairwise(self.steps))
        if not self.steps or not is_ascending or not self.steps[0] > 0 or self.steps[-1] != 100:
            raise InvalidInput(f"The steps are {shown}. Expected ascending percentages above 0, the last one 100")
        if not (isfinite(self.dwell_s) and self.dwell_s >= 0):
            raise InvalidInput(f"The dwell is {self.dwell_s:g} s. Expected 0 s or more")
        if min(self.max_failures, self.max_holds) < 1:
            raise InvalidInput("max_failures and max_holds are counts. Expected 1 or more")
        self.gate.check()


class RolloutState(msgspec.Struct, frozen=True):
    """How far a rollout is. It is stored with each decision, so that any process can go on from it.

    step: index into the steps. since: unix seconds of the begin of the present dwell. failures: FAIL so far.
    holds: MARGINAL in the present step. from_epoch: the first epoch of the step, whose figures count.
    """

    step: int
    since: float
    failures: int = 0
    holds: int = 0
    from_epoch: int = 0


class RolloutDecision(NamedTuple):
    """state: after the decision. share: the candidate's from now on, 0 to 1."""

    action: Action
    state: RolloutState
    share: float
    gate: GateVerdict

    def as_data(self) -> dict[str, Any]:
        """Plain data, for the audit log and reports."""
        return {
            "action": str(self.action),
            "step": self.state.step + 1,
            "percent": self.share * 100,
            "failures": self.state.failures,
            "holds": self.state.holds,
            "verdict": str(self.gate.verdict),
            "reason": self.gate.reason,
            "evidence": dict(self.gate.evidence),
        }


class GradualRollout:
    """The decisions of one rollout. It holds no state: every call gets it. Raises InvalidInput for a bad plan."""

    def __init__(self, plan: RolloutPlan) -> None:
        plan.check()
        self.plan: Final = plan

    def begin(self, now: float) -> RolloutState:
        """The first step, from `now` on, in unix seconds."""
        return RolloutState(0, now)

    def share(self, state: RolloutState) -> float:
        """The candidate's share in this step, 0 to 1."""
        return self.plan.steps[state.step] / 100

    def dwell_left_s(self, state: RolloutState, now: float) -> float:
        """Seconds until the step may end. A clock that was set back makes it no longer than one dwell."""
        return max(0.0, self.plan.dwell_s - max(0.0, now - state.since))

    def decide(self, state: RolloutState, now: float, figures: StepFigures) -> RolloutDecision:
        """The decision at `now`, in unix seconds. figures: of the present step, see `figures_of_step`."""
        gate = self.plan.gate.judge(figures)
        if gate.verdict is Verdict.FAIL:
            return self._back(state, now, gate)
        if self.dwell_left_s(state, now) > 0 or gate.verdict is Verdict.INSUFFICIENT:
            return self._decision(Action.WAIT, state, gate)
        if gate.verdict is Verdict.PASS:
            return self._forward(state, now, gate)
        if state.holds + 1 >= self.plan.max_holds:
            return self._back(state, now, gate)
        return self._decision(Action.HOLD, msgspec.structs.replace(state, holds=state.holds + 1, since=now), gate)

    def advance(self, state: RolloutState, now: float, figures: StepFigures) -> RolloutDecision:
        """The next step, on an operator's order. Raises TransitionRefused before the dwell is over and without a PASS.

        See `decide`.
        """
        if (left_s := self.dwell_left_s(state, now)) > 0:
            raise TransitionRefused(
                f"The step of {self.plan.steps[state.step]:g} % lasts {self.plan.dwell_s:g} s at least. Expected "
                f"an advance in {left_s:.0f} s"
            )
        gate = self.plan.gate.judge(figures)
        if gate.verdict is not Verdict.PASS:
            raise TransitionRefused(
                f"The gate of the step of {self.plan.steps[state.step]:g} % says {gate.verdict}: {gate.reason}. "
                "Expected PASS"
            )
        return self._forward(state, now, gate)

    def roll_back(self, state: RolloutState, reason: str) -> RolloutDecision:
        """The end of the rollout, whatever its figures say: its candidate must not answer jobs any more."""
        return RolloutDecision(Action.ROLL_BACK, state, 0.0, GateVerdict(Verdict.FAIL, reason, {}))

    def _forward(self, state: RolloutState, now: float, gate: GateVerdict) -> RolloutDecision:
        if state.step + 1 == len(self.plan.steps):
            return self._decision(Action.COMPLETE, state, gate)
        return self._decision(Action.ADVANCE, RolloutState(state.step + 1, now, state.failures), gate)

    def _back(self, state: RolloutState, now: float, gate: GateVerdict) -> RolloutDecision:
        failures = state.failures + 1
        if state.step == 0 or failures >= self.plan.max_failures:
            final = msgspec.structs.replace(state, failures=failures)
            return RolloutDecision(Action.ROLL_BACK, final, 0.0, gate)
        return self._decision(Action.STEP_BACK, RolloutState(state.step - 1, now, failures), gate)

    def _decision(self, action: Action, state: RolloutState, gate: GateVerdict) -> RolloutDecision:
        return RolloutDecision(action, state, self.share(state), gate)


def steps_from(percent: float) -> tuple[float, ...]:
    """The usual steps, with this one as the first. Raises InvalidInput unless it is above 0 and at most 100."""
    if not 0 < percent <= 100:
        raise InvalidInput(f"The first step is {percent:g} %. Expected a percentage above 0, up to 100")
    return (float(percent), *(step for step in STEPS if step > percent))


def figures_of_step(
    observed: Mapping[int, Mapping[str, ArmFigures]],
    state: RolloutState,
    plan: RolloutPlan,
    stable: str,
    candidate: str,
) -> StepFigures:
    """The figures that judge the present step. observed: by epoch and version, see read_observations.

    In the last steps the stable version has few jobs or none: then those of all steps stand for it.
    """
    step = [arms for epoch, arms in observed.items() if epoch >= state.from_epoch]
    present = merged(arms[stable] for arms in step if stable in arms)
    if min(present.jobs, present.latency_s.count) < plan.gate.min_samples:
        present = merged(arms[stable] for arms in observed.values() if stable in arms)
    return StepFigures(present, merged(arms[candidate] for arms in step if candidate in arms))


def _evidence(figures: StepFigures) -> dict[str, float | int | None]:
    evidence: dict[str, float | int | None] = {}
    for name, arm in figures._asdict().items():
        evidence |= {
            f"{name}_jobs": arm.jobs,
            f"{name}_errors": arm.errors,
            f"{name}_cached": arm.cached,
            f"{name}_mean_s": arm.mean_s,
            f"{name}_p95_s": arm.quantile_s(1 - _TAIL),
        }
    return evidence
