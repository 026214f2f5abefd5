"""Random requests of all kinds beside each other: each writes what it writes alone, and no page is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.workers.generation import Engine
from tests.workers.generation.engines import byte_tokenizer, open_engine
from tests.workers.generation.test_structure import PERSON, model_for

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"n": 3},
    {"n": 1, "best_of": 2, "top_p": 0.9},
    {"json_schema": PERSON},
    {"choice": ["ja", "nein"], "n": 2},
    {"presence_penalty": 1, "logit_bias": {"20": 4}},
    {"prompt_logprobs": 1, "min_p": 0.05},
    {"stop": ["e"], "temperature": 0.8},
]


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """A roomy one, and one whose requests take each other's pages."""
    tokenizer = byte_tokenizer()
    tight = {"page_size": 4, "kv_cache_mb": 0.06, "max_num_seqs": 6, "max_num_batched_tokens": 24, "ageing_steps": 9}
    model = model_for(tokenizer)
    return (
        open_engine(model, tokenizer, kv_cache_mb=8, enable_prefix_caching=False, num_speculative_tokens=0),
        open_engine(model, tokenizer, **tight),
    )


def assert_pages(engine: Engine) -> None:
    """Each page in use is that of a request that runs, as often as it says; no other page is."""
    users = Counter(page for each in engine.scheduler.running for page in each.pages)
    assert engine.pages.num_used == len(users)
    assert all(engine.pages.users(page) == users[page] for page in range(1, engine.pages.num_pages))
    assert all(not each.pages for each in engine.scheduler.waiting)


def run(engines: tuple[Engine, Engine], seed: int, kinds: Sequence[dict[str, Any]] = KINDS) -> None:
    """Requests come and are aborted at random, then all that are left end."""
    roomy, tight = engines
    chosen = random.Random(seed)
    asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
    ended: dict[str, Any] = {}
    shared = [chosen.randrange(1, 250) for _ in range(12)] * 2
    for turn in range(14):
        if chosen.random() < 0.5:
            prompt = [*shared[: chosen.randrange(24)], *(chosen.randrange(1, 250) for _ in range(1, 6))]
            options = {"seed": turn, "max_tokens": chosen.randrange(1, 40), **chosen.choice(kinds)}
            name = f"{seed}-{turn}"
            tight.add_request(name, prompt, options, priority=chosen.choice(["critical", "high", "normal", "low"]))
            asked[name] = prompt, options
        if asked and chosen.random() < 0.15:
            tight.abort(chosen.choice(list(asked)))
        ended |= {output.request_id: output for output in tight.step() if output.finished}
        assert_pages(tight)
    while tight.has_unfinished_requests:
        ended |= {output.request_id: output for output in tight.step() if output.finished}
        assert_pages(tight)
    assert ended.keys() == asked.keys()
    assert tight.stats().pages_used == 0
    for name, (prompt, options) in asked.items():
        if not any(each.finish_reason == "abort" for each in ended[name].outputs):
            (alone,) = roomy.generate([prompt], options)
            assert [each.token_ids for each in ended[name].outputs] == [each.token_ids for each in alone.outputs]
            assert [each.text for each in ended[name].outputs] == [each.text for each in alone.outputs]


def test_random_requests_write_what_they_write_alone(engines):
    """A few schedules, with guesses, several texts, forms, priorities and aborts."""
    for seed in range(3):
        run(engines, seed)


@pytest.mark.slow
def test_many_random_requests_write_what_they_write_alone(engines):
    """The same, more often; pages were taken from requests, and guesses were right."""
    for seed in range(100, 140):
        run(engines, seed)
    stats = engines[1].stats()
    assert stats.preemptions > 10
    assert stats.draft_tokens_accepted > 0
