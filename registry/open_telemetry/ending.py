"""The end of what talks to a collector: a collector that hangs must not keep a process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

__all__ = ["ended_soon"]

_LONGEST_S: Final = 3.0
"""A busy collector answers within it. The library tries for half a minute and more."""


def ended_soon(end: Callable[[], object]) -> bool:
    """Whether `end` returned within seconds. Otherwise it goes on, on a thread for which no process waits."""
    thread = threading.Thread(target=end, name="open-telemetry end", daemon=True)
    thread.start()
    thread.join(_LONGEST_S)
    return not thread.is_alive()
