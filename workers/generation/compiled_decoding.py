"""A decoder's model, compiled by torch's inductor: what transformers computes between two attentions is a few kernels.

    the batch of a graph -> model -> logits ------------> alike? -> the graph has the compiled model
                         -> compiled model -> logits ---'        '-> off from now on: graphs have the model as it is

The gate is asked once, with the first batch; see graph_trial.py. The batch of each later graph is compared, too.

The attention, which reads what the compiler cannot know, stays as it is. Importing this module imports torch.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from penstock.registry.errors import OutOfMemory
from penstock.safety.orchestrator import GateEvidence
from penstock.workers.generation import attention
from penstock.workers.generation.acceleration_gate import COMPILED_DECODING, AccelerationGate, error_evidence
from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.batch import FlatBatch
from penstock.workers.generation.logit_evidence import logit_evidence
from penstock.workers.generation.model import Decoder

__all__ = ["CompiledDecoding"]

logger = logging.getLogger("penstock.runtime")


class CompiledDecoding:
    """The compiled form of a decoder's model."""

    def __init__(self, decoder: Decoder, pools: KeyValuePools, gate: AccelerationGate) -> None:
        self._decoder: Final = decoder
        self._pools: Final = pools
        self._gate: Final = gate
        self.is_on = True
        """Whether no batch has spoken against it."""
        with torch.inference_mode(False):
            self._model: Final = torch.compile(decoder.model)
            decoder.model.set_attn_implementation(attention.COMPILED_NAME)

    def evidence(self, batch: FlatBatch) -> GateEvidence:
        """Its logits beside the model's over a batch. It takes seconds, and more of them for another number of rows."""
        try:
            expected, _ = self._decoder.forward(batch, self._pools)
            found, _ = self._decoder.forward(batch, self._pools, self._model)
            return logit_evidence(found, expected, self._decoder.model.dtype)
        except (OutOfMemory, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a compiler may raise anything; the model itself works
            return error_evidence(error)

    def model_for(self, batch: FlatBatch) -> Any:
        """The compiled model; None from the first batch on over which it fails or computes something else."""
        if self.is_on and (problems := self.evidence(batch).problems):
            self.end()
            logger.warning("decoding is not compiled any more", extra={"reason": "; ".join(problems)})
            self._gate.switched_off(COMPILED_DECODING, "; ".join(problems))
        return self._model if self.is_on else None

    def end(self) -> None:
        """It is used no more, and the model's attention is that of before."""
        self.is_on = False
        self._decoder.model.set_attn_implementation(attention.NAME)
