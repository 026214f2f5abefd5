"""CUDA graphs of steps in which every row decodes one token: one launch for all kernels of the model.

    rows -> bucket -> padding rows, tables of one width -> a plan of one size -> into the plan of the captured batch
                                                                              -> replay -> logits of the real rows

A graph reads the addresses that it was captured with. All tensors of a batch are parts of its plan, so one copy into
the plan of the captured batch moves a graph on to another step. Padding rows write to page 0, which no request has.

Not run on a GPU yet. Tests on the CPU show that padding rows change nothing, that plans of a bucket have one size, and
that the captured batch computes another step after the copy.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.batch import FlatBatch
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.scheduler import Chunk
from penstock.workers.generation.scheduler import Sequence as Scheduled

__all__ = ["DecodeGraphs", "bucket_of", "is_decoding", "padded"]

_EVERY: Final = 8
_WARM_UPS: Final = 2
"""Forwards before a capture: kernels are compiled and libraries make their workspaces in them."""


def bucket_of(rows: int) -> int:
    """The rows of the graph for so many: powers of two up to 8, then multiples of 8."""
    return 1 << (rows - 1).bit_length() if rows <= _EVERY else -(-rows // _EVERY) * _EVERY


def is_decoding(chunks: Sequence[Chunk]) -> bool:
    """Whether each row computes one token, and its logits are wanted."""
    return all(chunk.num_tokens == chunk.num_logits == 1 for chunk in chunks)


def padded(chunks: Sequence[Chunk], rows: int) -> list[Chunk]:
    """As many rows as asked for. Padding rows come first, in the batch as well: no row has an earlier position."""
    padding = Chunk(Scheduled("", [0], 1, pages=[0]), 0, 1)
    return [*[padding] * (rows - len(chunks)), *chunks]


class _Graph(NamedTuple):
    """logits: (rows, V) of the last replay."""

    graph: torch.cuda.CUDAGraph
    batch: FlatBatch
    logits: torch.Tensor


class DecodeGraphs:
    """The graphs of a decoder that has the kernel: gathered pages have other shapes in each step."""

    def __init__(self, decoder: Decoder, pools: KeyValuePools) -> None:
        self._decoder: Final = decoder
        self._pools: Final = pools
        self._width: Final = -(-decoder.max_positions // pools.page_size)
        self._graphs: dict[int, _Graph] = {}
        self._memory: Any = None
        """Of all graphs: they never run at a time, and each step reads its logits before the next."""

    @property
    def num_captured(self) -> int:
        """Buckets that have a graph."""
        return len(self._graphs)

    def batch(self, chunks: Sequence[Chunk]) -> FlatBatch:
        """The padded batch of a step, whose plan has the same size as any of its bucket."""
        rows = padded(chunks, bucket_of(len(chunks)))
        return self._decoder.batch(rows, self._pools.page_size, self._width)

    def forward(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, tuple[Chunk, ...]]:
        """Returns (logits (S, V) in fp32, the S chunks in their order). The logits stand until the next call."""
        batch, bucket = self.batch(chunks), bucket_of(len(chunks))
        if bucket not in self._graphs:
            self._graphs[bucket] = self._captured(batch)
        found = self._graphs[bucket]
        found.batch.plan.copy_(batch.plan)
        found.graph.replay()
        padding = bucket - len(chunks)
        return found.logits[padding:], batch.sampling[padding:]

    def _captured(self, batch: FlatBatch) -> _Graph:
        # A second forward writes the same keys to the same places.
        for _ in range(_WARM_UPS):
            self._decoder.forward(batch, self._pools)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._decoder.device.device), torch.cuda.graph(graph, pool=self._memory):
            logits, _ = self._decoder.forward(batch, self._pools)
        return _Graph(graph, batch, logits)
