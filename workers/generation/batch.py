"""A step plan -> the flat tensors of one forward, in one copy to the device.

    decoding rows, in groups of like length | one group for each chunk of a prompt, or row with drafts
    all integers of the plan in one list -> one tensor -> device -> its parts

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import torch

from penstock.workers.generation.attention import RowGroup, View
from penstock.workers.generation.layer_rules import LayerRule
from penstock.workers.generation.page_tables import PageTable, page_table
from penstock.workers.generation.scheduler import Chunk
from penstock.workers.runtime.torch_device import TorchDevice

__all__ = ["MOST_GROUPS", "FlatBatch", "flat_batch"]

MOST_GROUPS: Final = 4
"""Of decoding rows. Each group gathers as many pages for all its rows as its longest has."""
_LEAST_ROWS: Final = 4
"""Rows of a group: below, the calls cost more than the padding."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One forward. `sampling` are the chunks whose logits are wanted, in order; of each the last `num_logits`."""

    input_ids: torch.Tensor
    """(1, T)"""
    position_ids: torch.Tensor
    """(1, T)"""
    slots: torch.Tensor
    """(T,): page * page_size + offset, where the keys and values of each token go."""
    logits_to_keep: torch.Tensor
    """(S,): the place of each token whose logits are wanted."""
    groups: tuple[RowGroup, ...]
    sampling: tuple[Chunk, ...]
    plan: torch.Tensor
    """All integers: the tensors of the batch are its parts."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of rows on the host."""

    start: int
    num_queries: int
    first_positions: list[int]
    tables: dict[LayerRule, PageTable]


def flat_batch(
    chunks: Sequence[Chunk],
    page_size: int,
    rules: Iterable[LayerRule],
    device: TorchDevice,
    most_groups: int = MOST_GROUPS,
) -> FlatBatch:
    """chunks: of one step, at least one. rules: all kinds of layers of the model."""
    rules = tuple(rules)
    groups: list[_Group] = []
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    keep: list[int] = []
    sampling: list[Chunk] = []
    for rows in _grouped(chunks, most_groups):
        start = len(ids)
        tables = []
        for chunk in rows:
            sequence, begin = chunk.sequence, chunk.start
            end = begin + chunk.num_tokens
            pages = sequence.pages[: -(-end // page_size)]
            tables.append(pages)
            if chunk.num_tokens == 1:
                # A token that a launched step chooses has no number on the host yet.
                ids.append(sequence.tokens[begin] if begin < len(sequence.tokens) else 0)
                positions.append(begin)
                slots.append(pages[-1] * page_size + begin % page_size)
            else:
                ids += chunk.tokens
                positions += range(begin, end)
                slots += [pages[at // page_size] * page_size + at % page_size for at in range(begin, end)]
            if (wanted := chunk.num_logits) > 0:
                keep += range(len(ids) - wanted, len(ids))
                sampling.append(chunk)
        firsts, queries = [chunk.start for chunk in rows], rows[0].num_tokens
        made = {rule: page_table(tables, firsts, queries, rule, page_size) for rule in rules}
        groups.append(_Group(start, queries, firsts, made))
    parts = [ids, positions, slots, keep]
    for group in groups:
        parts += [group.first_positions, *(part for table in group.tables.values() for part in table[:2])]
    # One copy to the device.
    plan = device.upload(device.host_tensor(np.array([*chain.from_iterable(parts)], np.int64)))
    placed = iter(plan.split_with_sizes([*map(len, parts)]))
    return FlatBatch(
        next(placed)[None],
        next(placed)[None],
        next(placed),
        next(placed),
        tuple(_on_device(group, placed) for group in groups),
        tuple(sampling),
        plan,
    )


def _on_device(group: _Group, placed: Iterator[torch.Tensor]) -> RowGroup:
    positions, rows = next(placed), len(group.first_positions)
    views = {}
    for rule, table in group.tables.items():
        numbers, starts = next(placed), next(placed)
        views[rule] = View(numbers, starts, table.length, table.is_masked)
    is_whole = rows == 1 and group.num_queries > 1 and group.first_positions[0] == 0
    return RowGroup(group.start, rows, group.num_queries, positions, is_whole, views)


def _grouped(chunks: Sequence[Chunk], most_groups: int) -> Iterator[list[Chunk]]:
    decoding = sorted((chunk for chunk in chunks if chunk.num_tokens == 1), key=lambda chunk: chunk.start)
    if decoding:
        size = max(_LEAST_ROWS, -(-len(decoding) // most_groups))
        yield from (decoding[at : at + size] for at in range(0, len(decoding), size))
    yield from ([chunk] for chunk in chunks if chunk.num_tokens > 1)
