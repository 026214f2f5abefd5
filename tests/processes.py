"""Processes of this machine as tests look at them, by /proc."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ["descendants", "group_of", "is_alive", "kill"]


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return bool(_fields(pid))


def group_of(leader: int) -> set[int]:
    """The living processes of a process group."""
    return {pid for pid, fields in _all().items() if int(fields[2]) == leader}


def descendants(pid: int) -> set[int]:
    """The living processes below this one."""
    parents = {each: int(fields[1]) for each, fields in _all().items()}
    found = {pid}
    while below := {each for each, parent in parents.items() if parent in found} - found:
        found |= below
    return found - {pid}


def kill(pid: int) -> None:
    """SIGKILL; a process that has gone takes none."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _all() -> dict[int, list[str]]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return {pid: fields for pid in pids if (fields := _fields(pid))}


def _fields(pid: int) -> list[str]:
    """State, parent, group and so on; empty for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields
