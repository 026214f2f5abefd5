"""Ended jobs with large results, until their results are sealed: as many at a time as one round trip carries.

    a large batch ends --> UnsentOutcomes --> take: up to TURN_BYTES, at least one --> sealed, committed, freed

A result is copied when it is sealed. So the copies of a batch never exist all at once, and the commits of other models
get in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from penstock.workers.batch_run import BatchRun
from penstock.workers.credit import TURN_BYTES
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs, JobOutcome

__all__ = ["UnsentOutcomes", "without_outputs"]


class UnsentOutcomes:
    """Outcomes in the order in which their batches ended. The I/O thread owns it."""

    def __init__(self) -> None:
        self._outcomes: deque[tuple[JobOutcome, int]] = deque()

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, outcomes: Iterable[JobOutcome]) -> None:
        """These jobs have ended. Their versions start no batch with large results until all are taken."""
        for outcome in outcomes:
            nbytes = outcome.nbytes
            self._outcomes.append((outcome, nbytes))
            _count(outcome, nbytes)

    def take(self, left_bytes: int = TURN_BYTES) -> list[JobOutcome]:
        """Take out the oldest: at least one, and no further one beyond `left_bytes`."""
        taken: list[JobOutcome] = []
        while self._outcomes and (not taken or self._outcomes[0][1] <= left_bytes):
            outcome, nbytes = self._outcomes.popleft()
            left_bytes -= nbytes
            _count(outcome, -nbytes)
            taken.append(outcome)
        return taken

    def take_all(self) -> list[ClaimedJob]:
        """Take out everything; returns the jobs, which have no committed result."""
        jobs = [outcome.job for outcome, _ in self._outcomes]
        self._outcomes.clear()
        return jobs

    def has(self, run: BatchRun) -> bool:
        """Whether a result of this batch is here."""
        return any(outcome.run is run for outcome, _ in self._outcomes)


def without_outputs(outcome: JobOutcome) -> JobOutcome:
    """The outcome of a committed job, for reports: its outputs are with the broker."""
    if outcome.failure is not None:
        return outcome
    return JobOutcome(outcome.job, EncodedOutputs((), b"", "", 0), outcome.how, outcome.version, outcome.run)


def _count(outcome: JobOutcome, nbytes: int) -> None:
    if outcome.version is not None:
        outcome.version.queue.unsent_bytes += nbytes
