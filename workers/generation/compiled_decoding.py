"""A decoder's model, compiled by torch's inductor: what transformers computes between two attentions is a few kernels.

    the batch of a graph -> model -> logits ------------> as good? -> the compiled model
                         -> compiled model -> logits ---'         '-> none: the graph has the model as it is

The attention, which reads what the compiler cannot know, stays as it is. Importing this module imports torch.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from penstock.workers.generation import attention
from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.batch import FlatBatch
from penstock.workers.generation.model import Decoder

__all__ = ["compiled_model", "is_as_good"]

logger = logging.getLogger("penstock.runtime")

_MOST_DIFFERENCES: Final = {torch.float32: 1e-3, torch.bfloat16: 0.045}
"""Of a row of logits, by its length: what a cosine of 0.999 allows in bf16, and far more than rounding in fp32."""


def compiled_model(decoder: Decoder, batch: FlatBatch, pools: KeyValuePools) -> Any:
    """The model's compiled form, which was compared over this batch; None where it fails or computes something else.

    It takes seconds, and more of them for another number of rows.
    """
    with torch.inference_mode(False):
        decoder.model.set_attn_implementation(attention.COMPILED_NAME)
        model = torch.compile(decoder.model)
    try:
        expected, _ = decoder.forward(batch, pools)
        found, _ = decoder.forward(batch, pools, model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may raise anything; the model itself works
        logger.warning("decoding is not compiled", extra={"reason": f"{type(error).__name__}: {error!s:.300}"})
        return None
    if not is_as_good(found, expected, next(decoder.model.parameters()).dtype):
        logger.warning("decoding is not compiled", extra={"reason": "the compiled model gives other logits"})
        return None
    return model


def is_as_good(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether each row of logits (S, V) differs by rounding only. dtype: of the weights."""
    lengths = torch.linalg.vector_norm(expected, dim=-1)
    differences = torch.linalg.vector_norm(found - expected, dim=-1)
    return bool((differences <= _MOST_DIFFERENCES.get(dtype, 0.0) * lengths).all())
