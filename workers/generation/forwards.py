"""Chunks of a step -> the logits that are wanted: over the pages of all layers, or as a CUDA graph where all decode.

Importing this module imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch

from penstock.workers.generation.acceleration_gate import CUDA_GRAPHS, AccelerationGate
from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.decode_graphs import CaptureRefused, DecodeGraphs, is_decoding
from penstock.workers.generation.graph_trial import accepted_graphs
from penstock.workers.generation.launched_step import LaunchedStep
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.scheduler import Chunk

__all__ = ["Forwards"]

logger = logging.getLogger("penstock.runtime")


class Forwards:
    """A decoder with its pages. page_nbytes: of all layers. gate: is told where graphs fail."""

    def __init__(
        self, decoder: Decoder, num_pages: int, page_size: int, page_nbytes: int, gate: AccelerationGate
    ) -> None:
        self.pools_nbytes: Final = num_pages * page_nbytes
        self.decoder = decoder
        self._pools: Final = KeyValuePools(num_pages, page_size)
        self._gate: Final = gate
        self.graphs: DecodeGraphs | None = None
        """None: each step launches its kernels one by one."""

    def try_graphs(self, *, is_wanted: bool, compiles: bool, most_rows: int) -> None:
        """Has graphs from here on, if the decoder can have any and the gate accepts them. Before the first request.

        compiles: they have the model's compiled form. most_rows: of a step.
        """
        if not self.decoder.device.is_cuda or self.decoder.kernel is None:
            return
        if is_wanted:
            decoder, pools, gate = self.decoder, self._pools, self._gate
            self.graphs = accepted_graphs(decoder, pools, gate, compiles=compiles, most_rows=most_rows)
        else:
            self._gate.stays_off(CUDA_GRAPHS, "cuda_graphs", False)

    def logits(
        self, chunks: Sequence[Chunk], launched: LaunchedStep | None = None
    ) -> tuple[torch.Tensor, Sequence[Chunk]]:
        """(S, V) in fp32, and the chunks that they are of. They stand until the next call.

        launched: the step that chooses the tokens of these chunks, each of which is one.
        """
        if self.graphs is not None and is_decoding(chunks):
            try:
                return self.graphs.forward(chunks, None if launched is None else launched.tokens_of(chunks)), chunks
            except CaptureRefused as refusal:
                logger.warning("decoding goes on without CUDA graphs", extra={"reason": str(refusal)})
                self.graphs = None
                self._gate.switched_off(CUDA_GRAPHS, str(refusal))
        batch = self.decoder.batch(chunks, self._pools.page_size)
        if launched is not None:
            batch.input_ids[0].copy_(launched.tokens_of(batch.sampling))
        logits, _ = self.decoder.forward(batch, self._pools)
        return logits, batch.sampling

    def clear(self, pages: Sequence[int]) -> None:
        """Zeros the pages in all layers."""
        self._pools.clear(pages)
