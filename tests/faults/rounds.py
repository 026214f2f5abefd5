"""How often each fault is repeated: a few times in every test run, FAULT_ROUNDS times for the full count.

FAULT_ROUNDS=20 pytest tests/faults        python -m tests.faults    (the same, and a table)
"""

from __future__ import annotations

import math
import os

__all__ = ["is_full", "seeds"]


def is_full() -> bool:
    """Whether the full counts were asked for."""
    return "FAULT_ROUNDS" in os.environ


def seeds(reduced: int = 1, *, ways: int = 1) -> range:
    """The seeds of a test's rounds, from FAULT_SEED on: `reduced` of them, or FAULT_ROUNDS in full.

    ways: how many variants of the fault each seed is tried on; together they make up the rounds.
    """
    first = int(os.environ.get("FAULT_SEED", "1"))
    rounds = math.ceil(int(os.environ["FAULT_ROUNDS"]) / ways) if is_full() else reduced
    return range(first, first + rounds)
