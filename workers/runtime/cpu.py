"""What this machine's CPU can do that decides between forms, read from the kernel."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["cpu_label", "has_fast_bf16"]

_CPUINFO: Final = Path("/proc/cpuinfo")
_MATTERS: Final = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "bf16", "i8mm")
"""x86 and Arm names of units that multiply matrices."""


@cache
def _features() -> frozenset[str]:
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()).intersection(_MATTERS) if found else frozenset()


def has_fast_bf16() -> bool:
    """Whether bf16 matrices are multiplied by units made for it, and not converted one by one."""
    return not _features().isdisjoint(("amx_bf16", "avx512_bf16", "bf16"))


def cpu_label() -> str:
    """The kind of CPU: the same label, the same forms worth having."""
    return " ".join([platform.machine(), *sorted(_features())])
