"""A program: our kernel in triton's interpreter, against the attention over gathered pages. Prints a part as JSON.

TRITON_INTERPRET=1 python -m tests.workers.generation.interpreted errors|replayed|ARCHITECTURE
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from penstock.workers.generation import paged_kernel
from penstock.workers.generation.attention import (
    DecodeKernel,
    KeyValuePools,
    NewTokens,
    RowGroup,
    StepContext,
    in_step,
    paged_attention,
)
from penstock.workers.generation.attention_choice import choose_kernel
from penstock.workers.generation.batch import flat_batch
from penstock.workers.generation.decode_graphs import DecodeGraphs
from penstock.workers.generation.layer_rules import LayerRule
from penstock.workers.generation.model import wrap_decoder
from penstock.workers.generation.scheduler import Chunk, Sequence
from penstock.workers.runtime.torch_device import TorchDevice
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of, token_ids

__all__ = ["CASES", "REPLAYED", "TEXTS"]

LENGTHS: Final = (1, 2, 15, 16, 17, 64, 65, 128, 129, 260)
"""Of the rows: at the ends of pages and of the kernel's blocks of 64 or 128 keys."""


@dataclass(frozen=True)
class Case:
    """Shapes and what the layer asks for."""

    heads: int = 4
    shared: int = 2
    size: int = 16
    value_size: int = 16
    page_size: int = 16
    rule: LayerRule = field(default_factory=LayerRule)
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5


CASES: Final = {
    "as many heads of keys": Case(shared=4),
    "grouped queries": Case(),
    "one head of keys": Case(heads=6, shared=1),
    "values of another size": Case(size=48, value_size=32),
    "odd sizes": Case(heads=3, shared=1, size=20, value_size=20),
    "large heads": Case(size=128, value_size=128),
    "pages of one token": Case(page_size=1),
    "pages of 7 tokens": Case(page_size=7),
    "pages of 128 tokens": Case(page_size=128),
    "a window": Case(rule=LayerRule(window=9)),
    "a window of one key": Case(rule=LayerRule(window=1)),
    "a window over blocks": Case(rule=LayerRule(window=100)),
    "chunks": Case(rule=LayerRule(chunk=24)),
    "capped logits": Case(softcap=5.0),
    "sinks": Case(has_sinks=True),
    "all of them": Case(rule=LayerRule(window=40), softcap=30.0, has_sinks=True, heads=8),
    # The interpreter multiplies no bf16.
    "fp16": Case(dtype=torch.float16, tolerance=2e-3),
}
PROGRAMS: Final = (1, 40)
"""Whole rows; up to four parts of each, which are more than some rows have blocks."""
REPLAYED: Final = ("Llama", "Gemma2", "Llama 4 with chunks")
TEXTS: Final = ("Llama", "Gemma2", "GPT-OSS", "Llama 4 with chunks")
"""Whose texts are written by an engine with the kernel."""


