"""Many schedules one after the other, as fast as one core can."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.simulation.checker import SOUND, Mutation, Outcome, simulate

__all__ = ["command_for", "outcomes"]

_COLLECT_EVERY = 50


def outcomes(seeds: Iterable[int], mutation: Mutation = SOUND) -> Iterator[Outcome]:
    """What came of each seed's schedule."""
    with _undisturbed():
        for count, seed in enumerate(seeds, 1):
            yield simulate(seed, mutation)
            if count % _COLLECT_EVERY == 0:
                gc.collect()


def command_for(seed: int) -> str:
    """What repeats a schedule and shows it."""
    return f"python -m tests.simulation --from {seed} --seeds 1 --trace"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No log lines, and no garbage collection of what was there before: a third of the time otherwise."""
    was_disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        logging.disable(was_disabled)
