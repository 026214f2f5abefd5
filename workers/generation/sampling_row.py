"""How one token is chosen: the parameters of its request, and what the tokens before it ask for.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.token_history import TokenHistory

__all__ = ["SamplingRow"]


class SamplingRow(NamedTuple):
    """position: of the token that is chosen, in prompt and output."""

    params: SamplingParams
    seed: int
    position: int
    barred: Sequence[int] = ()
    """Tokens that may not be chosen now: few of them."""
    forbidden: torch.Tensor | None = None
    """(V,) bool: the same, where they are many."""
    history: TokenHistory | None = None
    """The tokens before this one, where they have penalties."""
    logprobs: int | None = None
    """So many most probable tokens are told, and the chosen one."""

    @property
    def changes_logits(self) -> bool:
        """Whether the model's own logits do not stand as they are."""
        return bool(self.barred or self.params.logit_bias) or self.forbidden is not None or self.history is not None
