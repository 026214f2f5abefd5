"""The cost of padding, and the lengths that are batched together. Pure arithmetic.

A batch of `rows` sequences is padded to its longest one: it computes rows * longest tokens. Where every shape has its
price, as with CUDA graphs, it is padded further: to the edge of a length bucket, and to a power of two of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.registry.errors import InvalidInput

__all__ = [
    "LengthBuckets",
    "BatchLoad",
    "Measured",
    "Room",
    "most_efficient_run",
    "padded_tokens",
    "padding_ratio",
    "row_bucket",
]

_SMALLEST_EDGE = 8


class Measured(Protocol):
    """A job or another item that takes up room in a batch."""

    @property
    def rows(self) -> int: ...
    @property
    def length(self) -> int:
        """Tokens of its longest row."""

    @property
    def nbytes(self) -> int: ...


class BatchLoad(NamedTuple):
    """The content of a batch so far; `tokens` are real ones: the sum over its jobs of rows * length."""

    rows: int
    longest: int
    nbytes: int
    tokens: int


class Room(NamedTuple):
    """The limits of one batch; `tokens` are padded ones."""

    rows: int
    tokens: int
    nbytes: int


def padded_tokens(rows: int, longest: int) -> int:
    """Tokens that a batch of `rows` rows computes when all are padded to `longest`."""
    return rows * longest


def padding_ratio(padded: int, tokens: int) -> float:
    """The share of `padded` tokens that is padding, 0.0 (none) up to 1.0; `tokens` are the real ones among them."""
    return 1.0 - tokens / padded if padded else 0.0


def row_bucket(rows: int, most: int) -> int:
    """The smallest power of two that holds `rows`, or `most` where that is less; more than `most` are kept."""
    return max(rows, min(1 << (rows - 1).bit_length(), most))


class LengthBuckets:
    """Edges 8, 16, 24, 32, 48, 64, 96, 128, ... or those that are declared, up to `longest`, itself the last edge.

    From 8 tokens on, padding to an edge of ours adds less than a sequence's own length, and from 16 on less than half
    of it: a runtime meets a dozen shapes instead of hundreds. declared: ascending; those beyond `longest` are left out.
    """

    def __init__(self, longest: int, declared: Sequence[int] = ()) -> None:
        self.edges = (*(edge for edge in declared if edge < longest), longest) if declared else _edges(longest)

    def bucket(self, length: int) -> int:
        """The smallest edge that holds `length` tokens. Raises InvalidInput beyond the last one."""
        at = bisect_left(self.edges, length)
        if at == len(self.edges):
            raise InvalidInput(f"Input of {length} tokens is too long. Expected at most {self.edges[-1]}")
        return self.edges[at]


def _edges(longest: int) -> tuple[int, ...]:
    edges = [_SMALLEST_EDGE]
    power = 2 * _SMALLEST_EDGE
    while power < longest:
        edges += [power, power + power // 2]
        power *= 2
    return (*(edge for edge in edges if edge < longest), longest)


def most_efficient_run(
    base: BatchLoad, shorter: Sequence[Measured], longer: Sequence[Measured], room: Room, overhead_tokens: int
) -> tuple[int, int]:
    """How many of `shorter` and of `longer` to batch with `base`, so that little of the work is padding.

    Both are sorted by how near their length is to `base.longest`, nearest first, so that any answer (i, j), which
    means shorter[:i] and longer[:j], is one contiguous run of lengths. Of the runs that fit into `room` it is the
    one with the highest real / (padded + overhead) tokens. `overhead_tokens` is the fixed cost of a forward, so a
    higher one leads to fuller batches. (0, 0) when nothing fits beside `base`.
    """
    # Axis 0 counts the shorter ones taken, axis 1 the longer ones. Floats: a division would convert integers.
    rows = np.add.outer(_totals(base.rows, _rows(shorter)), _totals(0, _rows(longer)))
    nbytes = np.add.outer(_totals(base.nbytes, _nbytes(shorter)), _totals(0, _nbytes(longer)))
    tokens = np.add.outer(_totals(base.tokens, _tokens(shorter)), _totals(0, _tokens(longer)))
    padded = rows * np.array([base.longest, *(item.length for item in longer)], dtype=np.float64)
    fits = (rows <= room.rows) & (padded <= room.tokens) & (nbytes <= room.nbytes)
    efficiency = fits * (tokens / (padded + overhead_tokens))
    i, j = divmod(int(efficiency.argmax()), len(longer) + 1)
    return i, j


def _rows(items: Sequence[Measured]) -> list[int]:
    return [item.rows for item in items]


def _nbytes(items: Sequence[Measured]) -> list[int]:
    return [item.nbytes for item in items]


def _tokens(items: Sequence[Measured]) -> list[int]:
    return [item.rows * item.length for item in items]


def _totals(start: int, values: list[int]) -> NDArray[np.float64]:
    """(n + 1,) float64: `start` and the first i values together at i."""
    return np.array([start, *values], dtype=np.float64).cumsum()
