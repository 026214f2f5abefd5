"""The tier behind the memories of all workers of a schedule: look-ups and writes happen when the schedule says.

SharedTiers.ask, keep --> a random time later --> SimulatedTiers reads or writes the SharedStore, and rings
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from queue import Empty
from typing import Any, Final

from penstock.workers.cache import SharedTiers
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs
from penstock.workers.versions.version import ServedVersion
from tests.simulation.virtual_time import Schedule
from tests.workers.cache.stepped_tiers import DictTier

__all__ = ["SharedStore", "SimulatedTiers"]

_READ_S: Final = (0.0003, 0.001, 0.01, 0.2)
"""What a look-up takes. The last one is longer than a worker waits."""
_WRITTEN_S: Final = 0.02


class SharedStore(DictTier):
    """The entries of all workers."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__("l3", lambda: schedule.now)
        self.schedule = schedule


class SimulatedTiers(SharedTiers):
    """The threads of one worker are the schedule's."""

    def __init__(self, tiers: Sequence[SharedStore], **options: Any) -> None:
        super().__init__(tiers, **options)
        (store,) = tiers
        self._schedule = store.schedule

    def ask(self, version: ServedVersion, jobs: Sequence[ClaimedJob]) -> None:
        """As ever."""
        super().ask(version, jobs)
        self._schedule.after(self._schedule.rng.choice(_READ_S), self._read_one)

    def keep(self, answers: Iterable[tuple[ClaimedJob, EncodedOutputs]], group: str, form: str, ttl_s: float) -> None:
        """As ever."""
        super().keep(answers, group, form, ttl_s)
        self._write_soon()

    def forget(self, content_hash: str) -> None:
        """As ever."""
        super().forget(content_hash)
        self._write_soon()

    def close(self, timeout_s: float = 2.0) -> None:
        """The store is that of the others, too."""

    def _start(self) -> None:
        """There is no thread."""

    def _write_soon(self) -> None:
        self._schedule.after(self._schedule.rng.uniform(0.0, _WRITTEN_S), self._write_one)

    def _read_one(self) -> None:
        _next_of(self._questions.get_nowait, self.answer)

    def _write_one(self) -> None:
        _next_of(self._writes.get_nowait, self.perform)


def _next_of(take: Callable[[], Any], act: Callable[[Any], None]) -> None:
    try:
        taken = take()
    except Empty:
        # It was answered together with an earlier one.
        return
    act(taken)
