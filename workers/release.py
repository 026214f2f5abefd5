"""Releases jobs to their queue, or hands them over to the workers that have the requested version.

Jobs that were running when the process of an instance ended are released, too, after one crash was counted for each:
whichever worker takes them over runs them one by one, or finds that they are poison.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from penstock.registry.broker.base import WorkerEnd
from penstock.workers.batch_run import BatchRun
from penstock.workers.cache import SingleFlight
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs

__all__ = ["Releaser"]

logger = logging.getLogger("penstock.server")


class Releaser:
    """Keeps jobs until the broker has confirmed their release. The I/O thread owns it.

    crash_ttl_ms: how long the broker keeps the count of crashes.
    """

    def __init__(
        self, broker: WorkerEnd, consumer: str, leased: LeasedJobs, flights: SingleFlight, crash_ttl_ms: int
    ) -> None:
        self._broker = broker
        self._consumer = consumer
        self._leased = leased
        self._flights = flights
        self._crash_ttl_ms = crash_ttl_ms
        self._jobs: list[ClaimedJob] = []
        self._interrupted: list[BatchRun] = []
        """Runs whose crash was not counted yet."""

    def add(self, jobs: Iterable[ClaimedJob]) -> None:
        """Give these jobs and their followers back at the next `flush`."""
        self._jobs += self._flights.end_all(jobs)

    def add_interrupted(self, runs: Iterable[BatchRun]) -> None:
        """Count a crash for each job of these runs, and give it back, at the next `flush`."""
        for run in runs:
            run.version.queue.in_flight -= 1
            for job in run.jobs:
                run.version.queue.release(job)
            self._interrupted.append(run)

    def flush(self) -> None:
        """Tell the broker. Raises BrokerUnavailable, and then keeps the jobs for the next try."""
        while self._interrupted:
            run = self._interrupted[-1]
            slot = run.batch.key.model
            # Before the release: whichever worker has them next must know.
            self._broker.suspect(slot, run.held, f"{self._consumer} {run.incident}", self._crash_ttl_ms)
            logger.warning("jobs run again one by one", extra={"model": slot, "jobs": len(run.jobs)})
            self._interrupted.pop()
            self.add(run.jobs)
        if not self._jobs:
            return
        for job in self._jobs:
            job.is_lost = True
        self._broker.release(self._consumer, [job.held for job in self._jobs])
        self._leased.drop(self._jobs)
        self._jobs = []

    def hand_over(self, jobs: Sequence[ClaimedJob], model: str, label: str) -> None:
        """Give these jobs to the workers that have the version `label`. Raises BrokerUnavailable: nothing was done."""
        self._broker.release(self._consumer, [job.held for job in jobs], version=label)
        logger.info("jobs handed over", extra={"model": model, "version": label, "jobs": len(jobs)})
        for job in jobs:
            job.is_lost = True
        self._leased.drop(jobs)
