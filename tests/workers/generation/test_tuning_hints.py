"""ES-060: each hint of the page "Generate text" on memory, speed and time has the direction that the page states."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import Config, Engine
from penstock.workers.generation.model import wrap_decoder
from tests.architecture.documents import written
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import open_engine, prompts_of, write_model

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def llama(**options: Any) -> Engine:
    return open_engine(decoder("Llama"), **{"kv_cache_mb": 4, "num_speculative_tokens": 0, **options})


def peak_pages_of_many(**options: Any) -> int:
    engine = llama(**options)
    engine.generate(prompts_of(*[9] * 8), PARAMS)
    return engine.stats().pages_peak


def peak_pages_of_the_longest(**options: Any) -> int:
    engine = llama(**options)
    engine.generate([prompts_of(9)[0]], SamplingParams(temperature=0, max_tokens=engine.most_tokens - 9))
    return engine.stats().pages_peak


def peak_tokens_with_room(**options: Any) -> int:
    """Tokens that the used pages have room for."""
    engine = llama(**options)
    engine.generate(prompts_of(*[9] * 8), PARAMS)
    return engine.stats().pages_peak * engine.pages.page_size


def bytes_of_pages(**options: Any) -> int:
    return llama(**options).forwards.pools_nbytes


def bytes_of_weights_and_a_page(tmp_path: Path, **options: Any) -> float:
    engine = Engine.from_pretrained(write_model(tmp_path), kv_cache_mb=1, packed_linears="off", **options)
    weights = sum(int(one.numel() * one.element_size()) for one in engine.decoder.model.parameters())
    return weights + engine.forwards.pools_nbytes / engine.pages.num_pages


def steps_of_many(**options: Any) -> int:
    engine = llama(**options)
    engine.generate(prompts_of(*[9] * 8), PARAMS)
    return engine.stats().steps


def steps_of_a_long_prompt(**options: Any) -> int:
    engine = llama(**options)
    engine.generate(prompts_of(200), SamplingParams(max_tokens=1))
    return engine.stats().steps


def computed_of_equal_beginnings(**options: Any) -> int:
    engine = llama(**options)
    (beginning,) = prompts_of(100)
    for end in range(3):
        engine.generate([[*beginning, end]], PARAMS)
    return engine.stats().prompt_tokens_computed


def steps_of_a_text_that_repeats_itself(**options: Any) -> int:
    engine = llama(**options)
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60, allowed_token_ids=[5]))
    return engine.stats().steps


def tokens_in_time(timeout_s: float) -> int:
    """By a clock of steps."""
    steps: list[int] = []
    config = Config.from_options({"kv_cache_mb": 2, "packed_linears": "off"})
    engine = Engine(wrap_decoder(decoder("Llama"), None, None), config, clock=lambda: float(len(steps)))
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, timeout_s=timeout_s)
    engine.add_request("late", [1, 2, 3], params)
    while engine.has_unfinished_requests:
        found = engine.step()
        steps.append(1)
    return len(found[0].outputs[0].token_ids)


def steps_to_the_first_token(priority: Any) -> int:
    engine = llama(max_num_seqs=2)
    for number, prompt in enumerate(prompts_of(*[9] * 6)):
        engine.add_request(str(number), prompt, PARAMS)
    engine.step()
    engine.add_request("mine", [1, 2, 3], PARAMS, priority=priority)
    for steps in range(1, 200):
        if any(output.request_id == "mine" for output in engine.step()):
            return steps
    raise AssertionError("no token")


def largest_step_beside_a_stream(**options: Any) -> int:
    engine = llama(**options)
    engine.add_request("stream", [1, 2, 3], PARAMS)
    engine.step()
    engine.add_request("long", prompts_of(200)[0], SamplingParams(max_tokens=1))
    largest, before = 0, engine.stats()
    for _ in range(15):
        engine.step()
        after = engine.stats()
        largest = max(largest, after.prompt_tokens_computed - before.prompt_tokens_computed)
        before = after
    return largest


HINTS: dict[str, tuple[Callable[..., float], dict[str, Any], dict[str, Any]]] = {
    "a smaller `kv_cache_mb`, on a GPU `hbm_utilization`": (bytes_of_pages, {"kv_cache_mb": 4}, {"kv_cache_mb": 1}),
    "a smaller `max_num_seqs`": (peak_pages_of_many, {"max_num_seqs": 8}, {"max_num_seqs": 2}),
    "a smaller `max_model_len`": (peak_pages_of_the_longest, {"max_model_len": 200}, {"max_model_len": 50}),
    "a smaller `page_size`": (peak_tokens_with_room, {"page_size": 64}, {"page_size": 8}),
    "a larger `max_num_seqs`": (steps_of_many, {"max_num_seqs": 2}, {"max_num_seqs": 8}),
    "a larger `max_num_batched_tokens`": (
        steps_of_a_long_prompt,
        {"max_num_batched_tokens": 32},
        {"max_num_batched_tokens": 128},
    ),
    "`enable_prefix_caching`": (
        computed_of_equal_beginnings,
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": True},
    ),
    "a larger `num_speculative_tokens`": (
        steps_of_a_text_that_repeats_itself,
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 3},
    ),
    "a more urgent `priority`": (steps_to_the_first_token, {"priority": "normal"}, {"priority": "critical"}),
    "a smaller `max_long_prefill_tokens`": (
        largest_step_beside_a_stream,
        {"max_long_prefill_tokens": 64},
        {"max_long_prefill_tokens": 16},
    ),
}
"""Hint -> what is counted, the options before, the options after. The number is smaller after."""
OTHERS = ("`precision: bf16`", "a larger `timeout_s`")


@pytest.mark.parametrize("hint", sorted(HINTS))
def test_hint_has_its_direction(hint: str):
    """Counts of pages, bytes, tokens and steps."""
    count, before, after = HINTS[hint]
    assert count(**after) < count(**before)


def test_bf16_takes_half_of_the_memory(tmp_path: Path):
    """Of weights and of each page."""
    whole = bytes_of_weights_and_a_page(tmp_path / "fp32")
    assert bytes_of_weights_and_a_page(tmp_path / "bf16", precision="bf16") == whole / 2


def test_more_time_makes_a_text_longer():
    """It ends as it is when its time has passed."""
    assert tokens_in_time(5.0) < tokens_in_time(20.0) < 100


def test_page_names_these_hints():
    """Each one that is tested, and no other."""
    page = written()["docs/how-to/generate.md"].text
    table = page.partition("| hint | effect | price |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| (.+?) \| ", table, re.M)[1:]) == sorted([*HINTS, *OTHERS])
