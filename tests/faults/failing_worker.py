"""A worker as users run it, but for one fail point: `python -m tests.faults.failing_worker HOW POINT NTH NAME`.

At the NTH time that the drain passes POINT, the process kills (`kill`) or stops (`stop`) itself, or the thread that
passes goes no further while all others run on (`hang`). Passes are counted from the first claimed job on: before that
nothing is at stake.
"""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace
from typing import Final

__all__ = ["POINTS", "FailPoint"]

POINTS: Final = (
    *("before-claim", "after-claim", "before-batch", "mid-forward"),
    *("after-forward", "before-commit", "after-commit", "mid-drain"),
)
"""Every point that a drain passes, in the order of a job's way."""
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class FailPoint:
    """A drain's `checkpoint` that ends or stops its own process, or one of its threads, once."""

    def __init__(self, how: str, point: str, nth: int) -> None:
        if point not in POINTS:
            raise ValueError(f"Unknown point {point!r}. Expected one of: {', '.join(POINTS)}")
        self._signal = None if how == "hang" else _SIGNALS[how]
        self._point = point
        self._passes_left = nth
        self._has_claimed = False

    def __call__(self, point: str) -> None:
        """Called by the drain and its model threads."""
        self._has_claimed = self._has_claimed or point == "after-claim"
        if point != self._point or not self._has_claimed:
            return
        self._passes_left -= 1
        if self._passes_left == 0 and self._signal is None:
            threading.Event().wait()
        elif self._passes_left == 0 and self._signal is not None:
            # To this thread: it goes no further, whichever thread is next to run.
            signal.pthread_kill(threading.get_ident(), self._signal)


def main(how: str, point: str, nth: str, name: str) -> None:
    """Runs the worker until its fail point or a signal ends it."""
    # Importing it needs a broker's URL, which tests that only want POINTS do not have.
    from penstock.workers import app as worker_app
    from penstock.workers import worker as worker_module

    # This drain differs in its checkpoint only. The look-up fails when worker.py has no such name.
    names = vars(worker_module)
    build, fail_point = names["build_drain"], FailPoint(how, point, int(nth))
    names["build_drain"] = lambda settings, broker, packages, options: build(
        settings, broker, packages, replace(options, checkpoint=fail_point)
    )
    worker_app.app.worker_main(["worker", "-P", "solo", "-c", "1", "-n", name])


if __name__ == "__main__":
    main(*sys.argv[1:])
