"""The jobs of a soak run and the moments of its kills, from a seed. Pure.

A job is a number. Its input is made of the number, and its answer tells the number: nothing about a job is remembered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.registry.tensors import Array

__all__ = ["MOST_JOBS", "SHAPES", "Chunk", "Shape", "chunks", "expected", "inputs", "kill_points", "number_of"]

MOST_JOBS: Final = 2**22
"""Twice a number and an offset are exact in float32."""
_PRIORITIES: Final = {"critical": 0.05, "high": 0.25, "normal": 0.5, "low": 0.2}
_BASE: Final = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The jobs of one model: float32 (rows, width), and the answer 2 x + offset.

    rows: how many rows a job may have, and how often. jobs: in one chunk. share: of all chunks.
    """

    width: int
    rows: dict[int, float]
    jobs: int
    share: float
    offset: int
    forward_s: float = 0.0
    """The model sleeps for so long in each forward."""
    max_batch_size: int = 64


SHAPES: Final = {
    # 100 B to 1.6 kB; half of the time one row.
    "fast": Shape(25, {1: 0.6, 2: 0.2, 4: 0.1, 16: 0.1}, jobs=128, share=0.83, offset=1),
    # 1 to 8 kB.
    "slow": Shape(256, {1: 0.7, 2: 0.2, 8: 0.1}, jobs=64, share=0.14, offset=2, forward_s=0.004, max_batch_size=32),
    # 64 to 256 kB.
    "wide": Shape(16_384, {1: 0.7, 2: 0.2, 4: 0.1}, jobs=8, share=0.03, offset=3, max_batch_size=8),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Jobs that are submitted in one call: the numbers from `first` on, with so many rows each."""

    model: str
    priority: str
    first: int
    rows: Sequence[int]

    @property
    def numbers(self) -> range:
        """The numbers of its jobs."""
        return range(self.first, self.first + len(self.rows))


def chunks(seed: int, numbers: range) -> Iterator[Chunk]:
    """The jobs of one client, in the order of their submission."""
    chance = random.Random(f"{seed}/{numbers.start}")
    models, shares = [*SHAPES], [shape.share for shape in SHAPES.values()]
    first = numbers.start
    while first < numbers.stop:
        (model,) = chance.choices(models, shares)
        shape = SHAPES[model]
        count = min(shape.jobs, numbers.stop - first)
        rows = chance.choices([*shape.rows], [*shape.rows.values()], k=count)
        (priority,) = chance.choices([*_PRIORITIES], [*_PRIORITIES.values()])
        yield Chunk(model, priority, first, rows)
        first += count


def inputs(model: str, number: int, rows: int) -> Array:
    """The input of a job; no two jobs of a model have the same."""
    return _BASES[model][:rows] + np.float32(number)


def expected(model: str, x: Array) -> Array:
    """The answer to an input, exactly."""
    return 2 * x + np.float32(SHAPES[model].offset)


def number_of(model: str, y: Array) -> int:
    """The number of the job with this answer."""
    return round((float(y[0, 0]) - SHAPES[model].offset) / 2)


def kill_points(seed: int, jobs: int, count: int, what: str) -> list[int]:
    """How many jobs have ended when each kill is due: one at a random place of each of `count` equal parts of the run.

    The first and the last thirtieth of the run are left alone.
    """
    chance = random.Random(f"{seed}/{what}")
    start, part = jobs / 30, jobs * 28 / 30 / max(1, count)
    return [round(start + (number + chance.random()) * part) for number in range(count)]


_BASES: Final = {
    model: (np.arange(max(shape.rows) * shape.width) % _BASE).astype(np.float32).reshape(-1, shape.width)
    for model, shape in SHAPES.items()
}
