"""Many schedules one after the other, as fast as one core can, or as all cores of the machine can."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from typing import Final

from tests.simulation.checker import SOUND, Mutation, Outcome, simulate

__all__ = ["command_for", "outcomes", "outcomes_on"]

_COLLECT_EVERY: Final = 200
"""Next to nothing of a schedule is left to collect: see Simulation.close."""
_CHUNK: Final = 50


def outcomes(seeds: Iterable[int], mutation: Mutation = SOUND) -> Iterator[Outcome]:
    """What came of each seed's schedule."""
    with _undisturbed():
        yield from _collected(seeds, mutation)


def _collected(seeds: Iterable[int], mutation: Mutation) -> Iterator[Outcome]:
    """The same in a process that collects no garbage by itself."""
    for count, seed in enumerate(seeds, 1):
        yield simulate(seed, mutation)
        if count % _COLLECT_EVERY == 0:
            gc.collect()


def outcomes_on(processes: int, seeds: Iterable[int]) -> Iterator[Outcome]:
    """The same of unbroken schedules from several processes, in the same order and without the traces."""
    rest = iter(seeds)
    running: deque[Future[list[Outcome]]] = deque()
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_disturb_no_more)
    try:
        while True:
            while len(running) < 2 * processes and (chunk := list(islice(rest, _CHUNK))):
                running.append(pool.submit(_untraced, chunk))
            if not running:
                return
            yield from running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _untraced(seeds: list[int]) -> list[Outcome]:
    return [replace(outcome, trace=()) for outcome in _collected(seeds, SOUND)]


def _disturb_no_more() -> None:
    """Once in a process of its own, see `_undisturbed`: for each chunk it would take as long as several schedules."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()


def command_for(seed: int) -> str:
    """What repeats a schedule and shows it."""
    return f"python -m tests.simulation --from {seed} --seeds 1 --trace"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No log lines, and no garbage collection of what was there before: a third of the time otherwise."""
    was_disabled = logging.root.manager.disable
    _disturb_no_more()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        logging.disable(was_disabled)
