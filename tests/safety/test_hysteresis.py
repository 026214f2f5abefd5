"""Off quickly, on again slowly. AR-066, AR-074, AR-075, AR-076."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.errors import InvalidInput
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.hysteresis import Hysteresis, HysteresisLimits, HysteresisState, StateChange
from penstock.safety.validators import Verdict

DAY_S = 86_400
LIMITS = HysteresisLimits()


def on_at(now_s: float = 0.0, limits: HysteresisLimits = LIMITS) -> Hysteresis:
    """One that has just gone on for the first time."""
    switch = Hysteresis(limits)
    changes = [switch.observe(Verdict.PASS, now_s) for _ in range(limits.passes)]
    assert [change is not None for change in changes] == [False] * (limits.passes - 1) + [True]
    return switch


def tripped(now_s: float = 100.0) -> Hysteresis:
    """One that a breaker has just switched off."""
    switch = on_at(0.0)
    assert switch.trip("the breaker opened", now_s) == StateChange(False, now_s, "the breaker opened")
    return switch


def test_a_breaker_disables_at_once():
    """Also within the minimum time on (AR-074)."""
    switch = on_at(10.0)
    assert switch.trip("drift of min_cosine", 10.0) == StateChange(False, 10.0, "drift of min_cosine")
    assert not switch.is_on


def test_limits_of_the_settings():
    """By default those of the class."""
    assert HysteresisLimits.of(SafetyConfig()) == HysteresisLimits()
    config = SafetyConfig(min_off_s=10, max_off_s=20, min_on_s=5, min_passes=2)
    assert HysteresisLimits.of(config) == HysteresisLimits(10, 20, 5, 2)


def test_the_time_off_is_known_before_it_goes_off():
    """What `off_s_at` says is what a trip at that time does: it doubles soon after a return, up to the longest."""
    switch, now_s, told = on_at(0.0), 0.0, []
    for _ in range(6):
        told.append(switch.off_s_at(now_s))
        switch.trip("again", now_s)
        assert switch.off_s_at(now_s) == switch.least_off_s == told[-1]
        now_s += switch.least_off_s
        assert [switch.observe(Verdict.PASS, now_s) is not None for _ in range(3)] == [False, False, True]
        now_s += 1
    assert told == [300, 600, 1200, 2400, 3600, 3600]
    assert switch.off_s_at(now_s + 3600) == 300


def test_a_soft_disable_waits_for_the_minimum_time_on():
    """60 s after it went on, by any call that tells the time; a breaker does not wait for it (AR-076)."""
    switch = on_at(10.0)
    assert switch.disable("drift of recall", 11.0) is None
    assert switch.disable("another reason", 12.0) is None
    assert switch.observe(Verdict.PASS, 69.9) is None
    assert switch.advance(70.0) == StateChange(False, 70.0, "drift of recall")
    switch = on_at(10.0)
    switch.disable("drift of recall", 11.0)
    assert switch.trip("the breaker opened", 12.0) == StateChange(False, 12.0, "the breaker opened")
    assert switch.advance(70.0) is None
    switch = on_at(10.0)
    assert switch.disable("drift of recall", 80.0) == StateChange(False, 80.0, "drift of recall")


def test_a_fail_is_a_soft_disable():
    """It waits as others do. MARGINAL and INSUFFICIENT leave it on."""
    switch = on_at(0.0)
    assert switch.observe(Verdict.MARGINAL, 100.0) is None
    assert switch.observe(Verdict.INSUFFICIENT, 100.0) is None
    assert switch.is_on
    assert switch.observe(Verdict.FAIL, 101.0) == StateChange(False, 101.0, "the verdict is FAIL")
    switch = on_at(0.0)
    assert switch.observe(Verdict.FAIL, 1.0, reason="min_cosine 0.9") is None
    assert switch.advance(60.0) == StateChange(False, 60.0, "min_cosine 0.9")


def test_it_comes_back_after_the_minimum_time_off_and_passes_in_a_row():
    """Both are needed, in either order (AR-075)."""
    switch = tripped(100.0)
    assert [switch.observe(Verdict.PASS, 100.0 + second) for second in range(10)] == [None] * 10
    assert switch.advance(399.9) is None
    assert switch.advance(400.0) == StateChange(True, 400.0, "10 PASS in a row, 300 s off")
    switch = tripped(100.0)
    assert [switch.observe(Verdict.PASS, 1000.0) for _ in range(2)] == [None, None]
    assert switch.observe(Verdict.PASS, 1001.0) == StateChange(True, 1001.0, "3 PASS in a row, 901 s off")


@pytest.mark.parametrize("verdict", [Verdict.MARGINAL, Verdict.FAIL])
def test_marginal_and_fail_reset_the_passes(verdict):
    """N consecutive PASS, not N in total. INSUFFICIENT is no verdict: the passes before it still count."""
    switch = tripped(100.0)
    for each in (Verdict.PASS, Verdict.PASS, verdict, Verdict.PASS, Verdict.INSUFFICIENT, Verdict.PASS):
        assert switch.observe(each, 1000.0) is None
    assert switch.observe(Verdict.PASS, 1000.0) is not None


def test_a_failure_while_off_begins_the_time_off_anew():
    """A probe failed: nothing that was gathered before it counts."""
    switch = tripped(100.0)
    for _ in range(3):
        switch.observe(Verdict.PASS, 200.0)
    assert switch.trip("the probe failed", 390.0) is None
    for _ in range(3):
        assert switch.observe(Verdict.PASS, 689.9) is None
    assert switch.advance(690.0) is not None


def test_the_time_off_doubles_for_one_that_fails_again_soon():
    """300, 600, 1200, 2400, 3600, 3600 s; a time on as long as the last time off makes it 300 s again."""
    switch, now_s, offs = tripped(0.0), 0.0, []
    for _ in range(6):
        offs.append(switch.least_off_s)
        now_s += switch.least_off_s
        for _ in range(3):
            switch.observe(Verdict.PASS, now_s)
        assert switch.is_on
        now_s += 1.0
        switch.trip("again", now_s)
    assert offs == [300.0, 600.0, 1200.0, 2400.0, 3600.0, 3600.0]
    now_s += 3600.0
    for _ in range(3):
        switch.observe(Verdict.PASS, now_s)
    assert switch.trip("much later", now_s + 3600.0) is not None
    assert switch.least_off_s == 300.0


def _flap(step: Callable[[Hysteresis, int], StateChange | None]) -> list[StateChange]:
    """The changes of a simulated day, with one observation a second."""
    switch = Hysteresis()
    return [change for second in range(DAY_S) if (change := step(switch, second)) is not None]


def _worst(switch: Hysteresis, second: int) -> StateChange | None:
    # Perfect while off and broken while on: the input that changes the state as often as possible.
    return switch.trip("flapping", second) if switch.is_on else switch.observe(Verdict.PASS, second)


def _soft(switch: Hysteresis, second: int) -> StateChange | None:
    return switch.observe(Verdict.FAIL if switch.is_on else Verdict.PASS, second)


def _alternating(switch: Hysteresis, second: int) -> StateChange | None:
    return switch.trip("flapping", second) if second % 20 == 19 else switch.observe(Verdict.PASS, second)


_draws = random.Random(15)
DRAWS = [_draws.random() for _ in range(DAY_S)]


def _random(switch: Hysteresis, second: int) -> StateChange | None:
    draw = DRAWS[second]
    return (
        switch.trip("x", second)
        if draw < 0.002
        else switch.observe(Verdict.FAIL if draw < 0.1 else Verdict.PASS, second)
    )


@pytest.mark.parametrize("step", [_worst, _soft, _alternating, _random])
def test_flapping_input_changes_the_state_rarely(step):
    """A simulated day: at most one change per minimum time off, and never two returns within it."""
    changes = _flap(step)
    assert len(changes) <= DAY_S / LIMITS.min_off_s
    returns = [change.at_s for change in changes if change.is_on]
    assert all(later - earlier >= LIMITS.min_off_s for earlier, later in pairwise(returns))
    assert changes, "the input did flap"


Call = tuple[str, float]


@given(
    st.lists(
        st.tuples(st.sampled_from(["PASS", "MARGINAL", "FAIL", "trip", "disable", "advance"]), st.floats(-50, 400)),
        max_size=60,
    )
)
def test_no_history_breaks_the_limits(calls: list[Call]):
    """Whatever the clock does: times off and passes are kept, and only trips end a time on early."""
    switch, now_s, latest_s, passes = Hysteresis(), 0.0, 0.0, 0
    off_at = on_at_s = None
    for kind, step_s in calls:
        now_s += step_s
        latest_s = max(latest_s, now_s)
        passes = passes + 1 if kind == "PASS" else 0 if kind in ("MARGINAL", "FAIL", "trip") else passes
        if kind == "trip":
            change = switch.trip("x", now_s)
        elif kind == "disable":
            change = switch.disable("x", now_s)
        else:
            change = switch.advance(now_s) if kind == "advance" else switch.observe(Verdict(kind), now_s)
        if change is None:
            continue
        assert change.at_s == latest_s
        if change.is_on:
            assert passes >= LIMITS.passes
            assert off_at is None or change.at_s - off_at >= LIMITS.min_off_s
            on_at_s = change.at_s
        else:
            assert on_at_s is not None
            assert kind == "trip" or change.at_s - on_at_s >= LIMITS.min_on_s
            off_at = change.at_s
            passes = 0


def test_a_stored_state_goes_on():
    """A worker that restarts in the time off waits for the rest of it only."""
    switch = tripped(100.0)
    switch.observe(Verdict.PASS, 150.0)
    again = Hysteresis(LIMITS, switch.state)
    assert again.state == HysteresisState(False, 100.0, 300.0, 1)
    for _ in range(2):
        assert again.observe(Verdict.PASS, 200.0) is None
    assert again.advance(400.0) is not None


@pytest.mark.parametrize(
    "limits",
    [{"min_off_s": 0}, {"min_off_s": 10, "max_off_s": 5}, {"max_off_s": inf}, {"min_on_s": -1}, {"passes": 0}],
)
def test_unusable_limits_are_refused(limits):
    """The message says what is expected."""
    with pytest.raises(InvalidInput, match="Expected"):
        HysteresisLimits(**limits)


def test_unknown_verdicts_and_times_are_refused():
    """Nothing changes."""
    switch = on_at(0.0)
    with pytest.raises(InvalidInput, match="Expected one of: PASS, MARGINAL, FAIL, INSUFFICIENT"):
        switch.observe("pass", 1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="finite"):
        switch.trip("x", nan)
    assert switch.is_on
