"""A Celery application whose task judges outputs by an async validator; for test_prefork_validator.py.

Run as `celery -A tests.safety.prefork_validator worker -P prefork`, with the broker in VALIDATOR_BROKER.
"""

from __future__ import annotations

import asyncio
import os

import numpy as np
from billiard import current_process
from celery import Celery

from penstock.registry.tensors import Array
from penstock.safety.validator_registry import ValidatorRegistry, compare_outputs
from penstock.safety.validators import Comparison, Figure

__all__ = ["Slow", "app", "judge"]

_BROKER = os.environ.get("VALIDATOR_BROKER", "memory://")
app = Celery("validator", broker=_BROKER, backend=_BROKER)


class Slow:
    """Awaits before it answers."""

    async def compare(self, candidate: Array, expected: Array) -> Comparison:
        """See Validator."""
        await asyncio.sleep(0.01)
        return Comparison(len(expected), {"off": Figure.largest(float(np.abs(candidate - expected).max()), 0.5)})


@app.task(name="judge")  # type: ignore[untyped-decorator]
def judge(error: float) -> tuple[str, str, bool]:
    """(verdict, reason, whether this is a child of the pool)."""
    validators = ValidatorRegistry()
    validators.register(Slow(), workload="encoder")
    found = compare_outputs(validators.validator_for("encoder"), np.full((2, 2), error), np.zeros((2, 2)))
    return str(found.verdict), found.reason, str(current_process().name) != "MainProcess"
