"""Generation: tokens per CPU second of the engine, against `generate` of transformers in padded static batches.

    32 requests, prompts of 16 to 256 tokens, outputs of mixed lengths, greedy, fp32, one thread, 5M parameters

The static batches have 8 rows in the order of arrival, because nobody knows the length of an output beforehand: each
batch runs until its longest output, and what is beyond a row's own length does not count. Outputs are compared token by
token.
"""

from __future__ import annotations

import random
import time
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.workers.generation import Engine, SamplingParams
from tests.benchmarks import generation_steps
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["decoder", "measure", "workload"]

_REQUESTS: Final = 32
_ROWS: Final = 8
_VOCABULARY: Final = 4_096


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_against_static(scale, say), *generation_steps.measure(scale, say)]
    finally:
        torch.set_num_threads(before)


def _against_static(scale: Scale, say: Progress) -> Row:
    work = workload()
    static = decoder()
    engine = Engine.from_model(decoder(), max_num_seqs=_REQUESTS, kv_cache_mb=128, enable_prefix_caching=False)
    say(f"generation: {engine.packing.packed} of {engine.packing.layers} linear layers are packed")
    turns = []
    for _ in range(scale.rounds):
        ours_s, ours = _timed(lambda: _ours(engine, work))
        static_s, theirs = _timed(lambda: _static(static, work))
        if ours != theirs:
            raise ValueError("Wrong answers: the engine's tokens are not those of generate")
        number = sum(map(len, ours))
        turns.append((number / ours_s, number / static_s))
        say(f"generation: {turns[-1][0]:,.0f} against {turns[-1][1]:,.0f} tokens per CPU second")
    ratio = median(ours / theirs for ours, theirs in turns)
    rates = [median(turn[at] for turn in turns) for at in (0, 1)]
    return Row(
        f"generation, 5M parameters, {_REQUESTS} requests: tokens per CPU second against static batches of `generate`",
        f"{rates[0]:,.0f} against {rates[1]:,.0f}: {ratio:.2f}x",
        ">= 2.2x",
        ">= 3x",
        verdict(required=ratio >= 2.2, aim=ratio >= 3),
        {"ratio": ratio, "tokens_per_cpu_s": rates[0], "tokens_per_cpu_s_static": rates[1]},
    )


def decoder() -> Any:
    """A Llama of 5M parameters with random weights, fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1_024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def workload() -> list[tuple[list[int], int]]:
    """(Prompt, tokens to write) of each request."""
    chosen = random.Random(0)
    return [
        ([chosen.randrange(1, _VOCABULARY) for _ in range(chosen.randrange(16, 257))], chosen.randrange(16, 161))
        for _ in range(_REQUESTS)
    ]


def _timed(run: Any) -> tuple[float, list[list[int]]]:
    begun = time.process_time()
    written = run()
    return time.process_time() - begun, written


def _ours(engine: Engine, work: list[tuple[list[int], int]]) -> list[list[int]]:
    written: dict[str, list[int]] = {}
    names = [engine.add_request(None, prompt, SamplingParams(max_tokens=most, temperature=0)) for prompt, most in work]
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                written[output.request_id] = list(output.outputs[0].token_ids)
    return [written[name] for name in names]


def _static(model: Any, work: list[tuple[list[int], int]]) -> list[list[int]]:
    """Left-padded batches; each runs until its longest output, and the others are cut."""
    written: list[list[int]] = [[]] * len(work)
    for start in range(0, len(work), _ROWS):
        batch = range(start, min(start + _ROWS, len(work)))
        width = max(len(work[at][0]) for at in batch)
        ids = torch.tensor([[0] * (width - len(work[at][0])) + work[at][0] for at in batch])
        mask = torch.tensor([[0] * (width - len(work[at][0])) + [1] * len(work[at][0]) for at in batch])
        most = max(work[at][1] for at in batch)
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)
        for at, row in zip(batch, found[:, width:].tolist(), strict=True):
            written[at] = row[: work[at][1]]
    return written
