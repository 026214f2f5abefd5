"""Releases jobs to their queue, or hands them over to the workers that have the requested version."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from penstock.registry.broker.base import WorkerEnd
from penstock.workers.cache import SingleFlight
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs

__all__ = ["Releaser"]

logger = logging.getLogger("penstock.server")


class Releaser:
    """Keeps jobs until the broker has confirmed their release. The I/O thread owns it."""

    def __init__(self, broker: WorkerEnd, consumer: str, leased: LeasedJobs, flights: SingleFlight) -> None:
        self._broker = broker
        self._consumer = consumer
        self._leased = leased
        self._flights = flights
        self._jobs: list[ClaimedJob] = []

    def add(self, jobs: Iterable[ClaimedJob]) -> None:
        """Give these jobs and their followers back at the next `flush`."""
        self._jobs += self._flights.end_all(jobs)

    def flush(self) -> None:
        """Tell the broker. Raises BrokerUnavailable, and then keeps the jobs for the next try."""
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
