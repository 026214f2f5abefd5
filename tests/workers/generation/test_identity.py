"""The engine's greedy tokens are those of `model.generate`: for each architecture, pool and page size."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.workers.generation.layer_rules import LayerRule
from penstock.workers.generation.model import wrap_decoder
from penstock.workers.generation.probe import probe
from tests.workers.generation.architectures import ARCHITECTURES, REFUSED, WINDOWED, decoder, reference
from tests.workers.generation.engines import GREEDY, engine_with_pages, open_engine, prompts_of, token_ids

QUICK = {"Llama", "Gemma2", "Llama 4 with chunks"}
PROMPTS = prompts_of(3, 17, 40, 9, 24)


def _marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


def _expected(model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [reference(model, prompt, GREEDY.max_tokens) for prompt in prompts]


@pytest.mark.parametrize("name", _marked(ARCHITECTURES))
def test_tokens_are_those_of_generate(name):
    """A roomy pool, a tight one that preempts, and one with prefix hits write the same as the model's own code."""
    model = decoder(name)
    expected = _expected(model)
    assert len({token for written in expected for token in written}) > 8, "A model that repeats itself proves little"
    roomy = open_engine(model, page_size=4, kv_cache_mb=8, max_num_seqs=4, max_num_batched_tokens=24)
    assert token_ids(roomy.generate(PROMPTS, GREEDY)) == expected
    assert roomy.stats().preemptions == 0
    assert token_ids(roomy.generate(PROMPTS, GREEDY)) == expected
    assert roomy.stats().prefix_tokens_found > 0
    tight = engine_with_pages(model, 20, 4, max_num_seqs=5, max_num_batched_tokens=24, enable_prefix_caching=False)
    assert token_ids(tight.generate(PROMPTS, GREEDY)) == expected
    assert tight.stats().preemptions > 0
    assert tight.stats().pages_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_page_sizes_write_the_same(page_size):
    """ES-024: the size of a page changes no token."""
    model = decoder("Llama")
    expected = _expected(model)
    engine = open_engine(model, page_size=page_size, kv_cache_mb=8, max_num_seqs=3, max_num_batched_tokens=16)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("budget", [5, 11, 512])
def test_chunks_of_prompts_write_the_same(budget):
    """However a prompt is cut, the tokens are the same, and no step exceeds its budget."""
    model = decoder("Gemma2")
    expected = _expected(model)
    engine = open_engine(model, page_size=4, kv_cache_mb=8, max_num_seqs=5, max_num_batched_tokens=budget)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected


def test_a_shared_beginning_is_computed_once():
    """ES-002: the second request with the same long prefix computes few tokens, and writes the same."""
    model = decoder("Llama")
    shared, *ends = prompts_of(160, 5, 6)
    prompts = [shared + end for end in ends]
    expected = _expected(model, prompts)
    engine = open_engine(model, page_size=16, kv_cache_mb=8)
    assert token_ids(engine.generate(prompts[0], GREEDY)) == expected[:1]
    computed = engine.stats().prompt_tokens_computed
    again = engine.generate(prompts[1], GREEDY)
    assert token_ids(again) == expected[1:]
    assert again[0].usage.cached_tokens == 160
    assert engine.stats().prompt_tokens_computed - computed == len(ends[1])


def test_prefix_caching_can_be_off():
    """ES-026: without it, nothing is found again."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=8, enable_prefix_caching=False)
    for _ in range(2):
        assert engine.generate(PROMPTS[2], GREEDY)[0].usage.cached_tokens == 0


def test_tenants_share_no_pages():
    """Another tenant's equal prompt is computed again."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=8)
    first, other, again = (engine.generate(PROMPTS[2], GREEDY, tenant=name)[0] for name in ("one", "two", "one"))
    assert [output.usage.cached_tokens for output in (first, other, again)] == [0, 0, 32]


@pytest.mark.parametrize("name", _marked(WINDOWED))
def test_a_lost_window_is_seen(name):
    """Negative control: with full attention in all layers, the same comparison fails, and the probe refuses."""
    model = decoder(name)
    expected = _expected(model)
    engine = open_engine(model, kv_cache_mb=8)
    engine.decoder.rules = [LayerRule()] * len(engine.decoder.rules)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) != expected
    with pytest.raises(ConfigurationError, match=f"{engine.decoder.name} is not served: its logits"):
        probe(engine.decoder, 4)


def test_windows_are_many():
    """The control is not empty: windows of whole models, mixed ones, with sinks and caps, and chunks."""
    assert {"Mistral with a window", "Gemma2", "GPT-OSS", "Llama 4 with chunks"} <= set(WINDOWED)
    assert len(ARCHITECTURES) >= 25


@pytest.mark.parametrize("name", REFUSED)
def test_other_architectures_are_refused_by_name(name):
    """A model that never calls the attention function would write wrong text, and no error."""
    with pytest.raises(ConfigurationError, match=r"is not served: 0 calls of the attention|type linear_attention"):
        open_engine(decoder(name))


def test_a_model_that_lets_rows_mix_is_refused():
    """A layer that reads its neighbours in the batch fails the probe."""
    model = decoder("Llama")
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, found: found + found.mean(1, keepdim=True))
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM is not served: its logits over pages differ"):
        probe(wrap_decoder(model, None, None), 4)
