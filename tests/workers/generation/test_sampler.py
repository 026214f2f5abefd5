"""Sampling: the distribution of transformers' processors, and the same token for the same seed in any company."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.noise import gumbel, hash64, row_key
from penstock.workers.generation.sampler import sample
from penstock.workers.generation.sampling_row import SamplingRow
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import engine_with_pages, open_engine, prompts_of, token_ids

DRAWS = 4_000
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 300, "top_p": 0.95},
]


def processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities (V,) that transformers' processors leave."""
    ids: Any = torch.zeros(1, 1, dtype=torch.long)
    scores: Any = TemperatureLogitsWarper(params.temperature)(ids, logits[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    probabilities: torch.Tensor = scores[0].softmax(-1)
    return probabilities


def drawn(logits: torch.Tensor, params: SamplingParams, number: int = DRAWS) -> list[int]:
    """Tokens of so many positions with these logits."""
    rows = [SamplingRow(params, seed=11, position=at) for at in range(number)]
    found = sample(logits.repeat(number, 1), rows)
    return [one.token for one in found if one.token is not None]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "spread", [pytest.param(0.4, id="flat", marks=pytest.mark.slow), pytest.param(3.0, id="peaked")]
)
def test_distribution_is_that_of_the_processors(setting, spread):
    """Chi-square over the tokens that can be expected five times; nothing else than what is left is drawn.

    Flat logits are not decided by the 256 most probable tokens, peaked ones are.
    """
    params = SamplingParams(**setting)
    logits = torch.randn(600, generator=torch.Generator().manual_seed(3)) * spread
    expected = processed(logits, params) * DRAWS
    counts = torch.bincount(torch.tensor(drawn(logits, params)), minlength=600).double()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    rest = [float(each[~common].sum()) for each in (counts, expected)]
    observed, wanted = counts[common].tolist(), expected[common].double().tolist()
    if rest[1] >= 5:
        observed, wanted = [*observed, rest[0]], [*wanted, rest[1]]
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [each * scale for each in wanted]).pvalue > 1e-4


def test_a_wrong_temperature_is_seen():
    """The comparison fails for another distribution."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    expected = processed(logits, SamplingParams(temperature=1.2)) * DRAWS
    counts = torch.bincount(torch.tensor(drawn(logits, SamplingParams(temperature=1.0))), minlength=50).double()
    common = expected >= 5
    wanted = expected[common].double()
    wanted *= counts[common].sum() / wanted.sum()
    assert chisquare(counts[common].tolist(), wanted.tolist()).pvalue < 1e-6


def test_a_row_is_drawn_alike_alone_and_in_any_batch():
    """Seed and position decide, not the neighbours and not the place in the batch."""
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(5))
    rows = [SamplingRow(SamplingParams(**SETTINGS[at % len(SETTINGS)]), seed=at, position=at + 3) for at in range(12)]
    together = [one.token for one in sample(logits.clone(), rows)]
    alone = [sample(logits[at : at + 1].clone(), rows[at : at + 1])[0].token for at in range(12)]
    turned = [one.token for one in sample(logits.flip(0), rows[::-1])][::-1]
    assert together == alone == turned


def test_noise_is_the_hash_of_seed_position_and_token():
    """The tensor operations compute what plain integers do."""
    seeds, positions = [0, 1, 2**64 - 1, 2**63], [0, 7, 100_000, 3]
    tokens = torch.tensor([[0, 1, 31_999], [5, 6, 7], [127_999, 2, 3], [9, 8, 7]])
    keys = torch.tensor([row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)])
    found = gumbel(keys, tokens)
    for row in range(4):
        for column in range(3):
            bits = hash64(seeds[row], positions[row], int(tokens[row, column]))
            uniform = ((bits >> 11) + 0.5) * 2.0**-53
            assert float(found[row, column]) == pytest.approx(-math.log(-math.log(uniform)), abs=1e-12)


def test_hashes_differ_in_each_argument():
    """No two of neighbouring seeds, positions and tokens are alike."""
    found = {hash64(seed, position, token) for seed in range(20) for position in range(20) for token in range(20)}
    assert len(found) == 8_000


def test_rows_that_are_not_finite_have_no_token():
    """NaN and infinity are told, and the other rows are not touched."""
    logits = torch.zeros(4, 10)
    logits[0, 3], logits[1, 2], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, 7] = 5
    rows = [SamplingRow(SamplingParams(temperature=0), seed=0, position=0)] * 4
    assert [one.token for one in sample(logits, rows)] == [None, None, None, 7]


def test_barred_tokens_are_not_chosen():
    """The next most probable one is."""
    logits = torch.arange(10.0)[None]
    (found,) = sample(logits, [SamplingRow(SamplingParams(temperature=0), seed=0, position=0, barred=(9, 8))])
    assert found.token == 7


def test_logprobs_are_those_of_the_logits():
    """The chosen token and the most probable ones, before temperature."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=2.0)
    (found,) = sample(logits.clone(), [SamplingRow(params, seed=4, position=0, logprobs=3)])
    assert found.logprobs is not None
    expected = logits[0].log_softmax(-1)
    assert set(found.logprobs) == {found.token, *expected.topk(3).indices.tolist()}
    assert all(value == pytest.approx(float(expected[token]), abs=1e-6) for token, value in found.logprobs.items())


def test_seeded_requests_write_the_same_in_any_company():
    """Alone, in a full batch, and in a pool so small that requests are preempted."""
    model = decoder("Llama")
    prompts = prompts_of(3, 17, 30, 9)
    params = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, seed=42)
    roomy = open_engine(model, kv_cache_mb=8)
    alone = [token_ids(roomy.generate([prompt], params))[0] for prompt in prompts]
    assert token_ids(roomy.generate(prompts, params)) == alone
    tight = engine_with_pages(model, 14, 4, max_num_seqs=4, max_num_batched_tokens=24)
    assert token_ids(tight.generate(prompts, params)) == alone
    assert tight.stats().preemptions > 0


def test_other_seeds_write_other_texts():
    """Without a seed, each request draws its own."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=8)
    params = SamplingParams(max_tokens=16, temperature=1.0)
    texts = token_ids(engine.generate(prompts_of(9) * 6, params))
    assert len({tuple(text) for text in texts}) == 6
