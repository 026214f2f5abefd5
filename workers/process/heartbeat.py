"""The heartbeat of a worker process to its supervisor (compose/stack/supervisor.py), through an inherited pipe.

One line a second: an empty line while the process is healthy, otherwise the reason to replace it. While a call holds
the GIL and does not give it back, no line is written, nor after a model has closed the pipe; the supervisor detects
that, too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.registry.errors import ConfigurationError
from penstock.workers import children
from penstock.workers.process.descriptors import OwnDescriptor
from penstock.workers.process.stall import StallDetector

__all__ = ["BEAT_S", "start"]

BEAT_S: Final = 1.0
"""Seconds from one line to the next."""
_LONGEST_REASON: Final = 500


def start(fd: int, unhealthy_reason: Callable[[], str | None]) -> threading.Thread:
    """Write heartbeats to the pipe `fd` from a daemon thread. `unhealthy_reason` returns None while all is well.

    Raises ConfigurationError when `fd` is not open. When the reading end is closed, the supervisor has ended: this
    process then shuts down as on SIGTERM.
    """
    try:
        # A full pipe means that the supervisor is suspended, not dead: skip the beat instead of waiting for it.
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        pipe = OwnDescriptor(fd)
        children.own(fd)
    except OSError:
        raise ConfigurationError(
            f"PENSTOCK_HEARTBEAT_FD={fd} is not an open pipe. A supervisor sets it: leave it unset otherwise"
        ) from None
    thread = threading.Thread(target=_beat, args=(pipe, unhealthy_reason), name="heartbeat", daemon=True)
    thread.start()
    return thread


def _beat(pipe: OwnDescriptor, unhealthy_reason: Callable[[], str | None]) -> None:
    stall = StallDetector(2 * BEAT_S)
    # A number that a model closed may belong to a connection of the broker by now: then the supervisor hears nothing.
    while pipe.is_intact:
        # After a stall the other threads need time to run before they are judged.
        has_stalled = stall.turn(time.monotonic())
        reason = "" if has_stalled else " ".join((unhealthy_reason() or "").split())[:_LONGEST_REASON]
        try:
            os.write(pipe.fd, reason.encode("utf-8", "backslashreplace") + b"\n")
        except BlockingIOError:
            pass
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(BEAT_S)
