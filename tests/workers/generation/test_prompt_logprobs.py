"""Log probabilities of the prompt's tokens: those of one plain forward, however the prompt is computed."""

from __future__ import annotations

import pytest
import torch

from penstock.registry.sampling_params import SamplingParams
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import engine_with_pages, open_engine, prompts_of, token_ids


def expected(model, prompt: list[int]) -> list[float]:
    """Of each token from the second on."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    return [float(logprobs[at, token]) for at, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("budget", [5, 512])
def test_logprobs_are_those_of_a_forward(budget):
    """In chunks and at once, also where the prefix cache knows the prompt."""
    (prompt,) = prompts_of(23)
    wanted = expected(decoder("Llama"), prompt)
    options = {"page_size": 4, "kv_cache_mb": 2, "max_num_seqs": 4, "max_num_batched_tokens": budget}
    engine = open_engine(decoder("Llama"), **options)
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2)
    (plain,) = engine.generate([prompt], SamplingParams(max_tokens=4, temperature=0))
    assert plain.prompt_logprobs is None
    (output,) = engine.generate([prompt], params)
    found = output.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert [each[token] for each, token in zip(found[1:], prompt[1:], strict=True) if each] == pytest.approx(
        wanted, abs=1e-4
    )
    assert all(each is None or len(each) in (2, 3) for each in found)
    assert token_ids([output]) == token_ids([plain])


def test_a_preempted_prompt_has_each_logprob_once():
    """What was computed before is computed again, and told once."""
    prompts = prompts_of(3, 17, 30, 9)
    wanted = [expected(decoder("Llama"), prompt) for prompt in prompts]
    tight = engine_with_pages(decoder("Llama"), 14, 4, max_num_seqs=4, max_num_batched_tokens=24)
    outputs = tight.generate(prompts, SamplingParams(max_tokens=16, temperature=0, prompt_logprobs=0))
    assert tight.stats().preemptions > 0
    for output, prompt, each in zip(outputs, prompts, wanted, strict=True):
        found = [one[token] for one, token in zip((output.prompt_logprobs or ())[1:], prompt[1:], strict=True) if one]
        assert found == pytest.approx(each, abs=1e-4)
