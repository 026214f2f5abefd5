"""Work that gives way to all others: a shadow's candidate runs beside the workers that answer jobs."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

__all__ = ["give_way"]

_NICENESS: Final = 19


def give_way() -> None:
    """Let every other process of the machine go first. Call it before threads and processes are started.

    They inherit it. Linux has a class of its own for such work: a process of another class that wakes up takes the
    processor at once. With the lowest niceness alone, it waits for some milliseconds.
    """
    os.nice(_NICENESS)
    if hasattr(os, "SCHED_IDLE"):
        # A container may forbid the change; the niceness is left.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
