"""A worker's signs of life to its supervisor (compose/stack/supervisor.py), through the pipe it inherited.

One line a second: an empty one while all is well, else the reason why this process should be replaced. A process
whose interpreter is stuck, in a call that never gives the GIL back, writes nothing; the supervisor reads that too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.registry.errors import ConfigurationError

__all__ = ["BEAT_S", "start"]

BEAT_S: Final = 1.0
"""Seconds from one line to the next."""
_LONGEST_REASON: Final = 500


def start(fd: int, is_healthy: Callable[[], str | None]) -> threading.Thread:
    """Write signs of life to the pipe `fd` from a daemon thread; `is_healthy` answers None, or what is wrong.

    Raises ConfigurationError when `fd` is not open. When the reading end is closed, the supervisor is gone: this
    process then shuts down as on SIGTERM.
    """
    try:
        # A full pipe means that the supervisor is stopped, not gone: skip the beat instead of waiting for it.
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
    except OSError:
        raise ConfigurationError(
            f"PENSTOCK_HEARTBEAT_FD={fd} is not an open pipe. A supervisor sets it: leave it unset otherwise"
        ) from None
    thread = threading.Thread(target=_beat, args=(fd, is_healthy), name="heartbeat", daemon=True)
    thread.start()
    return thread


def _beat(fd: int, is_healthy: Callable[[], str | None]) -> None:
    beaten = time.monotonic()
    while True:
        stood_still = time.monotonic() - beaten > 2 * BEAT_S
        beaten = time.monotonic()
        # After that the other threads come round before they are judged.
        reason = "" if stood_still else " ".join((is_healthy() or "").split())[:_LONGEST_REASON]
        try:
            os.write(fd, reason.encode() + b"\n")
        except BlockingIOError:
            pass
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(BEAT_S)
