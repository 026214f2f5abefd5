"""Zeros for tensors that are read at random places, on huge pages of the system where it has them.

The processor keeps the addresses of a few pages of the system at hand, in its TLB. With pages of 4 kB, each page of
keys and values that is gathered misses it; with pages of 2 MB few do. Linux gives huge pages to mappings that ask for
them.

Importing this module imports torch.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch

__all__ = ["zeros"]

_HUGE: Final = 2 << 20


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros of the dtype and on the device of `like`. Raises RuntimeError where there is no memory."""
    size = math.prod(shape) * like.element_size()
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if like.device.type != "cpu" or advice is None or size < _HUGE:
        return like.new_zeros(tuple(shape))
    try:
        memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        # The error of torch names the size.
        return like.new_zeros(tuple(shape))
    # A system without huge pages refuses the advice, and the mapping is as good without.
    with suppress(OSError):
        memory.madvise(advice)
    # The mapping is zeros, and its pages take memory when they are first written. The tensor keeps it.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size].view(like.dtype).view(tuple(shape))
