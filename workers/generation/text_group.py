"""The texts of one request -> one output: all of them as they grow, or the best of them at the end.

n = 3        -> texts with seed, seed + 1, seed + 2, in this order
best_of = 5  -> as many texts; at the end the n with the highest mean log probability of a token
"""

from __future__ import annotations

from typing import Final

from penstock.workers.generation.outputs import RequestOutput, Usage
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.scheduler import Sequence
from penstock.workers.generation.text import TextStream

__all__ = ["add_siblings", "has_news", "is_finished", "members", "output"]

_SEEDS: Final = 1 << 64
_SEPARATOR: Final = "\x1f"


def add_siblings(first: GenerationRequest) -> None:
    """Makes the other texts of a request, which share the pages of the prompt with the first."""
    own = first.sequence
    for index in range(1, first.params.num_candidates):
        sequence = Sequence(
            f"{own.request_id}{_SEPARATOR}{index}",
            list(own.tokens),
            own.num_prompt,
            donor=own,
            most_tokens=own.most_tokens,
        )
        first.siblings.append(
            GenerationRequest(
                sequence=sequence,
                prompt=first.prompt,
                params=first.params,
                seed=(first.seed + index) % _SEEDS,
                rules=first.rules,
                tokenizer=first.tokenizer,
                stream=None if first.stream is None else TextStream(first.tokenizer, first.params.stop),
                matcher=None if first.matcher is None else first.matcher.copy(),
                is_free_of_host=first.is_free_of_host,
                elder=first,
                deadline_s=first.deadline_s,
            )
        )


def members(first: GenerationRequest) -> list[GenerationRequest]:
    """All texts of the request."""
    return [first, *first.siblings]


def is_finished(first: GenerationRequest) -> bool:
    """Whether all texts have ended."""
    return first.finish_reason is not None and all([each.finish_reason is not None for each in first.siblings])


def has_news(first: GenerationRequest) -> bool:
    """Whether an output would differ from the last one. Which texts are the best is known at the end."""
    if first.params.num_candidates > first.params.n:
        return is_finished(first) and not first.is_closed
    return first.has_own_news or any([each.has_own_news for each in first.siblings])


def output(first: GenerationRequest) -> RequestOutput:
    """The state, and what is new since the last call."""
    own: Final = first.sequence
    texts = members(first)
    chosen = _best(texts, first.params.n)
    # First what is new: it brings the text up to date.
    deltas = tuple([text.take_delta() for text in chosen])
    completions = tuple([text.completion(index) for index, text in enumerate(chosen)])
    is_last = is_finished(first)
    if is_last:
        first.is_closed = True
    wants_prompt = first.params.prompt_logprobs is not None
    return RequestOutput(
        own.request_id,
        first.prompt,
        first.prompt_token_ids,
        completions,
        is_last,
        Usage(own.num_prompt, sum([each.num_generated for each in texts]), own.num_cached),
        deltas,
        tuple(first.prompt_logprobs) if wants_prompt else None,
    )


def _best(texts: list[GenerationRequest], number: int) -> list[GenerationRequest]:
    if number == len(texts):
        return texts
    # Texts of equal rank stay in the order of their seeds. One without a token has no probability to be compared.
    return sorted(texts, key=lambda each: (not each.num_generated, -each.logprob_sum / max(1, each.num_generated)))[
        :number
    ]
