"""Logits of a step, changed as each row asks: penalties -> biases -> forbidden tokens at minus infinity.

All rows are changed by a few operations together; each value depends on its own row only.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from penstock.workers.generation.sampling_row import SamplingRow

__all__ = ["change_logits"]

_NEVER: Final = float("-inf")


def change_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """logits: (S, V) of S rows, changed in place."""
    _penalise(logits, rows)
    _bias(logits, rows)
    for at, row in enumerate(rows):
        if row.forbidden is not None:
            logits[at].masked_fill_(row.forbidden, _NEVER)
    barred = [(at, token) for at, row in enumerate(rows) for token in row.barred]
    if barred:
        places, tokens = zip(*barred, strict=True)
        logits[torch.tensor(places), torch.tensor(tokens)] = _NEVER


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition as Keskar et al. 2019 (CTRL) have it; presence and frequency as the API of OpenAI has them."""
    asked = [(at, row.params, row.history) for at, row in enumerate(rows) if row.history is not None]
    if not asked:
        return
    sizes = torch.tensor([len(history.tokens) for _, _, history in asked])
    tokens = torch.from_numpy(np.concatenate([history.tokens for _, _, history in asked]))
    counts = torch.from_numpy(np.concatenate([history.counts for _, _, history in asked]))
    places = torch.tensor([at for at, _, _ in asked]).repeat_interleave(sizes)
    repetition, frequency, presence = (
        torch.tensor(each, dtype=logits.dtype).repeat_interleave(sizes)
        for each in zip(
            *((p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in asked), strict=True
        )
    )
    values = logits[places, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[places, tokens] = values - frequency * counts - presence * (counts > 0)


def _bias(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    biased = [
        (at, token, bias)
        for at, row in enumerate(rows)
        if row.params.logit_bias
        for token, bias in row.params.logit_bias.items()
    ]
    if biased:
        places, tokens, biases = zip(*biased, strict=True)
        logits[torch.tensor(places), torch.tensor(tokens)] += torch.tensor(biases, dtype=logits.dtype)
