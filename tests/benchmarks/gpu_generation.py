"""What a GPU can show of text generation: tokens per second, the share of its memory, and the same tokens.

Each measurement takes the device and the shape of a model, so that a test runs its code on a CPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.safety.validators import GenerationValidator, Verdict
from penstock.workers.generation import Engine, SamplingParams
from penstock.workers.runtime.device_peak import total_bytes

__all__ = ["ONE_BILLION", "SMALL", "Found", "agreement", "decoding", "graphs", "kept_share"]

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
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,  # type: ignore[arg-type]
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(made_on or device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return Engine.from_model(model, device=device, packed_linears="off", num_speculative_tokens=0, **options)


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
