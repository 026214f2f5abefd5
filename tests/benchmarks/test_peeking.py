"""The simulation of looking again and again, with a fixed seed: each of its claims in the repeats that it needs."""

from __future__ import annotations

import pytest

from tests.benchmarks.peeking import ALPHA, EFFECT, SEED, Experiments, Looks, looked_at, welch_band
from tests.benchmarks.scale import FULL, QUICK

FEWER = 1000
"""Enough for a power, which is far from its bound."""


@pytest.fixture(scope="module")
def equal() -> Looks:
    """Equal versions, as often as the full benchmark repeats them."""
    return looked_at(Experiments(), FULL.experiments, SEED)


def test_the_sequence_may_be_looked_at_every_50_samples(equal: Looks):
    """It finds a difference between equal versions in at most 5 % of the experiments, at all looks together."""
    assert 0 < equal.sequence <= ALPHA, f"seed {SEED}"


def test_welch_holds_for_one_look(equal: Looks):
    """In 4 to 6 % of the experiments; looked at every 50 samples in four times as many."""
    assert 0.04 <= equal.welch_once <= 0.06, f"seed {SEED}"
    assert equal.welch_peeked > 0.2


def test_the_full_benchmark_judges_by_the_narrow_band():
    """4 to 6 % in 10,000 repeats; fewer repeats have a wider one, which is the one that is printed."""
    assert FULL.experiments == 10_000
    assert welch_band(FULL.experiments) == pytest.approx((0.04, 0.06))
    low, high = welch_band(QUICK.experiments)
    assert (low < 0.04, high > 0.06) == (True, True)


def test_the_sequence_finds_a_difference():
    """Its price is some power, not all of it."""
    found = looked_at(Experiments(effect=EFFECT), FEWER, SEED)
    assert 0.75 < found.sequence < found.welch_once
