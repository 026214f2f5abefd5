"""Logits of a step -> the tokens of each request: drafts that were right, and one token behind them.

    chunks with wanted logits -> prompt tokens: log probabilities
                              -> last token, drafts: rows of the sampler -> as far as each draft is the sampled token

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.sampler import Sampled, sample
from penstock.workers.generation.sampling_row import SamplingRow
from penstock.workers.generation.scheduler import Chunk

__all__ = ["sampled_tokens"]


def sampled_tokens(
    logits: torch.Tensor, chunks: Sequence[Chunk], requests: Mapping[str, GenerationRequest]
) -> dict[str, list[Sampled]]:
    """logits: (S, V), those of the chunks in turn. By request, for each chunk that samples, at least one each.

    A request whose logits are not finite has a last entry without a token.
    """
    rows: list[SamplingRow] = []
    places: list[int] = []
    sampling: list[Chunk] = []
    at = 0
    for chunk in chunks:
        request = requests[chunk.sequence.request_id]
        number = chunk.num_logits
        if chunk.sequence.wants_prompt_logits:
            request.add_prompt_logits(chunk.start, logits[at : at + number])
        at += number
        if chunk.samples:
            rows += [request.sampling_row(ahead) for ahead in range(1 + len(chunk.drafts))]
            places += range(at - 1 - len(chunk.drafts), at)
            sampling.append(chunk)
    if not rows:
        return {}
    wanted = logits if len(places) == len(logits) else logits[torch.tensor(places, device=logits.device)]
    found = iter(sample(wanted, rows))
    return {
        chunk.sequence.request_id: _verified(
            requests[chunk.sequence.request_id], chunk.drafts, [next(found) for _ in range(1 + len(chunk.drafts))]
        )
        for chunk in sampling
    }


def _verified(request: GenerationRequest, drafts: Sequence[int], found: list[Sampled]) -> list[Sampled]:
    """Each entry is right only where all drafts before it were; nothing follows the end of a text."""
    for number, draft in enumerate(drafts):
        if found[number].token != draft or request.ends_with(draft, number):
            return found[: number + 1]
    # What came before logits that are not finite stands; the next step meets them again, alone.
    return found[:-1] if drafts and found[-1].token is None else found
