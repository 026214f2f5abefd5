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
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.logit_changes import change_logits
from penstock.workers.generation.noise import gumbel, row_key
from penstock.workers.generation.sampling_row import SamplingRow

__all__ = ["Sampled", "is_free_of_host", "logprobs_at", "sample", "sample_on_device"]

_PREFILTER: Final = 256
_BLOCK: Final = 1 << 18
"""Logits of so many tokens at a time, on a CPU."""


class Sampled(NamedTuple):
    """token: None where the logits are not finite, or forbid every token. logprobs: by token, of the model itself."""

    token: int | None
    logprobs: dict[int, float] | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """logits: (S, V) float32, of S rows; it may be changed."""
    # A forward's logits can be changed in its mode only.
    with torch.inference_mode():
        return _sample(logits, rows)


def is_free_of_host(params: SamplingParams, vocab_size: int) -> bool:
    """Whether a token can be chosen without a look at the tokens before it, and without a read in between."""
    if params.has_penalties or params.is_structured or params.bad_words or params.min_tokens or params.logit_bias:
        return False
    if params.allowed_token_ids is not None or params.logprobs is not None or params.num_candidates > params.n:
        return False
    # The most probable tokens decide a row for certain where top_k, or the vocabulary, leaves no others.
    is_decided = 0 < params.top_k <= _PREFILTER or vocab_size <= _PREFILTER
    return params.is_greedy or is_decided or not _is_filtered(params, vocab_size)


