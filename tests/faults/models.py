"""Models that misbehave on purpose, for fault tests; NumPy only.

Each answers 2 x and notes its forwards like tests.packages.write_recorder. A row that begins with a negative number
is poison: the fault happens in each batch with it.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

from tests.packages import write_package

__all__ = ["DEADLY", "HANGING", "write_cramped", "write_poisonable"]

DEADLY = {
    "SIGSEGV": "ctypes.string_at(0)",
    "os._exit": "os._exit(0)",
    "abort": "os.abort()",
}
"""Ends of a process that no `except` sees."""
HANGING = {
    "asleep": "time.sleep(3600)",
    "holding the GIL": "ctypes.PyDLL(None).sleep(3600)",
}
"""Calls that never return; in the second, no other thread of the process runs either."""


def write_poisonable(root: Path, forward_log: Path, name: str, fault: str) -> Path:
    """Does `fault`, a statement, when it meets poison."""
    return write_package(root, name, _source(forward_log, f"if min(rows) < 0:\n    {fault}"))


def write_cramped(root: Path, forward_log: Path, name: str, *, fits: int, max_batch_size: int) -> Path:
    """Runs out of memory in every batch of more than `fits` rows."""
    return write_package(
        root,
        name,
        _source(forward_log, f'if len(rows) > {fits}:\n    raise MemoryError("no room for so many rows")'),
        max_batch_size=max_batch_size,
    )


def _source(forward_log: Path, fault: str) -> str:
    return f"""\
import ctypes
import json
import os
import time


def build():
    forward_log = os.open({str(forward_log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def forward(inputs):
        rows = inputs["x"][:, 0].tolist()
        os.write(forward_log, (json.dumps({{"pid": os.getpid(), "rows": rows}}) + "\\n").encode())
{indent(fault, " " * 8)}
        return {{"y": inputs["x"] * 2}}

    return forward
"""
