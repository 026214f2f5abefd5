"""How often each fault is repeated: once in `make test`, twice more in `make test-all`, FAULT_ROUNDS times in full.

FAULT_ROUNDS=20 pytest tests/faults        python -m tests.faults    (the same, and a table)
"""

from __future__ import annotations

import math
import os
from typing import Any, Final

import pytest

__all__ = ["is_full", "seeds"]

_REPEATED: Final = 3


def is_full() -> bool:
    """Whether the full counts were asked for."""
    return "FAULT_ROUNDS" in os.environ


def seeds(*, ways: int = 1) -> list[Any]:
    """The seeds of a test's rounds, from FAULT_SEED on.

    ways: how many variants of the fault each seed is tried on; together they make up the rounds.
    """
    first = int(os.environ.get("FAULT_SEED", "1"))
    if is_full():
        return [*range(first, first + math.ceil(int(os.environ["FAULT_ROUNDS"]) / ways))]
    return [first, *(pytest.param(first + number, marks=pytest.mark.slow) for number in range(1, _REPEATED))]
