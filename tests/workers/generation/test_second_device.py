"""The engine on a device that is not the CPU: the same tokens, nothing left behind, and few copies in a step.

The device is that of `second_device`. No GPU takes part, so nothing here is shown of CUDA itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.config import Config
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.model import load_decoder, wrap_decoder
from penstock.workers.generation.sampler import sample
from penstock.workers.generation.sampling_row import SamplingRow
from tests.workers.generation.architectures import ARCHITECTURES, decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of, token_ids, write_model
from tests.workers.generation.second_device import OnDevice, SecondDevice, copies

QUICK = {"Llama", "GPT-OSS"}
PROMPTS = prompts_of(3, 17, 40)
OPTIONS: dict[str, Any] = {
    "kv_cache_mb": 4,
    "page_size": 4,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 3,
    "num_speculative_tokens": 0,
    "async_scheduling": "off",
}
DRAWN = {"max_tokens": 12, "temperature": 1.0, "seed": 7}
SETTINGS: dict[str, dict[str, Any]] = {
    "free": DRAWN,
    "filtered": {**DRAWN, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "penalties": {**DRAWN, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "biases": {**DRAWN, "logit_bias": {3: 4.0, 5: -100.0}, "min_tokens": 4, "stop_token_ids": [9]},
    "some tokens": {**DRAWN, "allowed_token_ids": [*range(10, 60)]},
    "log probabilities": {**DRAWN, "logprobs": 3, "prompt_logprobs": 2},
    "greedy with guesses": {"max_tokens": 12, "temperature": 0},
}


def on_second_device(model: Any, **options: Any) -> Engine:
    """An engine there. Only inside of `copies`."""
    config = Config.from_options({**OPTIONS, "packed_linears": "off", "attention": "sdpa", **options})
    return Engine(wrap_decoder(model, None, None, SecondDevice()), config)


def steps_of(engine: Engine, params: Any, counted: Any) -> tuple[list[list[int]], set[tuple[int, int]]]:
    """Tokens of the prompts, and the numbers of copies to and from the device that steps took."""
    names = [engine.add_request(None, prompt, params) for prompt in PROMPTS]
    written: dict[str, list[int]] = {}
    numbers = set()
    while engine.has_unfinished_requests:
        before = counted.to_device, counted.to_host
        for output in engine.step():
            written[output.request_id] = list(output.outputs[0].token_ids)
        numbers.add((counted.to_device - before[0], counted.to_host - before[1]))
    return [written[name] for name in names], numbers


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_greedy_steps_copy_once_each_way(name):
    """The plan goes to the device in one copy, the tokens come back in one, and are those of the CPU.

    A layer that makes a tensor of its own on the CPU, or an operator that reads a value, would be counted or fail.
    """
    expected = token_ids(open_engine(decoder(name), **OPTIONS).generate(PROMPTS, GREEDY))
    with copies() as counted:
        engine = on_second_device(decoder(name))
        written, numbers = steps_of(engine, GREEDY, counted)
    assert written == expected
    assert numbers == {(1, 1)}
    assert all(isinstance(one, OnDevice) for one in engine.decoder.model.parameters())


def test_launched_steps_copy_no_more():
    """Ids that are on the device stay there. What a step copies back is read in the next one.

    A prompt's step reads its own tokens and those of the launched step before it. Requests that have ended change the
    places of the others, which is a copy more.
    """
    expected = token_ids(open_engine(decoder("Llama"), **OPTIONS).generate(PROMPTS, GREEDY))
    with copies() as counted:
        engine = on_second_device(decoder("Llama"), async_scheduling="on")
        written, numbers = steps_of(engine, GREEDY, counted)
    assert written == expected
    assert numbers <= {(1, 0), (1, 1), (2, 1), (1, 2), (0, 1)}
    assert {(1, 0), (1, 1), (0, 1)} <= numbers


@pytest.mark.parametrize("async_scheduling", ["on", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_samples_on_the_device(setting, async_scheduling):
    """Tokens and log probabilities are those of the CPU."""
    params = SamplingParams(**SETTINGS[setting])
    options = {"num_speculative_tokens": 3} if setting == "greedy with guesses" else {}
    here = open_engine(decoder("Llama"), **{**OPTIONS, **options}).generate(PROMPTS, params)
    with copies():
        engine = on_second_device(decoder("Llama"), **{**options, "async_scheduling": async_scheduling})
        there = engine.generate(PROMPTS, params)
    assert token_ids(there) == token_ids(here)
    for output, other in zip(there, here, strict=True):
        assert _numbers(output.prompt_logprobs) == pytest.approx(_numbers(other.prompt_logprobs), abs=1e-4)
        own, others = output.outputs[0].logprobs, other.outputs[0].logprobs
        assert _numbers(own) == pytest.approx(_numbers(others), abs=1e-4)


def _numbers(logprobs: Any) -> list[float]:
    return [value for at in logprobs or [] for _, value in sorted((at or {}).items())]


@pytest.mark.parametrize("setting", ["free", "filtered"])
def test_drawn_steps_copy_their_settings_once(setting):
    """One copy more than greedy ones, for all rows together."""
    with copies() as counted:
        _, numbers = steps_of(on_second_device(decoder("Llama")), SamplingParams(**SETTINGS[setting]), counted)
    assert numbers == {(2, 1)}


def test_rows_that_are_not_decided_are_read_again():
    """Flat logits of more than 256 tokens: the rows that the most probable ones do not decide come in a second copy."""
    with copies() as counted:
        logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(3)) * 0.1
        expected = _sampled(logits.clone())
        before = counted.to_host
        assert _sampled(logits.to(SecondDevice().device)) == expected
        assert counted.to_host - before == 2


def _sampled(logits: torch.Tensor) -> list[int | None]:
    params = SamplingParams(temperature=1.5, top_p=0.99)
    return [one.token for one in sample(logits, [SamplingRow(params, at, 5) for at in range(len(logits))])]


def test_folder_is_loaded_onto_the_device(tmp_path):
    """A structured text, whose masks are made on the host, is the same."""
    folder = write_model(tmp_path)
    params = SamplingParams(choice=("one", "two", "three"), temperature=1.0, seed=3, max_tokens=8)
    expected = Engine.from_pretrained(folder, kv_cache_mb=4, packed_linears="off").generate("the ", params)
    with copies():
        loaded = load_decoder(folder, "fp32", None, SecondDevice())
        config = Config.from_options({**OPTIONS, "attention": "sdpa"})
        assert token_ids(Engine(loaded, config).generate("the ", params)) == token_ids(expected)
        assert all(isinstance(one, OnDevice) for one in loaded.model.parameters())


def test_a_tensor_of_the_cpu_is_noticed():
    """The control: the device refuses what a GPU refuses."""
    with copies():
        there = torch.ones(2).to(SecondDevice().device)
        with pytest.raises(RuntimeError, match="found tensors of two devices"):
            there + torch.ones(2)
