"""Detects that this process stood still: suspended, swapped out or without CPU time. Pure: `now` is an argument.

After a stall every other thread and process looks hung, because they may have stood still as well. A watchdog that
judges them must first let them run again.
"""

from __future__ import annotations

__all__ = ["StallDetector"]


class StallDetector:
    """Watches the gaps between the turns of one loop. For one thread.

    `longest_gap_s`: a longer gap between two turns is a stall. `recovery_s`: the time that the others get after one.
    """

    def __init__(self, longest_gap_s: float, recovery_s: float = 0.0) -> None:
        self.gap_s = 0.0
        """Seconds between the last two turns; 0 before the second turn."""
        self._longest_gap_s = longest_gap_s
        self._recovery_s = recovery_s
        self._last_turn: float | None = None
        self._recovered_at = float("-inf")

    def turn(self, now: float) -> bool:
        """Record one turn of the loop. Returns whether a stall ended just now or less than `recovery_s` ago.

        >>> detector = StallDetector(longest_gap_s=1, recovery_s=2)
        >>> [detector.turn(now) for now in (100, 101, 110, 111, 112)]
        [False, False, True, True, False]
        """
        self.gap_s = 0.0 if self._last_turn is None else now - self._last_turn
        self._last_turn = now
        has_stalled = self.gap_s > self._longest_gap_s
        if has_stalled:
            self._recovered_at = now + self._recovery_s
        return has_stalled or now < self._recovered_at
