"""CUDA graphs of steps in which every row decodes one token: one launch for all kernels of the model.

    rows -> bucket -> padding rows behind them, tables of one width -> a plan of one size on the host
                                                                    -> into the plan of the captured batch
    tokens that a launched step chooses -> into the ids of the captured batch, on the device
                                                                    -> replay -> logits of the real rows

A graph reads the addresses that it was captured with. All tensors of a batch are parts of its plan, so one copy into
the plan of the captured batch moves a graph on to another step. Padding rows write to page 0, which no request has.

A plan on the host keeps the tables of its rows: between two steps of the same requests few of them change.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from penstock.registry.tensors import Array
from penstock.workers.generation.attention import KeyValuePools, RowGroup, View
from penstock.workers.generation.batch import FlatBatch
from penstock.workers.generation.compiled_decoding import CompiledDecoding
from penstock.workers.generation.layer_rules import LayerRule
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.scheduler import Chunk
from penstock.workers.runtime.torch_device import TorchDevice

__all__ = ["CaptureRefused", "DecodeGraphs", "DecodePlan", "bucket_of", "is_decoding"]

_EVERY: Final = 8
_WARM_UPS: Final = 2
"""Forwards before a capture: kernels are compiled and libraries make their workspaces in them."""
_PLANS: Final = 2
"""Of a bucket, in turns: the device may still read the last one while the next is written."""


class CaptureRefused(Exception):
    """The model's code cannot be a graph: it reads values on the host, or copies to the device while it runs."""


