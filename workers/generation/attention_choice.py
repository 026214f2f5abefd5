"""How decoding rows attend: our kernel where it can run, or gathered pages and SDPA.

    auto    the kernel on a GPU with triton, else SDPA
    sdpa    gathered pages
    triton  the kernel, or an error that says why it cannot run

The gate decides on a chosen kernel; see accelerations.py.

Importing this module imports torch.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

import torch

from penstock.registry.errors import ConfigurationError
from penstock.workers.generation.attention import DecodeKernel
from penstock.workers.generation.config import AttentionChoice
from penstock.workers.runtime.torch_device import TorchDevice

__all__ = ["choose_kernel", "why_no_kernel"]

_LEAST_CAPABILITY: Final = (8, 0)
"""The first with tensor cores for bf16."""


def choose_kernel(choice: AttentionChoice, device: TorchDevice) -> DecodeKernel | None:
    """None: gathered pages. Raises ConfigurationError where the kernel is wanted by name and cannot run."""
    if choice == "sdpa":
        return None
    capability = torch.cuda.get_device_capability(device.device) if device.is_cuda else None
    reason = why_no_kernel(capability, has_triton=find_spec("triton") is not None, is_interpreted=_is_interpreted())
    if reason and choice == "triton":
        raise ConfigurationError(f"attention: found triton, expected auto or sdpa here: {reason}")
    # The interpreter is for tests: it is never chosen by itself.
    if reason or (capability is None and choice == "auto"):
        return None
    from penstock.workers.generation.paged_kernel import decode_attention

    return decode_attention


def why_no_kernel(capability: tuple[int, int] | None, *, has_triton: bool, is_interpreted: bool) -> str:
    """Empty where it can run. capability: of the GPU; None: a CPU, on which triton has an interpreter only."""
    if not has_triton:
        return "triton is not installed"
    if capability is None:
        return "" if is_interpreted else "the kernel needs a GPU"
    if capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, _LEAST_CAPABILITY))
        return f"the GPU has compute capability {found}, the kernel needs {least}"
    return ""


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
