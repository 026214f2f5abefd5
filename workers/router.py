"""A claimed job -> the way it goes.

    expired, revoked, invalid --> Answered          an equal job leads --> Aside.FOLLOWS
    cached answer             --> Answered          a version is here  --> Run, or Suspect: alone
    its version is not here   --> Aside.UNPLACED, HandOver, Aside.GIVE_BACK

The drain puts each job where its route says; only a follower is kept here, in SingleFlight. Which version answers a job
is settled at the claim: the claim carries the record of the active version, so a promotion holds for the very next job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, TypeAlias

from penstock.registry.envelope import Failure
from penstock.registry.errors import InvalidInput
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.batch_run import forward_timeout
from penstock.workers.cache import AnswerCache, SingleFlight, key_of
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.listener import JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import REVOKED, JobOutcome
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.placement import Placement
from penstock.workers.versions.version import ServedModel, ServedVersion

__all__ = [
    "Answered",
    "Aside",
    "HandOver",
    "JobRouter",
    "Route",
    "Run",
    "Suspect",
]


class Run(NamedTuple):
    """The job waits for a batch of this version."""

    version: ServedVersion


class Suspect(NamedTuple):
    """The job waits until it can run alone."""

    version: ServedVersion


class Answered(NamedTuple):
    """The job has its answer."""

    outcome: JobOutcome


class HandOver(NamedTuple):
    """Other workers have the version that the job names, under this label."""

    label: str


class Aside(Enum):
    """The job gets no forward of this worker now."""

    FOLLOWS = "an equal job leads; its answer will be the answer of this job"
    UNPLACED = "the version that the job names is not here, and it is not known yet which worker has it"
    GIVE_BACK = "the active version is not here; another worker may have it"


Route: TypeAlias = Run | Suspect | Answered | HandOver | Aside


class JobRouter:
    """Routes the jobs of one worker. The I/O thread owns it.

    is_paused: whether an operator paused a model. preloads: whether versions are loaded before their first job.
    """

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        placement: Placement,
        answers: AnswerCache,
        flights: SingleFlight,
        listener: JobListener,
        metrics: InferenceMetrics,
        *,
        is_paused: Callable[[str], bool],
        preloads: bool,
        isolates_tenants: bool,
    ) -> None:
        self._lifecycle = lifecycle
        self._placement = placement
        self._answers = answers
        self._flights = flights
        self._listener = listener
        self._metrics = metrics
        self._is_paused = is_paused
        self._preloads = preloads
        self._isolates_tenants = isolates_tenants

    # The routes

    def route(self, job: ClaimedJob, broker_now: float) -> Route:
        """The way of a job that was just claimed. broker_now: milliseconds by the broker's clock."""
        model = self._lifecycle.models[job.delivery.slot]
        if job.delivery.active != model.record:
            self._lifecycle.follow(model, job.delivery.active)
        if job.delivery.exceeded_s:
            # Another process ended for its forward before it could commit that.
            return _refused(job, forward_timeout(job.delivery.exceeded_s))
        if broker_now > job.expires_ms:
            return _refused(job, EXPIRED)
        if self._listener.is_revoked(job.header.id):
            return _refused(job, REVOKED)
        version = self.named_here(job) if job.header.version else self._active_here(model)
        if version is not None:
            return self._admit(job, version)
        return Aside.UNPLACED if job.header.version else Aside.GIVE_BACK

    def place(self, job: ClaimedJob, broker_now: float, *, waiting: int) -> Route:
        """The way of an unplaced job. UNPLACED: it goes on waiting. waiting: see Placement.find."""
        if broker_now > job.expires_ms:
            return _refused(job, EXPIRED)
        if job.is_lost or job.is_cancelled:
            return _refused(job, CANCELLED)
        place = self.find_elsewhere(job, waiting=waiting)
        if isinstance(place, ServedVersion):
            return self._admit(job, place)
        if isinstance(place, Failure):
            return _refused(job, place)
        return Aside.UNPLACED if place is None else HandOver(place)

    def resume(self, job: ClaimedJob, version: ServedVersion) -> Route:
        """The way of a job whose pause between two tries is over."""
        if job.is_lost or job.is_cancelled:
            return _refused(job, CANCELLED, version)
        if self._listener.is_revoked(job.header.id):
            return _refused(job, REVOKED, version)
        return _forward_of(job, version)

    def rejoin(self, follower: ClaimedJob, version: ServedVersion) -> Route:
        """The way of a job whose leader ended without an answer for it."""
        if self._joins(follower, version):
            return Aside.FOLLOWS
        return _forward_of(follower, version)

    def find_elsewhere(self, job: ClaimedJob, *, waiting: int) -> ServedVersion | str | Failure | None:
        """The worker for a job that names a version; see Placement.find."""
        return self._placement.find(job, waiting=waiting)

    # Which version

    def named_here(self, job: ClaimedJob) -> ServedVersion | None:
        """The version that a job names, if the job may wait for it here."""
        version = self._lifecycle.named(job.delivery.slot, job.header.version)
        is_here = version is not None and version.room > 0 and self._lifecycle.is_offered(version)
        return version if is_here else None

    def _active_here(self, model: ServedModel) -> ServedVersion | None:
        """The active version, if jobs may wait for it here; otherwise they go back, for workers that have it.

        While it is loading its jobs wait in the queue, unless versions are loaded for their first job.
        """
        version = model.active
        if version is None or version.is_ready:
            return version
        if self._preloads:
            self._lifecycle.load(version)
            return None
        return version if version.room > 0 else None

    # Of a version that is here

    def _admit(self, job: ClaimedJob, version: ServedVersion) -> Route:
        try:
            version.fit(job)
        except InvalidInput as error:
            # The client checked the job against another spec than the one that is served now.
            return _refused(job, Failure("ModelError", f"InvalidInput: {error}"))
        if not job.is_suspect and (version.policy.cache_ttl_s or version.policy.shares_flights):
            tenant = job.header.tenant if self._isolates_tenants else ""
            job.digest = key_of(job.header, job.delivery.sealed, version.label, tenant=tenant)
            if (route := self._share(job, version)) is not None:
                self._listener.started([job.header], time.time())
                return route
        return _forward_of(job, version)

    def _share(self, job: ClaimedJob, version: ServedVersion) -> Route | None:
        """The way of a job that needs no forward of its own; None: it needs one."""
        if version.policy.cache_ttl_s and not self._is_paused(version.name):
            outputs = self._answers.find(job, version)
            if outputs is not None:
                return Answered(JobOutcome(job, outputs, "cached", version))
        return Aside.FOLLOWS if self._joins(job, version) else None

    def _joins(self, job: ClaimedJob, version: ServedVersion) -> bool:
        if not version.policy.shares_flights or not self._flights.join(job, version):
            return False
        self._metrics.single_flight(version.name, version.label, job.route)
        return True


def _forward_of(job: ClaimedJob, version: ServedVersion) -> Run | Suspect:
    return Suspect(version) if job.is_suspect else Run(version)


def _refused(job: ClaimedJob, failure: Failure, version: ServedVersion | None = None) -> Answered:
    return Answered(JobOutcome(job, failure, "refused", version))
