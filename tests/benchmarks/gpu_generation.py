"""What a GPU can show of text generation: tokens per second, the share of its memory, and the same tokens.

Each measurement takes the device and the shape of a model, so that a test runs its code on a CPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.safety.validators import GenerationValidator, Verdict
from penstock.workers.generation import Engine, SamplingParams
from penstock.workers.runtime.device_peak import total_bytes
from tests.benchmarks.generation import in_continuous_batches, in_static_batches, workload, written_by
from tests.benchmarks.report import median

__all__ = [
    "ONE_BILLION",
    "SMALL",
    "Found",
    "against_transformers",
    "agreement",
    "cached_prefix",
    "decoding",
    "graphs",
    "kept_share",
    "long_prompt",
]

ONE_BILLION: Final[Mapping[str, int]] = {
    "vocab_size": 128_256,
    "hidden_size": 2_048,
    "intermediate_size": 8_192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4_096,
}
"""The shape of a Llama of 1.2 billion parameters with tied weights; these are not tied."""
SMALL: Final[Mapping[str, int]] = {
    "vocab_size": 4_096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1_024,
}
_COPIED_BYTES: Final = 1 << 30
_COPIES: Final = 10
_WARM_UPS: Final = 8

Found = tuple[str, bool, dict[str, float]]
"""What was measured, whether that is enough, and the numbers."""


def decoding(
    device: str,
    shape: Mapping[str, int],
    *,
    rows: int = 64,
    prompt: int = 512,
    steps: int = 128,
    copied_bytes: int = _COPIED_BYTES,
    **options: Any,
) -> Found:
    """Greedy tokens per second in bf16, and the share of the memory bandwidth that was measured by copies.

    A step reads all weights but the table of the tokens, and the keys and values of all rows. Required: half of it.
    """
    engine = _engine(
        shape, torch.bfloat16, device, max_num_seqs=rows, max_num_batched_tokens=max(2_048, rows), **options
    )
    model = engine.decoder.model
    for row in range(rows):
        engine.add_request(None, _prompt(prompt, row, shape), SamplingParams(temperature=0, max_tokens=steps + 64))
    while len(engine.scheduler.running) < rows or any(one.num_left > 1 for one in engine.scheduler.running):
        engine.step()
    # The graph of so many rows is compiled and captured, and a step is under way.
    for _ in range(_WARM_UPS):
        engine.step()
    held = sum(len(one.tokens) for one in engine.scheduler.running)
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - begun
    table = model.get_input_embeddings().weight
    weights = sum(one.nbytes for one in model.parameters() if one is not table)
    # Each row has a token more after each step.
    keys = (held + rows * steps / 2) * engine.forwards.pools_nbytes / (engine.pages.num_pages * engine.pages.page_size)
    bandwidth = _bandwidth(device, copied_bytes)
    share = (weights + keys) * steps / seconds / bandwidth
    rate = rows * steps / seconds
    return (
        f"{rate:,.0f} tokens/s, {seconds / steps * 1e3:.2f} ms a step; {share:.0%} of {bandwidth / 1e9:,.0f} GB/s",
        share >= 0.5,
        {"tokens_per_s": rate, "share": share, "bandwidth": bandwidth},
    )


def graphs(device: str, shape: Mapping[str, int], *, rows: tuple[int, ...] = (1, 8, 64), **options: Any) -> Found:
    """Tokens per second with CUDA graphs against the same steps without."""
    ratios = {}
    for number in rows:
        rates = [
            decoding(device, shape, rows=number, cuda_graphs=on, **options)[2]["tokens_per_s"] for on in (True, False)
        ]
        ratios[f"ratio_{number}"] = rates[0] / rates[1]
    return ", ".join(f"{ratio:.2f}x" for ratio in ratios.values()), min(ratios.values()) >= 1, ratios


def kept_share(device: str, shape: Mapping[str, int], shares: tuple[float, ...]) -> Found:
    """For each `hbm_utilization` the share of the memory that is in use after a full batch; within 3 points of it."""
    used = []
    for share in shares:
        torch.cuda.empty_cache()
        engine = _engine(shape, torch.bfloat16, device, hbm_utilization=share, max_num_seqs=32)
        engine.generate([_prompt(512, row, shape) for row in range(32)], SamplingParams(temperature=0, max_tokens=32))
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        used.append(1 - free / total_bytes(device))
        del engine
    torch.cuda.empty_cache()
    return (
        ", ".join(f"{found:.1%} for {share:.0%}" for share, found in zip(shares, used, strict=True)),
        all(abs(found - share) <= 0.03 for share, found in zip(shares, used, strict=True)),
        {f"used_at_{share}": found for share, found in zip(shares, used, strict=True)},
    )


def against_transformers(
    device: str,
    shape: Mapping[str, int],
    required: float,
    *,
    is_continuous: bool,
    requests: int = 64,
    rows: int = 32,
    rounds: int = 2,
    kv_cache_mb: float = 8_000,
) -> Found:
    """Tokens per second in bf16 against transformers: its continuous batching, or padded batches of so many rows.

    The rounds take turns after one that is not counted. Tokens of random weights differ by rounding in bf16: they are
    compared in fp32, by `agreement`.
    """
    work = workload(requests)
    engine = _engine(
        shape,
        torch.bfloat16,
        device,
        max_num_seqs=requests,
        max_num_batched_tokens=2_048,
        kv_cache_mb=kv_cache_mb,
        enable_prefix_caching=False,
    )
    peer = _model(shape, torch.bfloat16, device)
    number = sum(most for _, most in work)
    turns = []
    for _ in range(rounds + 1):
        ours_s = _seconds(lambda: written_by(engine, work))
        peer_s = _seconds(
            lambda: in_continuous_batches(peer, work) if is_continuous else in_static_batches(peer, work, rows)
        )
        turns.append((ours_s, peer_s))
    ratio = median(peer_s / ours_s for ours_s, peer_s in turns[1:])
    rates = [number / median(turn[at] for turn in turns[1:]) for at in (0, 1)]
    return (
        f"{rates[0]:,.0f} against {rates[1]:,.0f}: {ratio:.2f}x",
        ratio >= required,
        {"ratio": ratio, "tokens_per_s": rates[0], "tokens_per_s_peer": rates[1]},
    )


def cached_prefix(device: str, shape: Mapping[str, int], required: float, *, rounds: int = 9, **options: Any) -> Found:
    """Time to the first token of a prompt of 528 tokens in bf16, 512 of them in the prefix cache, against none."""
    engine = _engine(shape, torch.bfloat16, device, **options)
    shared = _prompt(512, 0, shape)

    def first_token(prompt: list[int]) -> float:
        return _seconds(lambda: engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1)))

    first_token([*shared, *_prompt(16, 1, shape)])
    warm, cold = [], []
    for turn in range(rounds):
        warm.append(first_token([*shared, *_prompt(16, 2 + turn, shape)]))
        cold.append(first_token(_prompt(528, 100 + turn, shape)))
    ratio = median(without / cached for cached, without in zip(warm, cold, strict=True))
    return (
        f"{median(warm) * 1e3:.1f} against {median(cold) * 1e3:.1f} ms: {ratio:.1f}x",
        ratio >= required,
        {"ratio": ratio, "cached_ms": median(warm) * 1e3, "ms": median(cold) * 1e3},
    )


def long_prompt(
    device: str, shape: Mapping[str, int], most: float, *, prompt: int = 2_000, rounds: int = 3, **options: Any
) -> Found:
    """The longest step beside a long prompt, against the median step of eight streams alone, at the default budget."""
    engine = _engine(shape, torch.bfloat16, device, enable_prefix_caching=False, **options)
    ratios = []
    for turn in range(rounds + 1):
        streams = SamplingParams(temperature=0, max_tokens=300)
        names = [engine.add_request(None, _prompt(64, row, shape), streams) for row in range(8)]
        for _ in range(8):
            engine.step()
        alone = median(_seconds(engine.step) for _ in range(30))
        long = engine.add_request(None, _prompt(prompt, turn, shape), SamplingParams(temperature=0, max_tokens=2))
        steps = []
        is_open = True
        while is_open:
            begun = time.perf_counter()
            outputs = engine.step()
            steps.append(time.perf_counter() - begun)
            is_open = not any(output.request_id == long for output in outputs)
        ratios.append(max(steps) / alone)
        for name in (*names, long):
            engine.abort(name)
        engine.step()
    # The first round compiles and captures.
    ratio = median(ratios[1:])
    return f"{ratio:.1f}x", ratio <= most, {"ratio": ratio}


def _seconds(run: Callable[[], object]) -> float:
    """Of the clock. What runs ends with tokens on the host."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def agreement(device: str, shape: Mapping[str, int], *, prompts: int = 16, tokens: int = 64, **options: Any) -> Found:
    """Greedy tokens in fp32 on the device and on the CPU, judged by the validator of generated tokens."""
    asked = [_prompt(24 + 9 * row, row, shape) for row in range(prompts)]
    params = SamplingParams(temperature=0, max_tokens=tokens)
    ours, golden = (
        _tokens(_engine(shape, torch.float32, where, made_on="cpu", **chosen).generate(asked, params))
        for where, chosen in ((device, options), ("cpu", {}))
    )
    compared = GenerationValidator(pad_id=-1).compare(ours, golden)
    share = compared.figures["token_agreement"].value
    return f"{share:.2%} of {golden.size} tokens", compared.verdict is Verdict.PASS, {"agreement": share}


def _tokens(outputs: list[Any]) -> np.ndarray:
    return np.array([output.outputs[0].token_ids for output in outputs], np.int64)


def _engine(shape: Mapping[str, int], dtype: torch.dtype, device: str, *, made_on: str = "", **options: Any) -> Engine:
    """made_on: where the weights are drawn, which decides what a seed gives; empty is `device`."""
    # An engine and its pages lie in a cycle of references: what an earlier one held on the device comes back now.
    gc.collect()
    model = _model(shape, dtype, made_on or device)
    return Engine.from_model(model, device=device, packed_linears="off", num_speculative_tokens=0, **options)


def _model(shape: Mapping[str, int], dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,  # type: ignore[arg-type]
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _prompt(length: int, seed: int, shape: Mapping[str, int]) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, shape["vocab_size"], (length,), generator=generator).tolist()


def _bandwidth(device: str, size: int) -> float:
    """Bytes per second that a copy on the device reads and writes; the best of ten."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(_COPIES):
        begun = time.perf_counter()
        target.copy_(source)
        target[-1].item()
        best = max(best, 2 * size / (time.perf_counter() - begun))
    return best
