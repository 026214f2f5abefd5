"""The chunks of a text, as the subscribers of its job get them: those of a running text, or one of a cached text.

The first chunk of a text also names the content of the model, so that no other model continues it, and the time at
which the text began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.registry.tensors import Array

__all__ = ["BEGUN", "CONTENT", "beginning", "chunk_of"]

CONTENT: Final = "content_hash"
BEGUN: Final = "begun_ms"


def chunk_of(text: str, token_ids: Sequence[int] | Array, logprobs: str | None) -> dict[str, Array]:
    """New text and new tokens. logprobs: of these tokens, as JSON; None where the job does not ask for them."""
    chunk = {"text": _text(text), "token_ids": np.array(token_ids, np.int64)}
    return chunk if logprobs is None else {**chunk, "logprobs": _text(logprobs)}


def beginning(content_hash: str, begun_ms: int) -> dict[str, Array]:
    """The values that the first chunk has beside its text. begun_ms: by the broker's clock."""
    return {CONTENT: _text(content_hash), BEGUN: np.array(begun_ms, np.int64)}


def _text(value: str) -> Array:
    return np.array(value, object)
