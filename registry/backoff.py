"""How long to wait before the next try. Pure: randomness is an argument."""

from __future__ import annotations

from typing import Final

__all__ = ["backoff_delay_s"]

_MAX_DOUBLINGS: Final = 32
"""Bounds the exponent: a program may fail for months."""


def backoff_delay_s(failures: int, first_s: float, longest_s: float, jitter: float) -> float:
    """Seconds to wait after the given number of failures in a row; `jitter` is in [0, 1).

    The wait doubles from `first_s` up to `longest_s`. The result is between half and all of it, so that what failed
    together does not return together.

    >>> [backoff_delay_s(failures, first_s=1, longest_s=5, jitter=0) for failures in (1, 2, 3, 4, 5000)]
    [0.5, 1.0, 2.0, 2.5, 2.5]
    """
    wait_s = min(longest_s, first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))
    return wait_s * (0.5 + jitter / 2)
