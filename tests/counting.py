"""Costs that do not depend on how busy the machine is: tests compare these, and benchmarks measure seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["lines_run"]


def lines_run(action: Callable[[], object]) -> int:
    """How many lines of Python `action` runs in this thread; a round of a loop counts its lines once more."""
    lines = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines
