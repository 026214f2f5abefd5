"""Whether to call a server that failed shortly before. Pure: the clock and the randomness are arguments.

closed --failure--> open for a pause --> half-open: one call tries --success--> closed
                      ^                                  |
                      +---- failure: twice the pause ----+

It guards a process against a server. The breakers of optimisations are shared by all workers: broker/breakers.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.registry.backoff import backoff_delay_s

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """One server, for any thread. A failure opens the circuit; while it is open, calls are not made.

    clock: monotonic seconds. jitter: a number in [0, 1), anew at each call.
    first_s, longest_s: the pause doubles from the one up to the other; see backoff_delay_s.
    """

    def __init__(
        self, clock: Callable[[], float], jitter: Callable[[], float], *, first_s: float, longest_s: float
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0
        """In a row."""
        self._retry_at = 0.0
        self._is_trying = False
        self._lock = threading.Lock()

    def admits(self) -> bool:
        """Whether to make a call now. Tell its outcome with `succeeded` or `failed`."""
        if not self._failures:
            return True
        with self._lock:
            if not self._failures:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            # A pause for others begins now: this call may never tell its outcome.
            self._is_trying = True
            self._retry_at = now + self._pause_s()
            return True

    def succeeded(self) -> bool:
        """Notes a call that was answered. Whether that closed the circuit."""
        if not self._failures:
            return False
        with self._lock:
            was_open, self._failures, self._is_trying = self._failures > 0, 0, False
        return was_open

    def failed(self) -> bool:
        """Notes a call that failed. Whether that opened a closed circuit."""
        with self._lock:
            if self._failures and not self._is_trying:
                # It began before the circuit was opened: the failure is known.
                return False
            self._failures += 1
            self._is_trying = False
            self._retry_at = self._clock() + self._pause_s()
            return self._failures == 1

    def _pause_s(self) -> float:
        return backoff_delay_s(max(1, self._failures), self._first_s, self._longest_s, self._jitter())
