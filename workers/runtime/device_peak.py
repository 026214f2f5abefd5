"""The memory of a GPU: all of it, and the most that is in use while forwards run. A reading imports torch.

peak of the memory that torch reserved + other memory in use on the device
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["peak_used_bytes", "total_bytes"]


def total_bytes(device: str) -> int:
    """The whole memory of `cuda[:n]`."""
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[1])


def peak_used_bytes(device: str, forward: Callable[[], object], concurrency: int = 1) -> int | None:
    """The peak of the memory in use on the device while `concurrency` forwards run; None: they did not fit.

    Includes the memory of CUDA's context, of libraries and of other processes.
    """
    import torch

    where = torch.device(device)
    torch.cuda.synchronize(where)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_reserved(where)
    try:
        forward()
        torch.cuda.synchronize(where)
    except (MemoryError, torch.OutOfMemoryError):
        return None
    finally:
        peak = torch.cuda.max_memory_reserved(where)
        torch.cuda.empty_cache()
    return _used_beside_torch(where) + before + (peak - before) * concurrency


def _used_beside_torch(where: torch.device) -> int:
    import torch

    free, total = torch.cuda.mem_get_info(where)
    return int(total) - int(free) - torch.cuda.memory_reserved(where)
