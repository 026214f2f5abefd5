"""A step plan -> the flat tensors of one forward.

    decoding rows, in groups of like length | one group for each chunk of a prompt, or row with drafts

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from penstock.workers.generation.attention import RowGroup
from penstock.workers.generation.scheduler import Chunk

__all__ = ["FlatBatch", "flat_batch"]

_MOST_GROUPS: Final = 4
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


def flat_batch(chunks: Sequence[Chunk], page_size: int) -> FlatBatch:
    """chunks: of one step, at least one."""
    groups: list[RowGroup] = []
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    keep: list[int] = []
    sampling: list[Chunk] = []
    for rows in _grouped(chunks):
        start = len(ids)
        tables = []
        for chunk in rows:
            sequence, begin = chunk.sequence, chunk.start
            end = begin + chunk.num_tokens
            pages = sequence.pages[: -(-end // page_size)]
            tables.append(pages)
            if chunk.num_tokens == 1:
                ids.append(sequence.tokens[begin])
                positions.append(begin)
                slots.append(pages[-1] * page_size + begin % page_size)
            else:
                ids += chunk.tokens
                positions += range(begin, end)
                slots += [pages[at // page_size] * page_size + at % page_size for at in range(begin, end)]
            if (wanted := chunk.num_logits) > 0:
                keep += range(len(ids) - wanted, len(ids))
                sampling.append(chunk)
        groups.append(RowGroup(start, rows[0].num_tokens, [chunk.start for chunk in rows], tables))
    return FlatBatch(
        torch.tensor([ids]),
        torch.tensor([positions]),
        torch.tensor(slots),
        # An empty tensor would be of floats, and transformers indexes with it.
        torch.tensor(keep, dtype=torch.long),
        tuple(groups),
        tuple(sampling),
    )


def _grouped(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    decoding = sorted((chunk for chunk in chunks if chunk.num_tokens == 1), key=lambda chunk: chunk.start)
    if decoding:
        size = max(_LEAST_ROWS, -(-len(decoding) // _MOST_GROUPS))
        yield from (decoding[at : at + size] for at in range(0, len(decoding), size))
    yield from ([chunk] for chunk in chunks if chunk.num_tokens > 1)
