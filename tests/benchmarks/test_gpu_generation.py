"""The measurements of generation on a GPU: their code runs on a CPU with a tiny model. No figure is judged."""

from __future__ import annotations

import pytest

from tests.benchmarks.gpu_generation import (
    SMALL,
    against_transformers,
    agreement,
    cached_prefix,
    decoding,
    graphs,
    long_prompt,
)

TINY = {**SMALL, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def test_decoding_is_counted():
    """Rows times steps over their time, and a share of the bandwidth that copies have."""
    measured, _, figures = decoding("cpu", TINY, rows=3, prompt=20, steps=4, copied_bytes=1 << 16, kv_cache_mb=8)
    assert measured.count("tokens/s") == 1
    assert min(figures.values()) > 0


def test_graphs_are_compared_with_none():
    """A ratio for each number of rows; on a CPU both sides are the same steps."""
    _, _, figures = graphs("cpu", TINY, rows=(1, 2), prompt=20, steps=4, copied_bytes=1 << 16, kv_cache_mb=8)
    assert set(figures) == {"ratio_1", "ratio_2"}


def test_equal_tokens_are_accepted():
    """The validator's figure is that of all tokens of all prompts."""
    measured, is_enough, figures = agreement("cpu", TINY, prompts=4, tokens=24, kv_cache_mb=8)
    assert (measured, is_enough) == ("100.00% of 96 tokens", True)
    assert figures == {"agreement": 1.0}


@pytest.mark.parametrize("is_continuous", [False, True])
def test_engine_is_compared_with_transformers(is_continuous):
    """A ratio of tokens per second."""
    _, _, figures = against_transformers(
        "cpu", TINY, 0, is_continuous=is_continuous, requests=4, rows=2, rounds=1, kv_cache_mb=8
    )
    assert set(figures) == {"ratio", "tokens_per_s", "tokens_per_s_peer"}
    assert min(figures.values()) > 0


def test_cached_prefix_is_compared_with_none():
    """Both times, and their ratio."""
    _, _, figures = cached_prefix("cpu", TINY, 0, rounds=1, kv_cache_mb=8)
    assert set(figures) == {"ratio", "cached_ms", "ms"}


def test_longest_step_is_compared():
    """Of streams beside a prompt, against the median of those alone."""
    _, is_enough, figures = long_prompt("cpu", TINY, 1e9, prompt=200, rounds=1, kv_cache_mb=16)
    assert is_enough
    assert figures["ratio"] > 0
