"""The rollout as a pure decision: steps, gates, dwell, step-back. AR-007, AR-092, AR-093, AR-094.

A simulated rollout of hours takes milliseconds: time and figures are arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.registry.errors import InvalidInput, TransitionRefused
from penstock.safety.arm_figures import ArmFigures
from penstock.safety.rollout import (
    STEPS,
    Action,
    GradualRollout,
    HealthGate,
    RolloutPlan,
    RolloutState,
    StepFigures,
    figures_of_step,
    steps_from,
)
from penstock.safety.validators import Verdict

NOW = 1_800_000_000.0
PLAN = RolloutPlan(dwell_s=60)


def arm(jobs: int, *, errors: int = 0, mean_s: float = 0.01, seed: int = 0) -> ArmFigures:
    """So many jobs with latencies of a log-normal distribution with this mean."""
    chance = random.Random(seed)
    figures = ArmFigures(jobs=jobs, errors=errors)
    figures.add_latencies([mean_s * chance.lognormvariate(-0.125, 0.5) for _ in range(jobs - errors)])
    return figures


@cache
def healthy(jobs: int = 200) -> StepFigures:
    return StepFigures(arm(jobs, seed=1), arm(jobs, seed=2))


@cache
def sick(jobs: int = 200) -> StepFigures:
    return StepFigures(arm(200, seed=1), arm(jobs, errors=jobs // 2, seed=2))


@cache
def doubtful() -> StepFigures:
    """The candidate is slower than allowed, by less than the few jobs can prove."""
    return StepFigures(arm(100, seed=1), arm(100, mean_s=0.0135, seed=2))


def drive(rollout: GradualRollout, figures: Callable[[RolloutState], StepFigures], looks: int = 200) -> list[Action]:
    """The decisions other than WAIT, looked at every ten seconds until the rollout is over."""
    actions: list[Action] = []
    state, now = rollout.begin(NOW), NOW
    for _ in range(looks):
        now += 10
        decision = rollout.decide(state, now, figures(state))
        state = decision.state
        if decision.action is not Action.WAIT:
            actions.append(decision.action)
        if decision.action in (Action.COMPLETE, Action.ROLL_BACK):
            return actions
    return actions


def test_healthy_candidate_takes_every_step():
    """AR-092: 1, 5, 10, 25, 50, 100 percent, then complete; a dwell of 60 s at least lies between two decisions."""
    rollout = GradualRollout(PLAN)
    state, now, shares, times = rollout.begin(NOW), NOW, [], [NOW]
    while True:
        now += 1
        decision = rollout.decide(state, now, healthy())
        if decision.action is not Action.WAIT:
            shares.append(rollout.share(state) * 100)
            times.append(now)
            state = decision.state
        if decision.action is Action.COMPLETE:
            break
    assert shares == [1, 5, 10, 25, 50, 100]
    assert [after - before for before, after in pairwise(times)] == [60] * len(STEPS)


def test_early_advance_is_refused():
    """AR-094: before the dwell is over nothing advances, neither by itself nor on an order."""
    rollout = GradualRollout(PLAN)
    state = rollout.begin(NOW)
    assert rollout.decide(state, NOW + 59, healthy()).action is Action.WAIT
    with pytest.raises(TransitionRefused, match=r"1 % lasts 60 s at least\. Expected an advance in 1 s"):
        rollout.advance(state, NOW + 59, healthy())
    assert rollout.advance(state, NOW + 60, healthy()).action is Action.ADVANCE
    with pytest.raises(TransitionRefused, match=r"FAIL: errors 50\.00% against 0\.00%"):
        rollout.advance(state, NOW + 60, sick())


def test_sick_candidate_is_rolled_back_in_its_first_step():
    """AR-093: a surely exceeded limit needs no end of the dwell."""
    rollout = GradualRollout(PLAN)
    decision = rollout.decide(rollout.begin(NOW), NOW + 1, sick(40))
    assert (decision.action, decision.share, decision.gate.verdict) == (Action.ROLL_BACK, 0.0, Verdict.FAIL)


def test_candidate_that_is_sick_at_a_large_share_goes_back_a_step_and_is_rolled_back_at_last():
    """Three failures end the rollout; each of the first two costs one step."""
    rollout = GradualRollout(PLAN)
    actions = drive(rollout, lambda state: sick() if rollout.share(state) >= 0.25 else healthy())
    back = [Action.STEP_BACK, Action.ADVANCE]
    assert actions == [Action.ADVANCE] * 3 + back + back + [Action.ROLL_BACK]


def test_doubt_holds_the_step_and_ends_in_a_failure():
    """A limit that is exceeded by chance, perhaps: a PASS is asked once per dwell, and the third doubt goes back."""
    rollout = GradualRollout(PLAN)
    judged = rollout.plan.gate.judge(doubtful())
    assert judged.verdict is Verdict.MARGINAL
    assert "mean" in judged.reason
    state = RolloutState(2, NOW)
    held = rollout.decide(state, NOW + 60, doubtful())
    assert (held.action, held.state) == (Action.HOLD, RolloutState(2, NOW + 60, holds=1))
    assert rollout.decide(held.state, NOW + 90, doubtful()).action is Action.WAIT
    assert rollout.decide(held.state, NOW + 120, healthy()).action is Action.ADVANCE
    last = rollout.decide(msgspec.structs.replace(held.state, holds=2), NOW + 120, doubtful())
    assert (last.action, last.state.step, last.state.failures) == (Action.STEP_BACK, 1, 1)


@pytest.mark.parametrize("candidate", [arm(99), ArmFigures(jobs=500, cached=500), ArmFigures()])
def test_too_few_jobs_wait(candidate: ArmFigures):
    """However long the dwell lasts; cached answers are no evidence of a forward."""
    rollout = GradualRollout(PLAN)
    decision = rollout.decide(rollout.begin(NOW), NOW + 1e6, StepFigures(arm(1000), candidate))
    assert (decision.action, decision.gate.verdict) == (Action.WAIT, Verdict.INSUFFICIENT)


@pytest.mark.parametrize(
    ("candidate", "word"),
    [
        (arm(2000, errors=120, seed=2), "errors"),
        (arm(2000, mean_s=0.014, seed=2), "mean"),
        (arm(2000, mean_s=0.008, seed=2), "p95"),
    ],
)
def test_each_limit_fails_a_candidate(candidate: ArmFigures, word: str):
    """Errors, mean latency and the 95th percentile decide by themselves, and the reason names the limit."""
    if word == "p95":
        # One job of eleven takes five times as long; the mean stays within its limit.
        candidate.jobs += 200
        candidate.add_latencies([0.04] * 200)
    verdict = HealthGate().judge(StepFigures(arm(2000, seed=1), candidate))
    assert verdict.verdict is Verdict.FAIL
    assert verdict.reason.startswith(word)
    assert ";" not in verdict.reason


def test_equal_versions_rarely_fail_however_often_one_looks():
    """200 steps of two equal versions, looked at after every 100 jobs: at most 5 % FAIL, as alpha says."""
    gate, failed, chance = (
        HealthGate(max_mean_ratio=1, max_p95_ratio=1, max_error_increase=0),
        0,
        np.random.default_rng(15),
    )
    for _ in range(200):
        figures = StepFigures(ArmFigures(), ArmFigures())
        for _ in range(10):
            for each in figures:
                errors = int(chance.binomial(100, 0.02))
                each.jobs += 100
                each.errors += errors
                each.add_latencies((0.01 * chance.lognormal(0, 0.5, 100 - errors)).tolist())
            if gate.judge(figures).verdict is Verdict.FAIL:
                failed += 1
                break
    assert failed <= 10


def test_clock_that_was_set_back_makes_no_longer_dwell_than_one():
    """The state is in wall-clock time, because another process may read it."""
    rollout = GradualRollout(PLAN)
    assert rollout.dwell_left_s(rollout.begin(NOW), NOW - 3600) == 60


@given(st.lists(st.sampled_from(["healthy", "sick", "doubtful", "few"]), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_run_of_verdicts_keeps_the_rules(run: list[str]):
    """Shares move by one step only, the failures never decrease, and a state survives its storage."""
    rollout = GradualRollout(PLAN)
    figures = {"healthy": healthy(200), "sick": sick(200), "doubtful": doubtful(), "few": healthy(5)}
    state, now = rollout.begin(NOW), NOW
    for kind in run:
        now += 60
        decision = rollout.decide(state, now, figures[kind])
        after = msgspec.convert(msgspec.json.decode(msgspec.json.encode(decision.state)), RolloutState)
        assert after == decision.state
        assert abs(after.step - state.step) <= 1
        assert after.failures >= state.failures
        if decision.action in (Action.COMPLETE, Action.ROLL_BACK):
            assert (decision.share == 0.0) is (decision.action is Action.ROLL_BACK)
            return
        assert decision.share == rollout.share(after)
        state = after


def test_step_has_figures_of_its_own_epochs():
    """Errors of an earlier step do not count, and the stable version of all steps stands in where it has no jobs."""
    observed = {
        3: {"1": arm(500), "2": arm(20, errors=20)},
        5: {"1": arm(400), "2": arm(300)},
        6: {"2": arm(50)},
    }
    state = RolloutState(1, NOW, from_epoch=5)
    figures = figures_of_step(observed, state, PLAN, stable="1", candidate="2")
    assert (figures.stable.jobs, figures.candidate.jobs, figures.candidate.errors) == (400, 350, 0)
    last = figures_of_step(observed, RolloutState(5, NOW, from_epoch=6), PLAN, stable="1", candidate="2")
    assert (last.stable.jobs, last.candidate.jobs) == (900, 50)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (RolloutPlan(()), "The steps are none"),
        (RolloutPlan((5, 1, 100)), "The steps are 5, 1, 100. Expected ascending"),
        (RolloutPlan((0, 100)), "above 0"),
        (RolloutPlan((1, 50)), "the last one 100"),
        (RolloutPlan((50, 100, 200)), "the last one 100"),
        (RolloutPlan(dwell_s=-1), "The dwell is -1 s. Expected 0 s or more"),
        (RolloutPlan(dwell_s=float("nan")), "The dwell is nan"),
        (RolloutPlan(max_failures=0), "Expected 1 or more"),
        (RolloutPlan(gate=HealthGate(min_samples=1)), "min_samples is 1. Expected at least 2"),
        (RolloutPlan(gate=HealthGate(max_error_increase=1.5)), "Expected a share from 0 to 1"),
        (RolloutPlan(gate=HealthGate(max_mean_ratio=0)), "max_mean_ratio is 0"),
        (RolloutPlan(gate=HealthGate(max_p95_ratio=float("inf"))), "max_p95_ratio is inf"),
        (RolloutPlan(gate=HealthGate(alpha=0)), "alpha is 0"),
    ],
)
def test_plan_that_cannot_be_carried_out_is_refused(plan: RolloutPlan, expected: str):
    """The message says what was found and what is expected."""
    with pytest.raises(InvalidInput, match=expected):
        GradualRollout(plan)


def test_steps_from_a_share():
    """The usual steps above it follow; a share that is none is refused."""
    assert steps_from(20) == (20, 25, 50, 100)
    assert steps_from(100) == (100,)
    for bad in (0, -1, 101, float("nan")):
        with pytest.raises(InvalidInput, match="Expected a percentage above 0"):
            steps_from(bad)