def bucket_of(rows: int) -> int:
    """The rows of the graph for so many: powers of two up to 8, then multiples of 8."""
    return 1 << (rows - 1).bit_length() if rows <= _EVERY else -(-rows // _EVERY) * _EVERY


def is_decoding(chunks: Sequence[Chunk]) -> bool:
    """Whether each row computes one token, and its logits are wanted."""
    return all(chunk.num_tokens == chunk.num_logits == 1 for chunk in chunks)


class DecodePlan:
    """The integers of a decoding step of up to `rows` rows, in one array on the host.

    width: of page tables, in pages. rules: all kinds of layers of the model.
    """

    def __init__(self, rows: int, width: int, page_size: int, rules: Sequence[LayerRule], device: TorchDevice) -> None:
        self.rows: Final = rows
        self._page_size: Final = page_size
        self._rules: Final = tuple(rules)
        self._sizes: Final = [rows] * 5 + [size for _ in self._rules for size in (rows * width, rows)]
        # The array and the tensor share their memory.
        self.host: Final = device.host_tensor(np.zeros(sum(self._sizes), np.int64))
        ids, positions, slots, keep, firsts, *tables = np.split(self.host.numpy(), np.cumsum(self._sizes)[:-1])
        self._ids: Final[Array] = ids
        self._positions: Final[tuple[Array, Array]] = positions, firsts
        self._slots: Final[Array] = slots
        self._numbers: Final[list[Array]] = [each.reshape(rows, width) for each in tables[::2]]
        self._starts: Final[list[Array]] = tables[1::2]
        keep[:] = range(rows)
        self._held: Final[list[tuple[list[int], int]]] = [([], 0)] * rows
        """The list of pages of each row, and how many of them its table has."""

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """The rows of a step; the others are padding. A token that was not read yet has the id 0."""
        size, number = self._page_size, len(chunks)
        places = [chunk.start for chunk in chunks]
        tokens = [chunk.sequence.tokens for chunk in chunks]
        ids = [own[at] if at < len(own) else 0 for own, at in zip(tokens, places, strict=True)]
        pages = [chunk.sequence.pages for chunk in chunks]
        for column, values in (
            (self._ids, ids),
            *((each, places) for each in self._positions),
            (self._slots, [own[at // size] * size + at % size for own, at in zip(pages, places, strict=True)]),
        ):
            column[:number], column[number:] = values, 0
        for row, own in enumerate(pages):
            held, length = self._held[row]
            # A request that gave its pages back has another list of them.
            if own is not held or len(own) != length:
                self._held[row] = own, len(own)
                self._numbers_of(row, own)
        for row in range(number, self.rows):
            self._held[row] = [], 0
        for rule, numbers, starts in zip(self._rules, self._numbers, self._starts, strict=True):
            numbers[number:, 0] = starts[number:] = 0
            if rule.reach is not None:
                self._shift(rule, numbers, starts, places, pages)

    def on_device(self, device: TorchDevice) -> FlatBatch:
        """A batch of this plan, whose tensors are parts of one on the device."""
        plan = device.upload(self.host).clone()
        ids, positions, slots, keep, firsts, *tables = plan.split_with_sizes(self._sizes)
        views = {
            rule: View(numbers, starts, 0, is_masked=True)
            for rule, numbers, starts in zip(self._rules, tables[::2], tables[1::2], strict=True)
        }
        groups = (RowGroup(0, self.rows, 1, firsts, is_whole_prompt=False, views=views),)
        return FlatBatch(ids[None], positions[None], slots, keep, groups, (), plan)

    def _numbers_of(self, row: int, pages: Sequence[int]) -> None:
        for rule, numbers in zip(self._rules, self._numbers, strict=True):
            if rule.reach is None:
                numbers[row, : len(pages)] = pages

    def _shift(
        self, rule: LayerRule, numbers: Array, starts: Array, places: Sequence[int], pages: Sequence[list[int]]
    ) -> None:
        """Tables of layers that see no further back than some tokens begin at the first page that is seen."""
        for row, (at, own) in enumerate(zip(places, pages, strict=True)):
            first = rule.first_visible(at) // self._page_size
            starts[row] = first * self._page_size
            seen = own[first:]
            numbers[row, : len(seen)] = seen


class _Graph(NamedTuple):
    """logits: (rows, V) of the last replay."""

    graph: torch.cuda.CUDAGraph
    batch: FlatBatch
    logits: torch.Tensor


class DecodeGraphs:
    """The graphs of a decoder that has the kernel: gathered pages have other shapes in each step."""

    def __init__(self, decoder: Decoder, pools: KeyValuePools, compiled: CompiledDecoding | None = None) -> None:
        """compiled: the form of the model that graphs have; None: the model as it is."""
        self._decoder: Final = decoder
        self._compiled: Final = compiled
        self._pools: Final = pools
        self._width: Final = -(-decoder.max_positions // pools.page_size)
        self._graphs: dict[int, _Graph] = {}
        self._plans: dict[int, list[DecodePlan]] = {}
        self._memory: Any = None
        """Of all graphs: they never run at a time, and each step reads its logits before the next."""

    @property
    def num_captured(self) -> int:
        """Buckets that have a graph."""
        return len(self._graphs)

    def capture(self, step: Chunk, most_rows: int) -> None:
        """Graphs of all buckets of up to so many rows, each of which is this step. Raises CaptureRefused.

        The largest come first: the others use its memory.
        """
        buckets = sorted({bucket_of(rows) for rows in range(1, most_rows + 1)}, reverse=True)
        # A capture that finds the compiled model at fault ends the graphs before it.
        while missing := [bucket for bucket in buckets if bucket not in self._graphs]:
            self._graph_of(self.plan([step] * missing[0]))

    def plan(self, chunks: Sequence[Chunk]) -> DecodePlan:
        """The plan of a step, of the same size as any of its bucket. It stands until the second call from here on."""
        bucket = bucket_of(len(chunks))
        if bucket not in self._plans:
            rules = tuple(dict.fromkeys(self._decoder.rules))
            self._plans[bucket] = [
                DecodePlan(bucket, self._width, self._pools.page_size, rules, self._decoder.device)
                for _ in range(_PLANS)
            ]
        plans = self._plans[bucket]
        plans.reverse()
        plans[0].fill(chunks)
        return plans[0]

    def forward(self, chunks: Sequence[Chunk], tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits (S, V) in fp32 of the S chunks in turn. They stand until the next call.

        tokens: (S,) on the device, in place of ids that were not read yet. Raises CaptureRefused.
        """
        plan = self.plan(chunks)
        found = self._graph_of(plan)
        found.batch.plan.copy_(plan.host, non_blocking=True)
        if tokens is not None:
            found.batch.input_ids[0, : len(chunks)].copy_(tokens)
        found.graph.replay()
        return found.logits[: len(chunks)]

    def _graph_of(self, plan: DecodePlan) -> _Graph:
        if plan.rows not in self._graphs:
            self._graphs[plan.rows] = self._captured(plan)
        return self._graphs[plan.rows]

    def _captured(self, plan: DecodePlan) -> _Graph:
        batch = plan.on_device(self._decoder.device)
        # A second forward writes the same keys to the same places.
        model = self._compiled_model(batch)
        for _ in range(_WARM_UPS):
            self._decoder.forward(batch, self._pools, model)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._decoder.device.device), torch.cuda.graph(graph, pool=self._memory):
                logits, _ = self._decoder.forward(batch, self._pools, model)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureRefused(f"{self._decoder.name}: {error}") from error
        return _Graph(graph, batch, logits)

    def _compiled_model(self, batch: FlatBatch) -> Any:
        """None for the model as it is."""
        if self._compiled is None or not self._compiled.is_on:
            return None
        model = self._compiled.model_for(batch)
        if model is None:
            # Those with the compiled model are captured again. Without graphs, their memory is another one.
            self._graphs.clear()
            self._memory = None
        return model
