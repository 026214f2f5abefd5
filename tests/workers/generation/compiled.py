"""A program: our kernel compiled for GPUs that need not be here. Prints the bytes of shared memory of each as JSON.

python -m tests.workers.generation.compiled
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.workers.generation import paged_kernel

__all__ = ["CAPABILITIES", "VARIANTS"]

CAPABILITIES: Final = (80, 90)
VARIANTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bf16": ("bf16", {}),
    "bf16, all of it": ("bf16", {"WINDOW": 128, "HAS_CAP": True, "HAS_SINKS": True}),
    "fp32, chunks": ("fp32", {"CHUNK": 8192}),
}
_SHAPE: Final = {
    "PAGE": 16,
    "HEADS": 32,
    "SHARED": 8,
    "PER_KEY": 4,
    "D": 128,
    "DV": 128,
    "WINDOW": 0,
    "CHUNK": 0,
    "HAS_CAP": False,
    "HAS_SINKS": False,
    "GROUP": 16,
    "BLOCK": 64,
    "BLOCK_D": 128,
    "BLOCK_DV": 128,
}
_TYPES: Final = {"width": "i32", "scale": "fp32", "softcap": "fp32"}


def _shared_bytes(capability: int, dtype: str, changes: dict[str, Any]) -> int:
    kernel: Any = paged_kernel.decode_kernel
    constants = _SHAPE | changes
    types = {name: f"*{dtype}" for name in kernel.arg_names} | _TYPES
    types |= {name: "*i64" for name in ("numbers", "starts", "positions")} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    if not compiled.asm["cubin"]:
        raise ValueError("Found no machine code, expected some")
    return int(compiled.metadata.shared)


def _main() -> None:
    found = {
        f"{name}, {capability}": _shared_bytes(capability, *variant)
        for name, variant in VARIANTS.items()
        for capability in CAPABILITIES
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main()
