"""Chunks of a step -> the logits that are wanted: over the pages of all layers, or as a CUDA graph where all decode.

Importing this module imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch

from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.decode_graphs import CaptureRefused, DecodeGraphs, is_decoding
from penstock.workers.generation.launched_step import LaunchedStep
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.scheduler import Chunk

__all__ = ["Forwards"]

logger = logging.getLogger("penstock.runtime")


class Forwards:
    """A decoder with its pages. page_nbytes: of all layers.

    has_graphs: used where the decoder can have any. is_compiled: they have its compiled form.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_pages: int,
        page_size: int,
        page_nbytes: int,
        *,
        has_graphs: bool = False,
        is_compiled: bool = False,
    ) -> None:
        self.pools_nbytes: Final = num_pages * page_nbytes
        self.decoder = decoder
        self._pools: Final = KeyValuePools(num_pages, page_size)
        is_possible = has_graphs and decoder.device.is_cuda and decoder.kernel is not None
        self.graphs = DecodeGraphs(decoder, self._pools, is_compiled=is_compiled) if is_possible else None

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
        batch = self.decoder.batch(chunks, self._pools.page_size)
        if launched is not None:
            batch.input_ids[0].copy_(launched.tokens_of(batch.sampling))
        logits, _ = self.decoder.forward(batch, self._pools)
        return logits, batch.sampling

    def clear(self, pages: Sequence[int]) -> None:
        """Zeros the pages in all layers."""
        self._pools.clear(pages)
