"""Whether a worker serves, and whether its process must be replaced; for any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from penstock.workers.drain_parts import DrainParts
from penstock.workers.leases import LeaseKeeper

__all__ = ["WorkerHealth"]


class WorkerHealth:
    """Looks at the threads of one drain.

    thread: the I/O thread. progress_s: see DrainLimits. clock: monotonic seconds.
    """

    def __init__(
        self,
        parts: DrainParts,
        thread: threading.Thread,
        leases: LeaseKeeper,
        *,
        progress_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.is_serving = False
        """Whether the threads were started, and nobody has asked them to stop."""
        self.ticked = clock()
        """When the last turn of the I/O thread began."""
        self._parts: Final = parts
        self._thread: Final = thread
        self._leases: Final = leases
        self._progress_s = progress_s
        self._clock = clock

    @property
    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether jobs are being served, and the details for a probe."""
        problem = self.unhealthy_reason()
        if problem is None and not self._leases.is_in_touch:
            problem = "the broker does not answer"
        if problem is None and not self._parts.lifecycle.offers.claimable():
            problem = "no active version can be loaded here"
        details = {"models": sorted(self._parts.lifecycle.models), "problem": problem}
        return self.is_serving and problem is None, {**details, "in_memory": len(self._parts.leased)}

    def unhealthy_reason(self) -> str | None:
        """Why this process should be replaced: a thread has died or hangs; None while it is healthy."""
        if not self.is_serving:
            return None
        executor, leases = self._parts.executor, self._leases
        if executor.device_lost:
            return f"the device is lost: {executor.device_lost}"
        if self._parts.scheduler.unhealthy_reason:
            return self._parts.scheduler.unhealthy_reason
        now = self._clock()
        if (reason := self.overdue_here()) is not None:
            return reason
        # In this order: a forward that has ended meanwhile was progress until then.
        is_here = executor.here is not None
        silent_s = 0.0 if is_here else now - max(self.ticked, executor.left_at)
        return (
            self._fault_of("drain", self._thread.is_alive(), silent_s)
            or self._fault_of("lease", leases.is_alive(), now - leases.ticked)
            or self._fault_of("model", executor.is_alive(), 0.0)
        )

    def overdue_here(self) -> str | None:
        """Why this process must end: a forward on the I/O thread is over its limit. None: there is none such."""
        return self._parts.executor.overdue_here(self._clock())

    def _fault_of(self, thread: str, is_alive: bool, silent_s: float) -> str | None:
        if not is_alive:
            return f"the {thread} thread has died"
        if silent_s > self._progress_s:
            return f"the {thread} thread has made no progress for {self._progress_s:g} s"
        return None
