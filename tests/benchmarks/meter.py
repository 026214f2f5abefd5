"""What processes spend and hold, by the books of the kernel (proc(5))."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["cpu_seconds", "resident_bytes", "tree"]

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system seconds so far of these processes, without their children; one that is gone counts nothing."""
    return sum(int(fields[11]) + int(fields[12]) for pid in pids if (fields := _stat(pid))) / _TICKS_PER_S


def tree(root: int) -> list[int]:
    """The process and all its descendants, parents first."""
    parents = {pid: int(fields[1]) for pid in _running() if (fields := _stat(pid))}
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def _running() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """The fields from `state` on; the command before them may hold anything. Empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
