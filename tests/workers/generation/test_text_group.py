"""n and best_of: several texts of one prompt, which share its pages and are those of single requests."""

from __future__ import annotations

import pytest

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import Engine
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import byte_tokenizer, engine_with_pages, open_engine, prompts_of

PROMPT = prompts_of(30)[0]
SEED = 2**64 - 2
"""The last seeds go on at 0."""


def options(**more: object) -> SamplingParams:
    """Sampled texts of the same prompt."""
    return SamplingParams.from_mapping({"max_tokens": 12, "seed": SEED, **more})


def alone(engine: Engine, number: int) -> list[tuple[int, ...]]:
    """The texts of as many single requests, with the seeds that follow each other."""
    params = [options(seed=(SEED + index) % 2**64) for index in range(number)]
    return [engine.generate([PROMPT], each)[0].outputs[0].token_ids for each in params]


@pytest.mark.parametrize("has_prefixes", [True, False])
def test_n_texts_are_those_of_single_requests(has_prefixes):
    """In the order of their seeds; the prompt's full pages are computed once, with and without a prefix cache."""
    engine = open_engine(decoder("Llama"), page_size=4, kv_cache_mb=2, enable_prefix_caching=False)
    expected = alone(engine, 4)
    assert len(set(expected)) == 4
    sharing = open_engine(decoder("Llama"), page_size=4, kv_cache_mb=2, enable_prefix_caching=has_prefixes)
    (output,) = sharing.generate([PROMPT], options(n=4))
    assert [each.token_ids for each in output.outputs] == expected
    assert [each.index for each in output.outputs] == [0, 1, 2, 3]
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (30, 48)
    # Seven pages of four tokens are full, so each of the others computes two tokens.
    assert sharing.stats().prompt_tokens_computed == 30 + 3 * 2
    assert sharing.stats().pages_used == 0


def test_n_texts_are_the_same_in_a_tight_pool():
    """Texts that are preempted, also the first one, compute their prompt again and write the same."""
    expected = alone(open_engine(decoder("Llama"), kv_cache_mb=2), 5)
    tight = engine_with_pages(decoder("Llama"), 14, 4, max_num_seqs=5, max_num_batched_tokens=24)
    (output,) = tight.generate([PROMPT], options(n=5))
    assert [each.token_ids for each in output.outputs] == expected
    assert tight.stats().preemptions > 0
    assert tight.stats().pages_used == 0


def test_best_of_returns_the_most_probable_texts():
    """The highest mean log probability of a token first; all that was generated is counted."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=2)
    (every,) = engine.generate([PROMPT], options(n=6, logprobs=0))
    means = [
        sum(found[token] for token, found in zip(each.token_ids, each.logprobs or (), strict=True)) / 12
        for each in every.outputs
    ]
    order = sorted(range(6), key=lambda index: -means[index])
    (best,) = engine.generate([PROMPT], options(n=2, best_of=6))
    assert [each.token_ids for each in best.outputs] == [every.outputs[index].token_ids for index in order[:2]]
    assert [each.index for each in best.outputs] == [0, 1]
    assert best.usage.completion_tokens == 72
    assert best.outputs[0].logprobs is None


def test_a_stream_has_the_deltas_of_all_texts():
    """In sum they are the texts; best_of has one output, at the end."""
    engine = open_engine(decoder("Llama"), byte_tokenizer(), kv_cache_mb=2)
    (whole,) = engine.generate([PROMPT], options(n=3))
    written = ["", "", ""]
    for output in engine.stream(PROMPT, options(n=3)):
        for index, delta in enumerate(output.deltas):
            written[index] += delta.text
    assert written == [each.text for each in whole.outputs]
    assert output.outputs == whole.outputs
    assert [each.finished for each in engine.stream(PROMPT, options(n=1, best_of=3))] == [True]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_all_texts(steps):
    """Also those that wait for the prompt's pages."""
    engine: Engine = open_engine(decoder("Llama"), kv_cache_mb=2, max_num_batched_tokens=32)
    engine.add_request("several", PROMPT, options(n=4))
    for _ in range(steps):
        engine.step()
    assert engine.abort("several")
    assert not engine.abort("several")
    (output,) = engine.step()
    assert {each.finish_reason for each in output.outputs} == {"abort"}
    assert engine.stats().pages_used == 0
    assert not engine.has_unfinished_requests


def test_the_outputs_of_a_request_share_the_tokens_of_its_prompt():
    """A long prompt is not copied at each step."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=2)
    engine.add_request("a", PROMPT, options(n=2, max_tokens=4))
    found = []
    while engine.has_unfinished_requests:
        found += engine.step()
    assert len(found) > 2
    assert found[0].prompt_token_ids == tuple(PROMPT)
    assert all(each.prompt_token_ids is found[0].prompt_token_ids for each in found)
