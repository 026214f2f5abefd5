"""Penalties, biases and forbidden tokens: the distribution of transformers' processors, in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import Engine
from penstock.workers.generation.sampler import sample
from penstock.workers.generation.sampling_row import SamplingRow
from penstock.workers.generation.token_history import TokenHistory
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import engine_with_pages, open_engine, prompts_of, token_ids, write_model

DRAWS = 4_000
VOCABULARY = 200
PROMPT, WRITTEN = [3, 5, 5, 7, 11, 13], [7, 17, 17, 17, 19, 3]


def history(tokens: list[int], num_prompt: int) -> TokenHistory:
    """Of these tokens."""
    found = TokenHistory()
    found.follow(tokens, num_prompt)
    return found


def logits_of(seed: int, spread: float = 2.0) -> torch.Tensor:
    """Random logits of one row."""
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def assert_drawn_as(expected: torch.Tensor, logits: torch.Tensor, **row: Any) -> None:
    """Chi-square of tokens at many positions against the softmax of the expected scores; excluded ones never come."""
    rows = [SamplingRow(seed=11, position=at, **row) for at in range(DRAWS)]
    tokens = torch.tensor([one.token for one in sample(logits.repeat(DRAWS, 1), rows)])
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    wanted = expected.softmax(-1).double() * DRAWS
    assert counts[wanted == 0].sum() == 0
    common = wanted >= 5
    scale = counts[common].sum() / wanted[common].sum()
    assert chisquare(counts[common].tolist(), (wanted[common] * scale).tolist()).pvalue > 1e-4


def test_repetition_penalty_is_that_of_the_processor():
    """Tokens of the prompt and of the output, positive logits divided, negative ones multiplied."""
    logits = logits_of(1)
    ids: Any = torch.tensor([PROMPT + WRITTEN])
    expected: Any = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[None].clone())
    params = SamplingParams(repetition_penalty=1.7)
    assert_drawn_as(expected[0], logits, params=params, history=history(PROMPT + WRITTEN, len(PROMPT)))


def test_presence_and_frequency_count_the_output_only():
    """The formula of the API: presence once, frequency for each time; the prompt does not count."""
    logits = logits_of(2)
    expected = logits.clone()
    for token, times in ((7, 1), (17, 3), (19, 1), (3, 1)):
        expected[token] -= 0.8 + 0.5 * times
    params = SamplingParams(presence_penalty=0.8, frequency_penalty=0.5)
    assert_drawn_as(expected, logits, params=params, history=history(PROMPT + WRITTEN, len(PROMPT)))


def test_biases_are_those_of_the_processor():
    """Added before the temperature."""
    logits = logits_of(3)
    biases = {4: 3.0, 9: -2.5, 150: 5.0}
    expected: Any = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])(
        torch.tensor([PROMPT]),
        logits[None].clone(),
    )
    assert_drawn_as(expected[0] / 0.7, logits, params=SamplingParams(logit_bias=biases, temperature=0.7))


def test_all_changes_of_many_rows_are_those_of_each_alone():
    """Rows with and without changes, together, turned around and alone."""
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3
    allowed = torch.ones(VOCABULARY, dtype=torch.bool)
    allowed[[1, 50, 90]] = False
    kinds: list[dict[str, Any]] = [
        {"params": SamplingParams(repetition_penalty=1.4, presence_penalty=1), "history": history(WRITTEN, 2)},
        {"params": SamplingParams(top_p=0.8)},
        {"params": SamplingParams(logit_bias={3: 9.0}), "barred": (5, 6)},
        {"params": SamplingParams(temperature=0, frequency_penalty=2), "history": history(PROMPT * 40, 1)},
        {"params": SamplingParams(), "forbidden": allowed},
    ]
    rows = [SamplingRow(seed=at, position=at + 3, **kinds[at % len(kinds)]) for at in range(9)]
    together = [one.token for one in sample(logits.clone(), rows)]
    turned = [one.token for one in sample(logits.flip(0), rows[::-1])][::-1]
    alone = [sample(logits[at : at + 1].clone(), rows[at : at + 1])[0].token for at in range(9)]
    assert together == turned == alone
    assert together[4] in (1, 50, 90)


def test_a_mask_does_not_hide_logits_that_are_not_finite():
    """NaN at a forbidden token fails the row; a row whose tokens are all forbidden has none."""
    logits = torch.zeros(2, 10)
    logits[0, 3] = float("nan")
    rows = [
        SamplingRow(SamplingParams(), 0, 0, barred=(3,)),
        SamplingRow(SamplingParams(), 0, 0, forbidden=torch.ones(10, dtype=torch.bool)),
    ]
    assert [one.token for one in sample(logits, rows)] == [None, None]


def test_a_history_grows_with_its_request():
    """Read in parts it is what it is at once."""
    tokens = [at * at % 97 for at in range(300)]
    parts = TokenHistory()
    for end in (1, 64, 65, 200, 300):
        parts.follow(tokens[:end], 50)
    whole = history(tokens, 50)
    assert parts.tokens.tolist() == whole.tokens.tolist() == list(dict.fromkeys(tokens))
    assert parts.counts.tolist() == [tokens[50:].count(token) for token in parts.tokens]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "repetition_penalty": 1.3},
        {"seed": 4, "presence_penalty": 1.5, "frequency_penalty": 0.5, "top_p": 0.9},
        {"seed": 5, "allowed_token_ids": [3, 4, 5, 6, 7], "logit_bias": {3: 2}},
    ],
    ids=str,
)
def test_requests_with_changes_write_the_same_in_any_company(options):
    """Alone, in a full batch, and in a pool so small that requests are preempted."""
    model = decoder("Llama")
    prompts = prompts_of(3, 17, 30, 9)
    params = SamplingParams(max_tokens=16, **options)
    roomy = open_engine(model, kv_cache_mb=8)
    alone = [token_ids(roomy.generate([prompt], params))[0] for prompt in prompts]
    assert token_ids(roomy.generate(prompts, params)) == alone
    tight = engine_with_pages(model, 14, 4, max_num_seqs=4, max_num_batched_tokens=24)
    assert token_ids(tight.generate(prompts, params)) == alone
    assert tight.stats().preemptions > 0
    if "allowed_token_ids" in options:
        assert {token for text in alone for token in text} <= {3, 4, 5, 6, 7}


def test_bad_words_are_barred_as_transformers_does(tmp_path):
    """The last token of a word, where the others stand before it: the tokens are those of `generate`."""
    folder = write_model(tmp_path)
    engine = Engine.from_pretrained(folder, kv_cache_mb=2, packed_linears="off")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), engine.decoder.tokenizer
    prompt = tokenizer("the stream of the river")["input_ids"]
    (free,) = token_ids(engine.generate([prompt], SamplingParams(temperature=0, max_tokens=16)))
    words = []
    for at in range(len(free) - 1):
        # Some tokens are parts of a character; a word is one whose own tokens are those of the text.
        word = tokenizer.decode(free[at : at + 1 + at % 2])
        if tokenizer(word)["input_ids"] == free[at : at + 1 + at % 2]:
            words.append(word)
    assert {len(tokenizer(word)["input_ids"]) for word in words} == {1, 2}
    (found,) = token_ids(engine.generate([prompt], SamplingParams(temperature=0, max_tokens=16, bad_words=words)))
    assert found != free
    barred = [tokenizer(text)["input_ids"] for word in words for text in (word, f" {word.lstrip()}")]
    options: Any = {"max_new_tokens": 16, "do_sample": False, "bad_words_ids": barred, "pad_token_id": 0}
    expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
    assert found == expected.tolist()
