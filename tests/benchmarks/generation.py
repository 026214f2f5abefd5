"""Generation: tokens per CPU second of the engine, against transformers: static batches, and its continuous batching.

     5M parameters: 32 requests, prompts of 16 to 256 tokens, outputs of 16 to 160
    97M parameters: 16 requests of the same kind, and one round less
    greedy, fp32, one thread

The static batches have 8 rows in the order of arrival, because nobody knows the length of an output beforehand: each
batch runs until its longest output, and what is beyond a row's own length does not count. Continuous batching has pages
of 16 tokens, as the engine has, and a step of as many tokens. The three take turns, and their outputs are compared
token by token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from penstock.workers.generation import Engine, SamplingParams
from tests.benchmarks import generation_steps
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["decoder", "in_continuous_batches", "in_static_batches", "measure", "workload", "written_by"]

_REQUESTS: Final = 32
_ROWS: Final = 8
_VOCABULARY: Final = 4_096
_PAGE: Final = 16
_PAGE_OPTION: Final = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
"""Transformers 5.17 has the older name."""
_STEP: Final = 512
_WAIT_S: Final = 300.0

Work = list[tuple[list[int], int]]
"""(Prompt, tokens to write) of each request."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A size of model, its requests, and what is required and aimed at against static and continuous batches."""

    size: str
    shape: Mapping[str, int]
    requests: int
    rounds_less: int
    static: tuple[float, float]
    continuous: tuple[float, float]


_SMALL: Final[Mapping[str, int]] = {}
_LARGE: Final = {
    "hidden_size": 768,
    "intermediate_size": 2_048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
}
_CASES: Final = (
    _Case("5M", _SMALL, _REQUESTS, 0, (2.2, 3), (3, 4)),
    _Case("97M", _LARGE, 16, 1, (2.2, 3), (2, 4)),
)


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for case in _CASES for row in _against_transformers(case, scale, say)]
        return [*rows, *generation_steps.measure(scale, say)]
    finally:
        torch.set_num_threads(before)


def _against_transformers(case: _Case, scale: Scale, say: Progress) -> list[Row]:
    work = workload(case.requests)
    static, continuous = decoder(**case.shape), decoder(**case.shape)
    engine = Engine.from_model(
        decoder(**case.shape),
        max_num_seqs=case.requests,
        kv_cache_mb=256,
        page_size=_PAGE,
        max_num_batched_tokens=_STEP,
        enable_prefix_caching=False,
    )
    while engine.packing.pack_next():
        pass
    say(f"generation, {case.size}: {engine.packing.packed} of {engine.packing.layers} linear layers are packed")
    turns = []
    for _ in range(max(1, scale.rounds - case.rounds_less)):
        timed = [
            _timed(run)
            for run in (
                lambda: written_by(engine, work),
                lambda: in_static_batches(static, work),
                lambda: in_continuous_batches(continuous, work),
            )
        ]
        expected = timed[1][1]
        if any(written != expected for _, written in timed):
            raise ValueError("Wrong answers: the tokens are not those of generate")
        number = sum(map(len, expected))
        turns.append([number / seconds for seconds, _ in timed])
        shown = ", ".join(f"{rate:,.0f}" for rate in turns[-1])
        say(f"generation, {case.size}: engine, static, continuous: {shown} tokens per CPU second")
    return [
        _row(case, turns, at, name, *bounds)
        for at, (name, bounds) in enumerate(
            (("static batches of `generate`", case.static), ("transformers' continuous batching", case.continuous)), 1
        )
    ]


def _row(case: _Case, turns: list[list[float]], at: int, peer: str, required: float, aim: float) -> Row:
    ratio = median(turn[0] / turn[at] for turn in turns)
    rates = [median(turn[column] for turn in turns) for column in (0, at)]
    return Row(
        f"generation, {case.size} parameters, {case.requests} requests: tokens per CPU second against {peer}",
        f"{rates[0]:,.0f} against {rates[1]:,.0f}: {ratio:.2f}x",
        f">= {required:g}x",
        f">= {aim:g}x",
        verdict(required=ratio >= required, aim=ratio >= aim),
        {"ratio": ratio, "tokens_per_cpu_s": rates[0], "tokens_per_cpu_s_peer": rates[1]},
    )


_SHAPE: Final[Mapping[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def decoder(**shape: Any) -> Any:
    """A Llama with random weights, fp32; of 5M parameters unless the shape says otherwise."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        max_position_embeddings=1_024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **{**_SHAPE, **shape},
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def workload(requests: int = _REQUESTS) -> Work:
    """So many requests."""
    chosen = random.Random(0)
    return [
        (
            [chosen.randrange(1, _VOCABULARY) for _ in range(chosen.randrange(16, 257))],
            chosen.randrange(16, 161),
        )
        for _ in range(requests)
    ]


def _timed(run: Any) -> tuple[float, list[list[int]]]:
    begun = time.process_time()
    written = run()
    return time.process_time() - begun, written


def written_by(engine: Engine, work: Work) -> list[list[int]]:
    """The tokens of each request, all at once in the engine."""
    written: dict[str, list[int]] = {}
    names = [engine.add_request(None, prompt, SamplingParams(max_tokens=most, temperature=0)) for prompt, most in work]
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                written[output.request_id] = list(output.outputs[0].token_ids)
    return [written[name] for name in names]


def in_static_batches(model: Any, work: Work, rows: int = _ROWS) -> list[list[int]]:
    """Left-padded batches; each runs until its longest output, and the others are cut."""
    written: list[list[int]] = [[]] * len(work)
    for start in range(0, len(work), rows):
        batch = range(start, min(start + rows, len(work)))
        width = max(len(work[at][0]) for at in batch)
        ids = torch.tensor([[0] * (width - len(work[at][0])) + work[at][0] for at in batch])
        mask = torch.tensor([[0] * (width - len(work[at][0])) + [1] * len(work[at][0]) for at in batch])
        most = max(work[at][1] for at in batch)
        with torch.inference_mode():
            found = model.generate(
                ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=most, do_sample=False
            )
        for at, row in zip(batch, found[:, width:].tolist(), strict=True):
            written[at] = row[: work[at][1]]
    return written


def in_continuous_batches(model: Any, work: Work) -> list[list[int]]:
    """All requests at once in transformers, each with its own number of tokens."""
    pages = sum(-(-(len(prompt) + most) // _PAGE) for prompt, most in work)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            **cast(Any, {_PAGE_OPTION: _PAGE}), num_blocks=pages + 1, max_batch_tokens=_STEP, allow_block_sharing=False
        ),
    )
    manager.start()
    try:
        names = [manager.add_request(prompt, max_new_tokens=most) for prompt, most in work]
        written: dict[str, list[int]] = {}
        while len(written) < len(names):
            found = manager.get_result(timeout=_WAIT_S)
            if found is None:
                raise RuntimeError("Continuous batching gave no result")
            if found.is_finished():
                written[found.request_id] = list(found.generated_tokens)
    finally:
        manager.stop(block=True)
    return [written[name] for name in names]
