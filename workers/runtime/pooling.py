"""Token ids -> sentence vectors, as one torch module, which the encoder's forms run, compile and export.

Importing this module imports torch. Only a load imports it.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Pooled"]


class Pooled(torch.nn.Module):
    """An encoder, a masked mean over its last hidden states, and division by the mean's length.

    encoder: a transformers model of any precision. The pooling is done in float32.
    """

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder: Any = encoder

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """ids: (B, T) int64, right-padded; mask: likewise, 1 for a token, or None without padding; -> (B, D) float32.

        Pooling follows Reimers & Gurevych 2019, section 3.
        """
        hidden: torch.Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        if mask is None:
            pooled = hidden.mean(1)
        else:
            weights = mask.unsqueeze(2).to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        unit: torch.Tensor = pooled / pooled.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return unit
