"""Counts aloud: the smallest entry point that streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import numpy as np

Arrays = Mapping[str, np.ndarray[Any, Any]]
Counting = Generator[Arrays, None, Arrays]


class Context(Protocol):
    """What this entry point uses of the job it runs for."""

    @property
    def is_cancelled(self) -> bool: ...

    def progress(self, fraction: float) -> None: ...


def build() -> Callable[[Arrays, Context], Counting]:
    """The entry point: (inputs, context) -> chunks, then the result."""
    return count_aloud


def count_aloud(inputs: Arrays, ctx: Context) -> Counting:
    """Yields `value` 1, 2, ... `count`, each after `delay_ms`, and returns how many it reached as `total`."""
    count = int(inputs["count"][0])
    delay_s = float(inputs["delay_ms"][0]) / 1000 if "delay_ms" in inputs else 0.0
    reached = 0
    while reached < count and not ctx.is_cancelled:
        time.sleep(delay_s)
        reached += 1
        yield {"value": np.array([reached])}
        ctx.progress(reached / count)
    return {"total": np.array([reached])}
