"""How many pages an engine has: from megabytes, or from a share of a GPU's memory beside a measured peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.registry.errors import ConfigurationError
from penstock.workers.generation import CacheConfig, Config, SchedulerConfig
from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.model import wrap_decoder
from penstock.workers.generation.pool_size import largest_step, pages_beside
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import open_engine

GIB = 1 << 30
PAGE = 1 << 20


@pytest.mark.parametrize("share", [0.5, 0.85, 0.9, 1.0])
@pytest.mark.parametrize("peak", [2 * GIB, 17 * GIB])
def test_pages_fill_the_share_and_no_more(share, peak):
    """Peak and pages together are within one page of it."""
    pages = pages_beside(80 * GIB, share, peak, PAGE)
    assert 80 * GIB * share - PAGE < peak + pages * PAGE <= 80 * GIB * share


def test_no_room_is_refused_with_the_least_share():
    """The share that the message names is enough."""
    with pytest.raises(ConfigurationError, match=r"hbm_utilization: found 0\.2, expected at least 0\.251: weights and"):
        pages_beside(80 * GIB, 0.2, 20 * GIB, PAGE)
    assert pages_beside(80 * GIB, 0.251, 20 * GIB, PAGE) >= 2
    for peak in (None, 80 * GIB):
        with pytest.raises(ConfigurationError, match="expected smaller max_num_batched_tokens, max_num_seqs or max_mo"):
            pages_beside(80 * GIB, 0.9, peak, PAGE)


@pytest.mark.parametrize(
    ("seats", "budget", "positions", "sizes"),
    [
        (4, 64, 1000, [61, 1, 1, 1]),
        (4, 64, 32, [32, 1, 1, 1]),
        (3, 3, 1000, [1, 1, 1]),
        (1, 64, 1000, [64]),
    ],
)
def test_largest_step_has_all_seats_and_tokens(seats, budget, positions, sizes):
    """At the end of the longest texts, where most keys are read."""
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget, max_long_prefill_tokens=1)
    chunks = largest_step(config, positions, 16)
    assert [chunk.num_tokens for chunk in chunks] == sizes
    assert {chunk.start + chunk.num_tokens for chunk in chunks} == {positions}
    assert all(chunk.samples for chunk in chunks)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Llama 4 with chunks"])
def test_largest_step_runs_over_one_page(name):
    """It is computed before there is a pool: a row of logits for each seat."""
    loaded = wrap_decoder(decoder(name), None, None)
    config = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=40)
    batch = loaded.batch(largest_step(config, loaded.max_positions, 16), 16)
    logits, calls = loaded.forward(batch, KeyValuePools(2, 16))
    assert logits.shape == (5, loaded.vocab_size)
    assert batch.input_ids.shape == (1, 40)
    assert torch.isfinite(logits).all()
    assert sorted(calls) == list(range(len(loaded.rules)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hbm_utilization": 0.9}, "hbm_utilization: found 0.9 on a CPU, expected kv_cache_mb in its place"),
        ({"hbm_utilization": 0.9, "kv_cache_mb": 4}, "Found kv_cache_mb and hbm_utilization, expected one of both"),
        ({"hbm_utilization": 0.0, "device": "cuda"}, "hbm_utilization: found 0.0, expected a number above 0 and at"),
        ({"hbm_utilization": 1.5, "device": "cuda"}, "hbm_utilization: found 1.5, expected a number above 0 and at"),
        ({"device": "gpu"}, "device: found gpu, expected cpu, cuda or cuda:N"),
        ({"attention": "flash"}, "attention: found flash, expected one of: auto, sdpa, triton"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], expected: str):
    """Before a model is loaded."""
    with pytest.raises(ConfigurationError) as refusal:
        Config.from_options(options)
    assert expected.replace("found gpu", "found 'gpu'").replace("found flash", "found 'flash'") in str(refusal.value)


def test_a_share_is_for_a_gpu():
    """A configuration for one is accepted without one being here."""
    config = Config.from_options({"device": "cuda:1", "hbm_utilization": 0.7})
    assert config.cache == CacheConfig(hbm_utilization=0.7)
    assert config.device == "cuda:1"


def test_cpu_has_256_megabytes():
    """Where nothing is said."""
    engine = open_engine(decoder("Llama"))
    assert 255e6 < engine.forwards.pools_nbytes <= 256e6


def test_missing_device_is_refused():
    """In one line, before the model is switched over."""
    with pytest.raises(ConfigurationError, match="Device 'cuda:99' cannot be used"):
        open_engine(decoder("Llama"), device="cuda:99")
