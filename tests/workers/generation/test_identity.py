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
LONG_WINDOW = 4096
WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
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
def test_chunks_of_prompts_write_the_same(budget, caplog):
    """However a prompt is cut, the tokens are the same, and no step exceeds its budget."""
    model = decoder("Gemma2")
    expected = _expected(model)
    engine = open_engine(model, page_size=4, kv_cache_mb=8, max_num_seqs=5, max_num_batched_tokens=budget)
    with caplog.at_level("DEBUG", "penstock.runtime.steps"):
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected
    computed = [record.tokens for record in caplog.records if record.name == "penstock.runtime.steps"]
    assert sum(computed) >= sum(map(len, PROMPTS))
    assert max(computed) <= budget


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


def _with_long_windows(name: str) -> Any:
    """A model with windows and chunks of the length that real ones have."""
    config = ARCHITECTURES[name]()
    config.max_position_embeddings = 2 * LONG_WINDOW
    for field in WINDOW_FIELDS:
        if getattr(config, field, None):
            setattr(config, field, LONG_WINDOW)
    return decoder(name, config=config)


def _windows(model: Any) -> list[tuple[str, Any]]:
    """Each window or chunk that the configuration and the modules hold."""
    owners = [("config", model.config.get_text_config()), *model.named_modules()]
    return [(f"{where}.{field}", getattr(owner, field, None)) for where, owner in owners for field in WINDOW_FIELDS]


@pytest.mark.parametrize("name", _marked(WINDOWED))
def test_long_windows_are_proven(name):
    """A model as it is passes, and keeps its window; one whose rules are lost, or of another length, is refused."""
    model = _with_long_windows(name)
    wrapped = wrap_decoder(model, None, None)
    rules, windows = list(wrapped.rules), _windows(model)
    assert LONG_WINDOW in [rule.reach for rule in rules]
    assert LONG_WINDOW in [window for _, window in windows]
    probe(wrapped, 4)
    assert (wrapped.rules, _windows(model)) == (rules, windows)
    for wrong in (LayerRule(), LayerRule(window=LONG_WINDOW // 2)):
        wrapped.rules = [wrong if rule.reach else rule for rule in rules]
        with pytest.raises(ConfigurationError, match=f"{wrapped.name} is not served: its logits"):
            probe(wrapped, 4)
        assert _windows(model) == windows


def test_windows_are_restored_after_an_error():
    """The model's own code raises in the middle of the probe."""
    model = _with_long_windows("Mistral with a window")
    wrapped, windows = wrap_decoder(model, None, None), _windows(model)
    rules = wrapped.rules
    seen: list[Any] = []

    def breaks(*_: Any) -> None:
        seen.append(model.config.sliding_window)
        raise RuntimeError("no such kernel")

    model.model.layers[1].register_forward_hook(breaks)
    with pytest.raises(ConfigurationError, match="MistralForCausalLM is not served: RuntimeError in a forward"):
        probe(wrapped, 4)
    assert seen == [16]
    assert wrapped.rules is rules
    assert _windows(model) == windows


def test_window_beyond_all_positions_is_left():
    """It hides no key of a request that is served, so nothing is to be proven."""
    model = _with_long_windows("Mistral with a window")
    wrapped = wrap_decoder(model, None, LONG_WINDOW)
    wrapped.rules = [LayerRule()] * len(wrapped.rules)
    probe(wrapped, 4)


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
