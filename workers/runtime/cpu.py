"""The features of this machine's CPU that decide between forms, read from the kernel."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["cpu_label", "has_fast_bf16", "saturates_int8"]

_CPUINFO: Final = Path("/proc/cpuinfo")
_MATTERS: Final = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "bf16", "i8mm")
"""x86 and Arm names of the units that multiply matrices."""


@cache
def _features() -> frozenset[str]:
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()).intersection(_MATTERS) if found else frozenset()


def has_fast_bf16() -> bool:
    """Whether the CPU has units that multiply bf16 matrices; otherwise it converts each number."""
    return not _features().isdisjoint(("amx_bf16", "avx512_bf16", "bf16"))


def saturates_int8() -> bool:
    """Whether sums of two products of 8-bit integers may overflow: on x86 without VNNI they are added in 16 bits."""
    return "avx2" in _features() and _features().isdisjoint(("avx512_vnni", "avx_vnni", "amx_int8"))


def cpu_label() -> str:
    """The kind of CPU. The same forms are worthwhile on CPUs of one label."""
    return " ".join([platform.machine(), *sorted(_features())])
