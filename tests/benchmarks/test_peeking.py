"""The simulation of looking again and again, on a small scale with a fixed seed."""

from __future__ import annotations

import pytest

from tests.benchmarks.peeking import EFFECT, SEED, Experiments, looked_at

REPEATS = 1000


@pytest.fixture(scope="module")
def equal():
    return looked_at(Experiments(), REPEATS, SEED)


def test_the_sequence_may_be_looked_at_every_50_samples(equal):
    """It finds a difference between equal versions in at most 5 % of the experiments, at all looks together."""
    assert 0 < equal.sequence <= 0.05


def test_welch_holds_for_one_look(equal):
    """In 5 % of the experiments, within 3 sigma of 1,000 repeats; looked at every 50 samples in four times as many."""
    assert abs(equal.welch_once - 0.05) <= 0.02
    assert equal.welch_peeked > 0.2


def test_the_sequence_finds_a_difference():
    """Its price is some power, not all of it."""
    found = looked_at(Experiments(effect=EFFECT), REPEATS, SEED)
    assert 0.75 < found.sequence < found.welch_once
