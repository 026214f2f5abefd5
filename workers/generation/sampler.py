"""Logits of a step -> one token for each row.

    logits (S, V) -> log probabilities, where asked for
                  -> penalties, biases, forbidden tokens -> greedy rows: argmax
                                                         -> others: temperature, top_k, top_p in it, min_p, Gumbel noise

Filters look at the 256 most probable tokens. Where these do not decide a row, all of its tokens are sorted: the result
is the same.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.logit_changes import change_logits
from penstock.workers.generation.noise import gumbel
from penstock.workers.generation.sampling_row import SamplingRow

__all__ = ["Sampled", "logprobs_at", "sample"]

_PREFILTER: Final = 256


class Sampled(NamedTuple):
    """token: None where the logits are not finite, or forbid every token. logprobs: by token, of the model itself."""

    token: int | None
    logprobs: dict[int, float] | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """logits: (S, V) float32, of S rows; it may be changed."""
    # A forward's logits can be changed in its mode only.
    with torch.inference_mode():
        return _sample(logits, rows)


def logprobs_at(logits: torch.Tensor, token: int, number: int) -> dict[int, float]:
    """logits: (V,). The log probabilities of the token and of so many most probable ones."""
    logprobs = logits.log_softmax(-1)
    values, found = logprobs.topk(min(number, logits.shape[-1]))
    return {token: float(logprobs[token]), **dict(zip(found.tolist(), values.tolist(), strict=True))}


def _sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    asked = [at for at, row in enumerate(rows) if row.logprobs is not None]
    own = dict(zip(asked, logits[asked], strict=True)) if asked else {}
    best, chosen = logits.max(-1)
    # NaN and +inf win the maximum, and a row of nothing but -inf has no other.
    is_finite = torch.isfinite(best)
    if any(row.changes_logits for row in rows):
        # A NaN below a mask is not seen any more.
        change_logits(logits, rows)
        best, chosen = logits.max(-1)
        is_finite &= torch.isfinite(best)
    finite, tokens = is_finite.tolist(), chosen.tolist()
    drawn = [at for at, row in enumerate(rows) if not row.params.is_greedy and finite[at]]
    if drawn:
        for at, token in zip(drawn, _draw(logits[drawn], [rows[at] for at in drawn]), strict=True):
            tokens[at] = token
    found = []
    for at, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        logprobs = logprobs_at(own[at], token, row.logprobs) if row.logprobs is not None and finite[at] else None
        found.append(Sampled(token if finite[at] else None, logprobs))
    return found


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token for each row, from its filtered distribution."""
    size = logits.shape[-1]
    tokens = [-1] * len(rows)
    filtered = [at for at, row in enumerate(rows) if _is_filtered(row.params, size)]
    if filtered:
        for at, token in _from_top(logits, rows, filtered, min(_PREFILTER, size)):
            tokens[at] = token
        undecided = [at for at in filtered if tokens[at] < 0]
        if undecided:
            for at, token in _from_top(logits, rows, undecided, size):
                tokens[at] = token
    free = [at for at, row in enumerate(rows) if not _is_filtered(row.params, size)]
    if free:
        own = [rows[at] for at in free]
        scores = logits[free].double() / _temperatures(own) + _noise(own, torch.arange(size).expand(len(free), -1))
        for at, token in zip(free, scores.argmax(-1).tolist(), strict=True):
            tokens[at] = token
    return tokens


def _temperatures(rows: Sequence[SamplingRow]) -> torch.Tensor:
    return torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64)


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def _from_top(
    logits: torch.Tensor, rows: Sequence[SamplingRow], at: Sequence[int], number: int
) -> list[tuple[int, int]]:
    """(row, token) of those rows whose choice lies within so many of their most probable tokens."""
    vocab_size = logits.shape[-1]
    own, asked = logits if len(at) == len(logits) else logits[at], [rows[each] for each in at]
    params = [each.params for each in asked]
    temperatures = _temperatures(asked)
    found, tokens = own.topk(number)
    top = found.double() / temperatures
    most = torch.tensor([[each.top_k if 0 < each.top_k < vocab_size else vocab_size] for each in params])
    probabilities = (top - top[:, :1]).exp() / _sums(own, found[:, :1], temperatures, top)
    kept = torch.arange(number) < most
    # top_p is a share of what top_k leaves. That is known where all of it is here, or nothing was cut.
    total = torch.where(most <= number, (probabilities * kept).sum(-1, keepdim=True), 1.0)
    is_known = (most <= number) | (most == vocab_size)
    before = probabilities.cumsum(-1) - probabilities
    top_p = torch.tensor([[each.top_p] for each in params], dtype=torch.float64)
    kept &= (before < top_p * total) | (top_p >= 1)
    min_p = torch.tensor([[each.min_p] for each in params], dtype=torch.float64)
    kept &= probabilities >= min_p * probabilities[:, :1]
    # The most probable token is always left.
    kept[:, 0] = True
    ends_here = (most <= number) | ~kept[:, -1:] if number < vocab_size else torch.ones_like(is_known)
    decided = (is_known & ends_here).flatten().tolist()
    scores = top.masked_fill(~kept, float("-inf")) + _noise([rows[each] for each in at], tokens)
    chosen = tokens.gather(-1, scores.argmax(-1, keepdim=True)).flatten().tolist()
    return [(row, token) for row, token, is_decided in zip(at, chosen, decided, strict=True) if is_decided]


def _sums(own: torch.Tensor, best: torch.Tensor, temperatures: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """(S, 1): the sum over all tokens of their probabilities, as shares of the highest."""
    if top.shape[-1] == own.shape[-1]:
        return (top - top[:, :1]).exp().sum(-1, keepdim=True)
    # Single precision for each token, and double for their sum: it is only compared with top_p.
    shares = (own - best).div_(temperatures.float()).exp_()
    return shares.sum(-1, keepdim=True, dtype=torch.float64)


def _noise(rows: Sequence[SamplingRow], tokens: torch.Tensor) -> torch.Tensor:
    return gumbel([row.seed for row in rows], [row.position for row in rows], tokens)
