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
            logits[at].masked_fill_(row.forbidden.to(logits.device), _NEVER)
    barred = [(at, token) for at, row in enumerate(rows) for token in row.barred]
    if barred:
        at, column = torch.tensor(barred, device=logits.device).T
        logits[at, column] = _NEVER


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition as Keskar et al. 2019 (CTRL) have it; presence and frequency as the API of OpenAI has them."""
    asked = [(at, row.params, row.history) for at, row in enumerate(rows) if row.history is not None]
    if not asked:
        return
    sizes = [len(history.tokens) for _, _, history in asked]
    settings = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in asked]
    counts = np.concatenate([history.counts for _, _, history in asked])
    values = np.concatenate((np.repeat(np.array(settings, np.float32), sizes, 0).T, counts[None]))
    tokens = np.concatenate([history.tokens for _, _, history in asked])
    places = np.stack((np.repeat([at for at, _, _ in asked], sizes), tokens))
    at, column = torch.from_numpy(places).to(logits.device)
    repetition, frequency, presence, times = torch.from_numpy(values).to(logits.device, logits.dtype)
    found = logits[at, column]
    found = torch.where(found > 0, found / repetition, found * repetition)
    logits[at, column] = found - frequency * times - presence * (times > 0)


def _bias(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    biased = [
        (at, token, bias)
        for at, row in enumerate(rows)
        if row.params.logit_bias
        for token, bias in row.params.logit_bias.items()
    ]
    if biased:
        # Numbers of rows and tokens are whole in double precision.
        at, column, bias = torch.tensor(biased, dtype=torch.float64, device=logits.device).T
        logits[at.long(), column.long()] += bias.to(logits.dtype)
