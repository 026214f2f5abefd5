"""384 -> 384 -> ReLU -> 10, drawn from its own generator so that nobody else's seed is touched."""

from __future__ import annotations

import torch

_SEED = 2026


def build() -> torch.nn.Module:
    """The module: x (batch, 384) float32 -> logits (batch, 10) float32."""
    generator = torch.Generator().manual_seed(_SEED)
    module = torch.nn.Sequential(torch.nn.Linear(384, 384), torch.nn.ReLU(), torch.nn.Linear(384, 10))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-(384**-0.5), 384**-0.5, generator=generator)
    return module
