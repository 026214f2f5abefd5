"""The GPU memory that forwards need: the probe of workers/batching/calibrate.py. A reading imports torch.

the largest rows of a batch -> forward -> peak of the memory in use on the device
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.registry.tensors import STRING, Array
from penstock.workers.batching.calibrate import MemoryReading
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.device_peak import peak_used_bytes

__all__ = ["forward_probe", "largest_example"]

_SPECIAL_TOKENS = 2
"""Tokens that a tokenizer adds around a text."""
_FORWARDS = 3
"""In a row, for one reading: the second finds the memory that the first left in pieces."""


def forward_probe(runtime: Runtime, device: str, concurrency: int = 1) -> Callable[[int], MemoryReading]:
    """A probe that runs a loaded model on its largest rows. concurrency: the number of simultaneous forwards."""

    def probe(rows: int) -> MemoryReading:
        jobs = [largest_example(runtime, rows)]

        def forwards() -> None:
            for _ in range(_FORWARDS):
                runtime.run(runtime.prepare(jobs))

        used = peak_used_bytes(device, forwards, concurrency)
        return MemoryReading(rows, used)

    return probe


def largest_example(runtime: Runtime, rows: int) -> dict[str, Array]:
    """Inputs of the longest length that the package allows, or else its weights.

    A free dimension without a limit is as large as in the warm-up. For longer inputs, batches are split after an
    out-of-memory error.
    """
    spec = runtime.spec
    batching = spec.batching
    longest = batching.max_length or 0
    if not longest and spec.format == "transformers" and spec.task is None:
        longest = runtime.length({tensor.name: np.array(["a" * 100_000], object) for tensor in spec.inputs})
    example = spec.signature.example(rows, longest) if longest else spec.signature.example(rows)
    if spec.format == "transformers" and longest:
        # A word is at least one token; a long text of one repeated letter may be a single token.
        text = " ".join(["a"] * max(1, longest - _SPECIAL_TOKENS))
        texts = {tensor.name for tensor in spec.inputs if tensor.dtype == STRING}
        example |= {name: np.full(values.shape, text, object) for name, values in example.items() if name in texts}
    return example
