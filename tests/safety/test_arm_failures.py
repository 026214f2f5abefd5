"""The rule that stops an arm whose jobs fail, on a clock of its own. AR-064."""

from __future__ import annotations

import random

import pytest

from penstock.registry.errors import InvalidInput
from penstock.safety.arm_failures import ArmFailureLimits, ArmFailures


def told(arm: tuple[int, int], production: tuple[int, int]) -> str:
    """What the rule says of an arm 2 beside version 1 in production; each as (jobs, failed) at one moment."""
    failures = ArmFailures()
    failures.ended("2", *arm, 100.0)
    failures.ended("1", *production, 100.0)
    return failures.why_stopped("2", "1", 100.0)


@pytest.mark.parametrize(
    ("arm", "production", "is_stopped"),
    [
        ((5, 5), (0, 0), True),
        ((5, 5), (50, 0), True),
        ((10, 5), (50, 0), True),
        # Too few to know, and too small a share: the gate of a rollout compares these.
        ((4, 4), (50, 0), False),
        ((11, 5), (50, 0), False),
        # The inputs are to blame, or a service that both need.
        ((10, 10), (90, 90), False),
        ((10, 6), (90, 30), False),
        ((10, 6), (90, 27), True),
    ],
)
def test_half_of_the_jobs_and_twice_the_share_of_production(arm, production, is_stopped: bool):
    """The reason has the figures of both."""
    reason = told(arm, production)
    assert bool(reason) is is_stopped
    if is_stopped:
        assert reason.startswith(f"{arm[1]} of {arm[0]} jobs failed within 60 s; of version 1, {production[1]}")


def test_failures_are_forgotten_after_a_minute():
    """Four an hour ago and one now are one. Those of the last seconds count, whatever part of the window it is."""
    failures = ArmFailures()
    failures.ended("2", 4, 4, 0.0)
    failures.ended("2", 1, 1, 54.9)
    assert failures.why_stopped("2", "1", 54.9)
    assert not failures.why_stopped("2", "1", 60.0)
    failures.ended("2", 4, 4, 65.0)
    assert failures.why_stopped("2", "1", 65.0)
    failures.forget("2")
    assert not failures.why_stopped("2", "1", 65.0)


def test_the_window_agrees_with_a_plain_count():
    """A thousand random series; the window of 12 s has parts of one second, and the oldest leaves it as a whole."""
    draw = random.Random(7)
    limits = ArmFailureLimits(failures=3, share=0.4, window_s=12.0)
    stops = 0
    for _ in range(1000):
        failures, ended, now = ArmFailures(limits), list[tuple[float, bool]](), 0.0
        for _ in range(20):
            now += draw.expovariate(1.0)
            ended.append((now, draw.random() < 0.4))
            failures.ended("2", 1, int(ended[-1][1]), now)
            recent = [failed for at, failed in ended if int(at) > int(now) - 12]
            expected = sum(recent) >= 3 and sum(recent) >= 0.4 * len(recent)
            assert bool(failures.why_stopped("2", "1", now)) is expected
            stops += expected
    assert 1000 < stops < 19_000


@pytest.mark.parametrize("limits", [{"failures": 0}, {"share": 0.0}, {"share": 1.1}, {"window_s": 0.0}])
def test_limits_that_stop_nothing_or_everything_are_refused(limits):
    with pytest.raises(InvalidInput, match="Expected"):
        ArmFailureLimits(**limits)