def sample_on_device(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Nothing is read: returns (2, S) int64 on the device, the tokens, and whether the logits of each are finite.

    logits: (S, V) float32. rows: those for which `is_free_of_host` holds, or none at all where every one is greedy.
    """
    with torch.inference_mode():
        best, chosen = logits.max(-1)
        is_finite = torch.isfinite(best)
        if drawn := [at for at, row in enumerate(rows) if not row.params.is_greedy]:
            chosen, _, _ = _drawn_on_device(logits, rows, drawn, chosen, is_finite)
        return torch.stack((chosen, is_finite.long()))


def logprobs_at(logits: torch.Tensor, token: int, number: int) -> dict[int, float]:
    """logits: (V,). The log probabilities of the token and of so many most probable ones."""
    logprobs = logits.log_softmax(-1)
    values, found = logprobs.topk(min(number, logits.shape[-1]))
    # One copy to the host: the numbers of tokens are whole in double precision.
    own, *read = torch.cat((logprobs[token, None], values, found.double())).cpu().tolist()
    return {token: own, **{int(each): value for value, each in zip(read, read[len(values) :], strict=False)}}


def _sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    asked = [at for at, row in enumerate(rows) if row.logprobs is not None]
    own = dict(zip(asked, logits[torch.tensor(asked, device=logits.device)], strict=True)) if asked else {}
    best, chosen = logits.max(-1)
    # NaN and +inf win the maximum, and a row of nothing but -inf has no other.
    is_finite = torch.isfinite(best)
    if any(row.changes_logits for row in rows):
        # A NaN below a mask is not seen any more.
        change_logits(logits, rows)
        best, chosen = logits.max(-1)
        is_finite &= torch.isfinite(best)
    drawn = [at for at, row in enumerate(rows) if not row.params.is_greedy]
    tokens, finite = _drawn(logits, rows, drawn, chosen, is_finite) if drawn else _read(chosen, is_finite)
    found = []
    for at, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        logprobs = logprobs_at(own[at], token, row.logprobs) if row.logprobs is not None and finite[at] else None
        found.append(Sampled(token if finite[at] else None, logprobs))
    return found


def _read(*columns: torch.Tensor) -> list[list[int]]:
    """Integers and truths of all rows, by one copy to the host."""
    read: list[list[int]] = torch.stack([each.long() for each in columns]).cpu().tolist()
    return read


def _drawn(
    logits: torch.Tensor, rows: Sequence[SamplingRow], drawn: Sequence[int], chosen: torch.Tensor, finite: torch.Tensor
) -> tuple[list[int], list[int]]:
    """The token of each row, and whether its logits are finite. drawn: the rows that are not greedy.

    Rows that are not finite are drawn, too: which ones they are is known on the host when all tokens are.
    """
    all_chosen, is_decided, filtered = _drawn_on_device(logits, rows, drawn, chosen, finite)
    found, is_finite, decided_rows = _read(all_chosen, finite, is_decided)
    if undecided := [at for at in filtered if is_finite[at] and not decided_rows[at]]:
        size = logits.shape[-1]
        again = _Settings.of(rows, undecided, size, logits.device)
        whole, _ = _from_top(logits.index_select(0, again.places), again, size)
        for at, token in zip(undecided, whole.cpu().tolist(), strict=True):
            found[at] = token
    return found, is_finite


def _drawn_on_device(
    logits: torch.Tensor, rows: Sequence[SamplingRow], drawn: Sequence[int], chosen: torch.Tensor, finite: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(tokens of all rows, whether each is decided, the rows that have filters); `chosen` has those of greedy rows."""
    size = logits.shape[-1]
    filtered = [at for at in drawn if _is_filtered(rows[at].params, size)]
    free = [at for at in drawn if not _is_filtered(rows[at].params, size)]
    settings = _Settings.of(rows, [*filtered, *free], size, logits.device)
    own = logits if len(filtered) == len(rows) or len(free) == len(rows) else logits.index_select(0, settings.places)
    number = len(filtered)
    is_decided, tokens = torch.ones_like(finite), []
    if filtered:
        top = settings.part(0, number)
        chosen_from_top, decided = _from_top(own[:number], top, min(_PREFILTER, size))
        tokens.append(chosen_from_top)
        is_decided = is_decided.index_copy(0, top.places, decided)
    if free:
        rest = settings.part(number, len(drawn))
        all_tokens = torch.arange(size, device=logits.device).expand(len(free), -1)
        tokens.append((own[number:].double() / rest.temperature + gumbel(rest.keys, all_tokens)).argmax(-1))
    return chosen.index_copy(0, settings.places, torch.cat(tokens)), is_decided, filtered


@dataclass(frozen=True, slots=True)
class _Settings:
    """How N rows are drawn, on the device, by one copy. places: (N,), in the logits. keys: (N,), of their noise.

    The others: (N, 1) float64. top_k: the size of the vocabulary where it is off.
    """

    places: torch.Tensor
    keys: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], at: Sequence[int], vocab_size: int, device: torch.device) -> _Settings:
        asked = [rows[each] for each in at]
        integers = np.array([at, [row_key(each.seed, each.position) for each in asked]], np.int64)
        params = [each.params for each in asked]
        most = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
        columns = [(each.temperature, kept, each.top_p, each.min_p) for each, kept in zip(params, most, strict=True)]
        floats = np.array(columns, np.float64).T
        host = torch.from_numpy(np.concatenate((integers, np.ascontiguousarray(floats).view(np.int64))))
        # A copy out of pageable memory waits for the device's other work.
        placed = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
        return cls(*placed[:2], *placed[2:].view(torch.float64)[:, :, None])

    def part(self, start: int, end: int) -> _Settings:
        """Those of the rows in between."""
        columns = (self.places, self.keys, self.temperature, self.top_k, self.top_p, self.min_p)
        return _Settings(*(each[start:end] for each in columns))


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def _from_top(own: torch.Tensor, settings: _Settings, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row: its choice among so many of its most probable tokens, and whether that is its choice among all."""
    vocab_size, most = own.shape[-1], settings.top_k
    found, tokens = own.topk(number)
    top = found.double() / settings.temperature
    probabilities = (top - top[:, :1]).exp() / _sums(own, found[:, :1], settings.temperature, top)
    kept = torch.arange(number, device=own.device) < most
    # top_p is a share of what top_k leaves. That is known where all of it is here, or nothing was cut.
    total = torch.where(most <= number, (probabilities * kept).sum(-1, keepdim=True), 1.0)
    is_known = (most <= number) | (most == vocab_size)
    before = probabilities.cumsum(-1) - probabilities
    kept &= (before < settings.top_p * total) | (settings.top_p >= 1)
    kept &= probabilities >= settings.min_p * probabilities[:, :1]
    # The most probable token is always left.
    kept[:, 0] = True
    ends_here = (most <= number) | ~kept[:, -1:] if number < vocab_size else torch.ones_like(is_known)
    scores = top.masked_fill(~kept, float("-inf")) + gumbel(settings.keys, tokens)
    chosen = tokens.gather(-1, scores.argmax(-1, keepdim=True)).flatten()
    return chosen, (is_known & ends_here).flatten()


def _sums(own: torch.Tensor, best: torch.Tensor, temperatures: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """(S, 1): the sum over all tokens of their probabilities, as shares of the highest."""
    if top.shape[-1] == own.shape[-1]:
        return (top - top[:, :1]).exp().sum(-1, keepdim=True)
    # Single precision for each token, and double for their sum: it is only compared with top_p. On a CPU, a few rows at
    # a time: the memory of all is given back to the system and asked for again in each step.
    rows = len(own) if own.is_cuda else max(1, _BLOCK // own.shape[-1])
    sums: list[torch.Tensor] = []
    scale = temperatures.float()
    for part in (slice(at, at + rows) for at in range(0, len(own), rows)):
        shares = (own[part] - best[part]).div_(scale[part]).exp_()
        sums.append(shares.sum(-1, keepdim=True, dtype=torch.float64))
    return torch.cat(sums)
