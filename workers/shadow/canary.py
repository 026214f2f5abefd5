"""The canary of one shadow worker: compared pairs -> a running verdict on the candidate.

ShadowWorker -- Pair --> one Canary for each set of outputs that jobs asked for --> CanaryState, merged --> verdict
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.safety.canary import Canary, CanaryState, CanaryVerdict, Pair
from penstock.workers.shadow.comparison import Comparer

__all__ = ["ShadowCanary"]


class ShadowCanary:
    """Judges the candidate of one shadow on the pairs of one shadow worker. One thread at a time.

    comparer: chooses the validators. min_pairs: with fewer, the verdict is INSUFFICIENT or FAIL.
    """

    def __init__(self, comparer: Comparer, min_pairs: int) -> None:
        self._comparer = comparer
        self._min_pairs = min_pairs
        self._canaries: dict[tuple[str, ...], Canary] = {}
        """By the names of the served outputs: a job may ask for some of them only."""

    def observe(self, pairs: Sequence[Pair]) -> CanaryVerdict:
        """Takes in pairs whose comparisons were counted."""
        by_outputs: dict[tuple[str, ...], list[Pair]] = {}
        for pair in pairs:
            by_outputs.setdefault(tuple(pair.expected), []).append(pair)
        for names, group in by_outputs.items():
            if names not in self._canaries:
                self._canaries[names] = Canary(self._comparer.validators(group[0].expected), min_pairs=self._min_pairs)
            self._canaries[names].observe(group)
        return self.verdict

    @property
    def state(self) -> CanaryState:
        """What the pairs so far have shown."""
        total = CanaryState()
        for canary in self._canaries.values():
            total = total.merged(canary.state)
        return total

    @property
    def verdict(self) -> CanaryVerdict:
        """The verdict on the pairs so far."""
        return self.state.verdict(self._min_pairs)
