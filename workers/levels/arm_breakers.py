"""The circuit breakers of candidates in one worker: an arm of an experiment whose breaker is open gets no jobs.

    a canary refuses, a candidate drifts, its jobs fail on a worker (stop) --> breaker `model/version:candidate`
        --> read here four times a second
        --> admits: a job that is claimed from then on goes to the version in production
        --> take_changes: so do the jobs that wait for the arm

Nobody else has to act: the driver of the rollout may be dead, and an A/B experiment has none. The breakers of a model
are read while it has arms. A worker that cannot read them, and whose last reading is more than a second old, trusts no
candidate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from penstock.registry.broker.breakers import CANDIDATE, BreakerEnd, BreakerLimits, BreakerRecord, split_breaker_name
from penstock.safety.breaker import MAX_COPY_AGE_S
from penstock.workers.levels.shared_breakers import SharedBreakers

__all__ = ["ArmBreakers", "ArmChange"]

_SUFFIX: Final = f":{CANDIDATE}"


class ArmChange(NamedTuple):
    """The breaker of this version has opened or closed."""

    model: str
    label: str


class ArmBreakers:
    """The breakers of the arms of one worker. `admits` and `take_changes` are for any thread, and wait for nothing.

    models: those that have arms. limits: of a breaker that `stop` opens. ring: called on a thread of its own when a
    breaker has opened or closed. on_trip: is told (name, record) on that thread, on the one worker whose `stop` opened
    the breaker. clock: monotonic seconds.
    """

    def __init__(
        self,
        end: BreakerEnd,
        models: Callable[[], Sequence[str]],
        *,
        ring: Callable[[], None],
        limits: BreakerLimits | None = None,
        on_trip: Callable[[str, BreakerRecord], None] = lambda name, record: None,
        clock: Callable[[], float],
    ) -> None:
        self._ring = ring
        self._changes: deque[ArmChange] = deque()
        self.shared: Final = SharedBreakers(
            end,
            models,
            thread="arms",
            limits=limits,
            on_change=self._changed,
            on_trip=on_trip,
            clock=clock,
        )
        """Reads them between its `start` and `stop`."""

    def admits(self, model: str, label: str) -> bool:
        """Whether jobs may come to this version as an arm. Before the first reading they may.

        The beginning of an experiment is refused while a breaker is open, and the first reading follows at once.
        """
        if self.shared.away_s > MAX_COPY_AGE_S:
            return False
        if not self.shared.has_read(model):
            self.shared.wake()
        return self.shared.is_closed(_name(model, label))

    def stop(self, model: str, label: str, reason: str) -> None:
        """The arm gets no more jobs: here at once, and on the other workers within a second."""
        self.shared.force_open(_name(model, label), reason)

    def take_changes(self) -> list[ArmChange]:
        """The versions whose breakers have opened or closed since the last call."""
        taken = []
        while self._changes:
            taken.append(self._changes.popleft())
        return taken

    def _changed(self, name: str, _: BreakerRecord) -> None:
        if name.endswith(_SUFFIX):
            model, local = split_breaker_name(name)
            self._changes.append(ArmChange(model, local.removesuffix(_SUFFIX)))
            self._ring()


def _name(model: str, label: str) -> str:
    return f"{model}/{label}{_SUFFIX}"