def error_of(case: Case, kernel: DecodeKernel, seed: int) -> float:
    """The largest difference of both ways, for rows of all lengths in random pages."""
    generator = torch.Generator().manual_seed(seed)
    device = TorchDevice("cpu", 1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    needed = [-(-length // case.page_size) for length in LENGTHS]
    numbers = random.Random(seed).sample(range(1, sum(needed) + 4), sum(needed))
    rows = []
    for row, (length, number) in enumerate(zip(LENGTHS, needed, strict=True)):
        pages = [numbers.pop() for _ in range(number)]
        rows.append(Chunk(Sequence(str(row), [0] * length, length, pages=pages), length - 1, 1))
    batch = flat_batch(rows, case.page_size, [case.rule], device, most_groups=1)
    sinks = noise(case.heads) if case.has_sinks else None
    # What lies in pages of other rows, and behind a row's end, is noise that neither way may read.
    slots = torch.arange((sum(needed) + 4) * case.page_size)
    pools = KeyValuePools(sum(needed) + 4, case.page_size)
    shape = len(slots), case.shared
    held = NewTokens(noise(*shape, case.size), noise(*shape, case.value_size), slots)
    pool = pools.of(0, held)
    query = noise(1, case.heads, len(LENGTHS), case.size)
    key = noise(1, case.shared, len(LENGTHS), case.size)
    value = noise(1, case.shared, len(LENGTHS), case.value_size)
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    found = []
    for each in (None, kernel):
        pool.write(held)
        with in_step(StepContext(pools, [case.rule], batch.slots, batch.groups, each)):
            attended, _ = paged_attention(module, query, key, value, None, softcap=case.softcap, s_aux=sinks)
            found.append((attended.float(), pool.keys.clone(), pool.values.clone()))
    # The keys and values of the pages are the same, too.
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


def _texts(name: str) -> list[Any]:
    """Tokens without and with the kernel, and how many calls it got."""
    prompts = prompts_of(3, 17, 30)
    written: list[Any] = []
    for attention in ("sdpa", "triton"):
        engine = open_engine(decoder(name), kv_cache_mb=4, page_size=4, attention=attention)
        if engine.decoder.kernel is not None:
            counted = _Counted(engine.decoder.kernel)
            engine.decoder.kernel = counted
        written.append(token_ids(engine.generate(prompts, GREEDY)))
    return [*written, counted.calls]


class _Counted:
    """Counts the calls of a kernel."""

    def __init__(self, kernel: DecodeKernel) -> None:
        self.calls = 0
        self._kernel = kernel

    def __call__(self, group: RowGroup, *others: Any) -> torch.Tensor:
        self.calls += 1
        return self._kernel(group, *others)


def _replayed() -> dict[str, tuple[bool, int, float]]:
    """By architecture and rows: what a graph computes for them, by a plan that had other steps before.

    Whether all plans have one size; the number of logits, with those of padding rows; the largest error of the others.
    """
    found = {}
    for name in REPLAYED:
        loaded = wrap_decoder(decoder(name), None, 64)
        loaded.kernel = choose_kernel("triton", loaded.device)
        pools = KeyValuePools(100, 4)
        graphs = DecodeGraphs(loaded, pools)
        others = [Chunk(Sequence("", [1] * 40, 40, pages=[*range(88, 99)]), at, 1) for at in range(32, 40)]
        batch = graphs.plan(others).on_device(loaded.device)
        rows = [
            Sequence(str(row), prompt, len(prompt)) for row, prompt in enumerate(prompts_of(9, 30, 14, 2, 21, 5, 40, 1))
        ]
        for row, one in enumerate(rows):
            one.pages = [*range(1 + 11 * row, 12 + 11 * row)]
            if len(one.tokens) > 1:
                loaded.forward(loaded.batch([Chunk(one, 0, len(one.tokens) - 1)], 4), pools)
        for number in (8, 5, 7):
            steps = [Chunk(one, len(one.tokens) - 1, 1) for one in rows[:number]]
            expected, _ = loaded.forward(loaded.batch(steps, 4), pools)
            plan = graphs.plan(steps)
            batch.plan.copy_(plan.host)
            logits, _ = loaded.forward(batch, pools)
            # The plain batch has its rows in the order of their positions.
            order = sorted(range(number), key=lambda row: len(rows[row].tokens))
            error = float((logits[order] - expected).abs().max())
            found[f"{name}, {number} rows"] = plan.host.shape == batch.plan.shape, len(logits), error
            # The same plan comes again after the other one of its bucket, and has had other rows meanwhile.
            graphs.plan(others[: number - 1] if number > 5 else others)
    return found


def _errors() -> dict[str, float]:
    """The largest of each case."""
    kernel = choose_kernel("triton", TorchDevice("cpu", 1))
    if kernel is None:
        raise ValueError("Found no kernel, expected that of the interpreter")
    errors = {}
    for name, case in CASES.items():
        found = []
        for seed, paged_kernel._PROGRAMS in enumerate(PROGRAMS):
            found.append(error_of(case, kernel, seed))
        errors[name] = max(found)
    return errors


def _main(part: str) -> None:
    torch.set_num_threads(1)
    # Two parts of each of three rows.
    paged_kernel._PROGRAMS = 20
    parts: dict[str, Callable[[], Any]] = {"errors": _errors, "replayed": _replayed}
    json.dump(parts[part]() if part in parts else _texts(part), sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
