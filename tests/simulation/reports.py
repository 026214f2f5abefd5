"""What the workers of a schedule tell monitors: a job's end is told once, by the worker that committed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.workers.observe.listener import Ended, NullListener

__all__ = ["CountedEnds"]


class CountedEnds(NullListener):
    """The listener of each worker; `ends` has by job id how often any of them reported an end."""

    def __init__(self, ends: Counter[str]) -> None:
        self._ends = ends

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        """See JobListener.finished; JobListener.completed comes here, too."""
        for each in ended:
            self._ends[each.header.id] += 1
