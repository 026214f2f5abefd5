"""A worker as users run it, on a machine whose clock jumps: `python -m tests.faults.jumping_worker FILE NAME`.

FILE holds one double: by how many seconds the clock is wrong. A write to it makes the clock jump.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path

__all__ = ["Clock"]


class Clock:
    """The time of day, wrong by what `file` says; monotonic clocks go on as they are."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(struct.pack("d", 0.0))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 8)
        self._right_ns = time.time_ns

    def jump_to(self, seconds: float) -> None:
        """From now on it is wrong by that much."""
        self._map[:] = struct.pack("d", seconds)

    def time_ns(self) -> int:
        """As time.time_ns."""
        (seconds,) = struct.unpack("d", self._map[:])
        return self._right_ns() + int(seconds * 1e9)

    def time(self) -> float:
        """As time.time."""
        return self.time_ns() / 1e9


def main(file: str, name: str) -> None:
    """Runs the worker on that clock."""
    clock = Clock(Path(file))
    # Before anything that keeps a reference to them is imported.
    time.time, time.time_ns = clock.time, clock.time_ns
    from penstock.workers import app as worker_app

    worker_app.app.worker_main(["worker", "-P", "solo", "-c", "1", "-n", name])


if __name__ == "__main__":
    main(*sys.argv[1:])
