"""A program: our kernels compiled for GPUs that need not be here. Prints the bytes of shared memory of each as JSON.

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
    "bf16, few rows": ("bf16", {"SPLITS": 16}),
    "bf16, small heads": (
        "bf16",
        {"D": 64, "DV": 64, "KEYS_APART": 64, "VALUES_APART": 64, "BLOCK_D": 64, "BLOCK_DV": 64, "BLOCK": 128},
    ),
    "fp32, chunks": ("fp32", {"CHUNK": 8192}),
}
_SHAPE: Final = {
    "PAGE": 16,
    "HEADS": 32,
    "SHARED": 8,
    "PER_KEY": 4,
    "D": 128,
    "DV": 128,
    "KEYS_APART": 128,
    "VALUES_APART": 128,
    "WINDOW": 0,
    "CHUNK": 0,
    "HAS_CAP": False,
    "HAS_SINKS": False,
    "SPLITS": 1,
    "GROUP": 16,
    "BLOCK": 64,
    "BLOCK_D": 128,
    "BLOCK_DV": 128,
}
_MERGED: Final = {"HEADS": 32, "DV": 128, "SPLITS": 16, "BLOCK_DV": 128}
_TYPES: Final = (
    {"scale": "fp32", "softcap": "fp32", "sums": "*fp32", "parts": "*fp32"}
    | dict.fromkeys(("width", "key_row", "key_head", "value_row", "value_head"), "i32")
    | dict.fromkeys(("numbers", "starts", "positions", "slots"), "*i64")
)


def _shared_bytes(capability: int, kernel: Any, dtype: str, constants: dict[str, Any]) -> int:
    types = {name: f"*{dtype}" for name in kernel.arg_names}
    types |= {name: each for name, each in _TYPES.items() if name in types} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    if not compiled.asm["cubin"]:
        raise ValueError("Found no machine code, expected some")
    return int(compiled.metadata.shared)


def _main() -> None:
    sources: dict[str, tuple[Any, str, dict[str, Any]]] = {
        name: (paged_kernel.decode_kernel, dtype, _SHAPE | changes) for name, (dtype, changes) in VARIANTS.items()
    }
    sources["merged parts"] = paged_kernel.merge_kernel, "bf16", _MERGED
    found = {
        f"{name}, {capability}": _shared_bytes(capability, *source)
        for name, source in sources.items()
        for capability in CAPABILITIES
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main()
