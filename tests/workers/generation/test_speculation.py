"""Speculation: guesses from the text so far change no token, are counted, and cease where they are wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import Engine
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.speculation import PromptLookup
from tests.workers.generation.architectures import ARCHITECTURES, decoder, reference
from tests.workers.generation.engines import byte_tokenizer, engine_with_pages, open_engine, prompts_of

QUICK = ("Llama", "Gemma2", "Llama 4 with chunks")
MOST = 40


def repeating(name: str) -> Any:
    """A random model that soon repeats itself: each token depends mostly on the one before it."""
    model = decoder(name)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 30
    return model


def written(engine: Engine, prompt: list[int], **options: Any) -> list[int]:
    """Greedy tokens of one request."""
    params = SamplingParams.from_mapping({"temperature": 0, "max_tokens": MOST, **options})
    return list(engine.generate([prompt], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_guesses_change_no_token(name, monkeypatch):
    """Right and wrong ones, alone and two at a time, roomy and tight: the tokens are those of `generate`.

    A random model seldom repeats itself, so the guesses of this test are its own tokens, and some others.
    """
    model = decoder(name)
    prompts = prompts_of(12, 30)
    expected = [reference(model, each, MOST) for each in prompts]
    chosen = random.Random(0)

    def guess(request, most):
        written = expected[[12, 30].index(request.sequence.num_prompt)][request.num_generated :][:most]
        # A guess beyond the last token has no place.
        return [token if chosen.random() < 0.7 else chosen.randrange(97) for token in written[: MOST - 1]][:-1]

    monkeypatch.setattr(GenerationRequest, "guess", guess)
    engine = open_engine(model, page_size=4, kv_cache_mb=8)
    tight = engine_with_pages(model, 24, 4, max_num_seqs=2, max_num_batched_tokens=9, enable_prefix_caching=False)
    for each in (engine, tight):
        outputs = each.generate(prompts, SamplingParams(temperature=0, max_tokens=MOST))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert each.stats().draft_tokens > each.stats().draft_tokens_accepted > 0
        assert each.stats().pages_used == 0
    assert [written(engine, each) for each in prompts] == expected
    assert tight.stats().preemptions > 0


def test_right_guesses_save_steps():
    """A text that repeats itself needs fewer steps than tokens, and none without speculation does."""
    model = repeating("Llama")
    (prompt,) = prompts_of(12)
    expected = reference(model, prompt, MOST)
    assert len(set(expected)) < 30
    plain = open_engine(model, kv_cache_mb=4, num_speculative_tokens=0)
    assert written(plain, prompt) == expected
    assert (plain.stats().steps, plain.stats().draft_tokens) == (MOST, 0)
    engine = open_engine(model, kv_cache_mb=4)
    assert written(engine, prompt) == expected
    stats = engine.stats()
    assert stats.draft_tokens_accepted > 0
    assert stats.steps == MOST - stats.draft_tokens_accepted
    assert stats.tokens_generated == MOST


@pytest.mark.parametrize("kind", ["stop_token_ids", "stop", "max_tokens", "min_tokens"])
def test_a_text_ends_within_right_guesses(kind):
    """Tokens behind the end were right, and are no part of the text."""
    model, tokenizer = repeating("Llama"), byte_tokenizer()
    (prompt,) = prompts_of(12)
    plain = open_engine(model, tokenizer, kv_cache_mb=4, num_speculative_tokens=0)
    engine = open_engine(model, tokenizer, kv_cache_mb=4)
    free = written(plain, prompt)
    for at in range(10, 30, 4):
        kinds: dict[str, dict[str, Any]] = {
            "stop_token_ids": {"stop_token_ids": [free[at]]},
            "stop": {"stop": [tokenizer.decode(free[at : at + 3])]},
            "max_tokens": {"max_tokens": at},
            "min_tokens": {"stop_token_ids": [free[3]], "min_tokens": at},
        }
        params = SamplingParams.from_mapping({"temperature": 0, "max_tokens": MOST, **kinds[kind]})
        assert engine.generate([prompt], params)[0].outputs == plain.generate([prompt], params)[0].outputs
    assert engine.stats().draft_tokens_accepted >= 5
    assert engine.stats().pages_used == 0


def test_only_few_greedy_rows_guess():
    """Three rows have enough work for a forward; sampled texts and penalties need each token before the next."""
    model = repeating("Llama")
    (prompt,) = prompts_of(12)
    engine = open_engine(model, kv_cache_mb=4)
    engine.generate([prompt] * 3, SamplingParams(temperature=0, max_tokens=MOST))
    engine.generate([prompt], SamplingParams(temperature=1, max_tokens=MOST))
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=MOST, repetition_penalty=1.01))
    assert engine.stats().draft_tokens == 0


def test_drafts_are_found_behind_the_last_three_tokens():
    """Their last place counts; a short period goes on with itself."""
    assert PromptLookup().guess([1, 2, 3, 4, 5, 1, 2, 3, 9, 8, 1, 2, 3], 3) == [9, 8, 1]
    assert PromptLookup().guess([5, 6, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert PromptLookup().guess([7] * 5, 3) == [7, 7, 7]
    assert PromptLookup().guess([1, 2, 3, 4], 3) == []
    assert PromptLookup().guess([1, 2], 3) == []


def test_a_lookup_that_grows_finds_what_a_fresh_one_finds():
    """Random texts of few tokens, read in parts."""
    chosen = random.Random(0)
    for _ in range(50):
        tokens = [chosen.randrange(3) for _ in range(60)]
        grown = PromptLookup()
        for end in range(1, 60, chosen.randrange(1, 5)):
            assert grown.guess(tokens[:end], 3) == PromptLookup().guess(tokens[:end], 3)


def test_wrong_guesses_cease():
    """The moving acceptance falls below 0.4 with the fifth guess of which nothing was right."""
    lookup = PromptLookup()
    text = [1, 2, 3, 1, 2, 3]
    for _ in range(4):
        lookup.record(3, 0)
    assert lookup.guess(text, 3)
    lookup.record(3, 0)
    assert lookup.guess(text, 3) == []
