"""How long retries and restarts wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.backoff import backoff_delay_s


def test_the_delay_doubles_up_to_the_longest():
    """Failures in a row lead to ever longer delays, up to a bound, for any number of failures."""
    delays = [backoff_delay_s(failures, 1.0, 30.0, jitter=1) for failures in (1, 2, 3, 5, 6, 10_000)]
    assert delays == [1, 2, 4, 16, 30, 30]


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_jitter_takes_at_most_half(failures: int, jitter: float):
    """Every delay is between half and all of the delay without jitter."""
    whole = backoff_delay_s(failures, 0.5, 30.0, jitter=1)
    assert whole / 2 <= backoff_delay_s(failures, 0.5, 30.0, jitter) <= whole
