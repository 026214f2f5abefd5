"""The memory that this process takes: on the host, and on its GPUs as far as torch has reserved it.

Imports no torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

__all__ = ["device_bytes", "host_bytes"]

_STATM: Final = Path("/proc/self/statm")


def host_bytes() -> int | None:
    """Resident bytes; None: the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def device_bytes() -> int | None:
    """Bytes of all GPUs that this process uses; None: it uses none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.memory_reserved(number)) for number in range(torch.cuda.device_count()))
