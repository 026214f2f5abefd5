"""Positions for models that ask their cache for them: Llama 4 scales its queries by position.

    positions of a token = cache.get_seq_length() + its place in the batch, in the model's code

In a flat batch the tokens of many requests lie side by side. So `get_seq_length` gives a number for each token: its
position without its place in the batch. Keys and values pass through: the attention function keeps them.

Importing this module imports torch.
"""

from __future__ import annotations

import torch

__all__ = ["FlatPositions"]


class FlatPositions:
    """Stands where such a model expects a cache of transformers."""

    def __init__(self, position_ids: torch.Tensor) -> None:
        """position_ids: (1, T)."""
        self._offsets = position_ids[0] - torch.arange(position_ids.shape[1], device=position_ids.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """(T,): position of each token, without its place in the batch."""
        return self._offsets

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the batch, unchanged."""
        return keys, values
