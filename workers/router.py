"""A claimed job -> the way it goes.

    expired, revoked, invalid --> Answered          an equal job leads --> Aside.FOLLOWS
    cached answer             --> Answered          a version is here  --> Run, or Suspect: alone
    other tiers may have one  --> Seek
    its version is not here   --> Aside.UNPLACED, HandOver, Aside.GIVE_BACK

While an experiment runs, a job that names no version has an arm, and the arm's version answers it. Until that version
is ready, here or in another worker, the job waits; no other version answers it. The jobs of an arm whose circuit
breaker is open go to the version in production.

JobTransfers puts each job where its route says; only a follower is kept here, in SingleFlight. Which version answers a
job is settled at the claim: the claim carries the record of the active version, so a promotion holds for the very next
job.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from penstock.registry.envelope import Failure
from penstock.registry.errors import InvalidInput
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.batch_run import forward_timeout
from penstock.workers.cache import AnswerCache, InputSamples, JobKeys, SingleFlight, may_share_text
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.listener import JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import REVOKED, CachedAnswers, JobOutcome
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.placement import Placement
from penstock.workers.versions.version import ServedArms, ServedModel, ServedVersion, VersionState

__all__ = [
    "Answered",
    "Aside",
    "HandOver",
    "JobRouter",
    "Route",
    "RoutedClaim",
    "Run",
    "Seek",
    "Suspect",
    "is_of_arm",
]

_LEAST_SAMPLES: Final = 10_000
"""More than the jobs that a worker holds at a time: each of them may lead equal ones."""


class Run(NamedTuple):
    """The job waits for a batch of this version."""

    version: ServedVersion


class Seek(NamedTuple):
    """The answer is looked up in the tiers behind the memory. If there is none, the job waits for a batch."""

    version: ServedVersion


class Suspect(NamedTuple):
    """The job waits until it can run alone."""

    version: ServedVersion


class Answered(NamedTuple):
    """The job has its answer."""

    outcome: JobOutcome


class HandOver(NamedTuple):
    """Other workers have the version that the job names, or its arm, under this label."""

    label: str


class Aside(Enum):
    """The job gets no forward of this worker now."""

    FOLLOWS = "an equal job leads; its answer will be the answer of this job"
    UNPLACED = (
        "the version that the job names, or its arm, is not here, and it is not known yet which worker has it; or the "
        "queue of its endpoint is full while that is loading"
    )
    GIVE_BACK = "the active version, or the arm, is not here; another worker may have it"


Route: TypeAlias = Run | Seek | Suspect | Answered | HandOver | Aside


class RoutedClaim(NamedTuple):
    """The ways of the jobs of one claim. Followers stand nowhere: see Aside.FOLLOWS."""

    running: defaultdict[ServedVersion, list[ClaimedJob]]
    """The jobs that wait for a batch, by version, in order."""
    sought: defaultdict[ServedVersion, list[ClaimedJob]]
    """The jobs whose answers are looked up, by version, in order."""
    cached: list[CachedAnswers]
    """The plain jobs that have their answers."""
    others: list[tuple[ClaimedJob, Route]]

    def put(self, job: ClaimedJob, route: Route) -> None:
        """Note the way of one job."""
        if isinstance(route, Run):
            self.running[route.version].append(job)
        elif isinstance(route, Seek):
            self.sought[route.version].append(job)
        elif route is not Aside.FOLLOWS:
            self.others.append((job, route))


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
        self._keys = JobKeys(isolates_tenants=isolates_tenants)
        self._samples = InputSamples(max(_LEAST_SAMPLES, 2 * answers.memory.max_entries))

    # The routes

    def route_all(self, jobs: Iterable[ClaimedJob], broker_now: float) -> RoutedClaim:
        """The ways of jobs that were just claimed; see `route`. One look at a model is enough for all of its plain
        jobs, and one at the cached answers for those that came one after another.
        """
        routed = RoutedClaim(defaultdict(list), defaultdict(list), [], [])
        slot = active = version = None
        plain: list[ClaimedJob] = []
        for job in jobs:
            delivery, shared = job.delivery, job.shared
            if delivery.slot is not slot or delivery.active is not active:
                if version is not None and plain:
                    self._route_plain(plain, version, routed, broker_now)
                    plain = []
                slot, active = delivery.slot, delivery.active
                version = self._version_of_plain(slot, active)
            if (
                version is not None
                and shared is not None
                and shared.is_plain
                and not delivery.crashes
                and not delivery.exceeded_s
                and broker_now <= job.expires_ms
                and version.knows(job)
            ):
                plain.append(job)
                continue
            if version is not None and plain:
                self._route_plain(plain, version, routed, broker_now)
                plain = []
            routed.put(job, self.route(job, broker_now))
            # This route may have changed the active version.
            slot = None
        if version is not None and plain:
            self._route_plain(plain, version, routed, broker_now)
        return routed

    def _version_of_plain(self, slot: str, active: bytes) -> ServedVersion | None:
        """The version that answers the plain jobs of this model; None: look at each job."""
        model = self._lifecycle.models[slot]
        version = model.active
        if self._listener.has_revoked or active != model.record or version is None or not version.is_ready:
            return None
        return None if _needs_a_look(version) else version

    def _route_plain(
        self, jobs: list[ClaimedJob], version: ServedVersion, routed: RoutedClaim, broker_now: float
    ) -> None:
        """The ways of plain jobs of the model whose active version this is."""
        arms = self._lifecycle.models[version.name].arms
        if arms is None:
            self._route_alike(jobs, version, routed)
            return
        by_arm: defaultdict[ServedVersion, list[ClaimedJob]] = defaultdict(list)
        for job in jobs:
            arm = arms.ready_version(arms.label_for(job.header))
            if arm is None or _needs_a_look(arm) or not arm.knows(job):
                routed.put(job, self.route(job, broker_now))
            else:
                by_arm[arm].append(job)
        for arm, alike in by_arm.items():
            self._route_alike(alike, arm, routed)

    def _route_alike(self, jobs: list[ClaimedJob], version: ServedVersion, routed: RoutedClaim) -> None:
        """The ways of plain jobs that need a forward of this version at most."""
        if _shares_answers(version):
            jobs, cached, _ = self._share(jobs, version)
            if cached is not None:
                routed.cached.append(cached)
        if jobs:
            (routed.sought if self._seeks(version) else routed.running)[version] += jobs

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
        if job.header.version:
            version = self.named_here(job)
        else:
            version = self._active_here(model) if model.arms is None else self._arm_here(job, model.arms)
        if version is not None:
            return self._admit(job, version)
        return Aside.UNPLACED if job.header.version or model.arms is not None else Aside.GIVE_BACK

    def place(self, job: ClaimedJob, broker_now: float, *, waiting: int) -> Route:
        """The way of an unplaced job. UNPLACED: it goes on waiting. waiting: see Placement.find."""
        if broker_now > job.expires_ms:
            return _refused(job, EXPIRED)
        if job.is_lost or job.is_cancelled:
            return _refused(job, CANCELLED)
        if not job.header.version:
            return self._place_of_arm(job, waiting)
        place = self.find_elsewhere(job, waiting=waiting)
        if isinstance(place, ServedVersion):
            return self._admit(job, place)
        if isinstance(place, Failure):
            return _refused(job, place)
        return Aside.UNPLACED if place is None else HandOver(place)

    def _place_of_arm(self, job: ClaimedJob, waiting: int) -> Route:
        """As `place`, for a job that names no version. The experiment may have changed or ended meanwhile."""
        model = self._lifecycle.models[job.delivery.slot]
        if model.arms is None:
            version = self._active_here(model)
            return Aside.GIVE_BACK if version is None else self._admit(job, version)
        if (version := self._arm_here(job, model.arms)) is not None:
            return self._admit(job, version)
        content_hash = model.arms.content_of(model.arms.label_for(job.header))
        place = self._placement.find(job, waiting=waiting, arm=content_hash)
        if isinstance(place, str):
            return HandOver(place)
        # No live worker has the arm now: the job goes back to the queue and is not failed.
        return Aside.GIVE_BACK if isinstance(place, Failure) else Aside.UNPLACED

    def resume(self, job: ClaimedJob, version: ServedVersion) -> Route:
        """The way of a job whose pause between two tries is over."""
        if job.is_lost or job.is_cancelled:
            return _refused(job, CANCELLED, version)
        if self._listener.is_revoked(job.header.id):
            return _refused(job, REVOKED, version)
        return Aside.UNPLACED if self.has_left(job, version) else _forward_of(job, version)

    def has_left(self, job: ClaimedJob, version: ServedVersion) -> bool:
        """Whether the version runs the job no more: it is the job's arm, and gets no jobs now."""
        arms = self._lifecycle.models[version.name].arms
        return arms is not None and is_of_arm(job) and not arms.admits(version.label)

    def fall_back(self, job: ClaimedJob, label: str) -> Route | None:
        """The way of a job to the version of this label, which its policy names; None: that version is not here.

        Only a version that jobs may name is loaded for it, and only one that takes the job's inputs runs it.
        """
        version = self._lifecycle.named(job.delivery.slot, label)
        if version is None or version.room <= 0 or not self._lifecycle.offers.is_offered(version):
            return None
        try:
            version.fit(job)
        except InvalidInput:
            return None
        return _forward_of(job, version)

    def rejoin(self, follower: ClaimedJob, version: ServedVersion) -> Route:
        """The way of a job whose leader ended without an answer for it. Without a digest it follows no other one."""
        if self.has_left(follower, version):
            return Aside.UNPLACED
        if follower.digest and self._join([follower], version)[1]:
            return Aside.FOLLOWS
        return _forward_of(follower, version)

    def find_elsewhere(self, job: ClaimedJob, *, waiting: int) -> ServedVersion | str | Failure | None:
        """The worker for a job that names a version; see Placement.find."""
        return self._placement.find(job, waiting=waiting)

    # Which version

    def named_here(self, job: ClaimedJob) -> ServedVersion | None:
        """The version that a job names, if the job may wait for it here."""
        version = self._lifecycle.named(job.delivery.slot, job.header.version)
        is_here = version is not None and version.room > 0 and self._lifecycle.offers.is_offered(version)
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

    def _arm_here(self, job: ClaimedJob, arms: ServedArms) -> ServedVersion | None:
        """The version of the job's arm, if it is ready here. If it is not loaded, its load begins."""
        label = arms.label_for(job.header)
        if (version := arms.ready_version(label)) is not None:
            return version
        if (cold := arms.versions[label]) is not None:
            self._lifecycle.load(cold)
        return None

    # Of a version that is here

    def _admit(self, job: ClaimedJob, version: ServedVersion) -> Route:
        if endpoint := job.header.options.endpoint:
            place = self._at_endpoint(job, version, endpoint)
            if not isinstance(place, ServedVersion):
                return place
            version = place
        try:
            version.fit(job)
        except InvalidInput as error:
            # The client checked the job against another spec than the one that is served now.
            return _refused(job, Failure("InputRefused", str(error)))
        if not job.is_suspect and _shares_answer(job, version):
            _, cached, following = self._share([job], version)
            if cached is not None:
                return Answered(*cached.outcomes())
            if following:
                return Aside.FOLLOWS
            if self._seeks(version):
                return Seek(version)
        return _forward_of(job, version)

    def _at_endpoint(self, job: ClaimedJob, version: ServedVersion, name: str) -> ServedVersion | Route:
        """The version at the endpoint that a job names, if the job may wait for it here."""
        found = self._lifecycle.endpoint(version, name)
        if found is None:
            # The client checked the job against another spec, as above.
            expected = ", ".join(version.spec.endpoints)
            text = f"{version.spec.reference} has no endpoint {name[:64]!r}. Expected one of: {expected}"
            return _refused(job, Failure("InputRefused", text))
        if found.state is VersionState.FAILED and not found.shares_model:
            text = f"The endpoint {name} of {version.spec.reference} cannot be loaded under its policy"
            return _refused(job, Failure("ModelError", text))
        return found if found.room > 0 else Aside.UNPLACED

    def _seeks(self, version: ServedVersion) -> bool:
        """Whether jobs that the memory has no answer for are looked up in the tiers behind it."""
        return bool(version.policy.cache_ttl_s) and not self._is_paused(version.name) and self._answers.asks(version)

    def _share(
        self, jobs: list[ClaimedJob], version: ServedVersion
    ) -> tuple[list[ClaimedJob], CachedAnswers | None, list[ClaimedJob]]:
        """Give jobs that fit the answers of equal ones.

        Returns those that need a forward of their own, those that the cache answered, and the followers.
        """
        self._keys.begin_all(jobs, version.answers_as)
        looks_up = bool(version.policy.cache_ttl_s) and not self._is_paused(version.name)
        # Also of jobs that other tiers are asked for: the memory keeps what these have.
        if self._samples.are_new(jobs) and not (looks_up and self._answers.asks(version)):
            if looks_up:
                self._answers.miss_all(jobs, version)
            if version.policy.shares_flights:
                self._flights.lead_all(jobs)
            return jobs, None, []
        cached: CachedAnswers | None = None
        if looks_up:
            answers = self._answers.find_all(jobs, version)
            if any(answers):
                found = [(job, answer) for job, answer in zip(jobs, answers, strict=True) if answer is not None]
                cached = CachedAnswers(version, [job for job, _ in found], [answer for _, answer in found])
                jobs = [job for job, answer in zip(jobs, answers, strict=True) if answer is None]
        running, following = self._join(jobs, version)
        if begun := [*(cached.jobs if cached else ()), *following]:
            self._listener.started([job.header for job in begun], time.time())
        return running, cached, following

    def _join(self, jobs: list[ClaimedJob], version: ServedVersion) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
        """Let jobs follow equal ones where the version allows that; returns those that do not follow, and the rest."""
        if not version.policy.shares_flights:
            return jobs, []
        running, following = self._flights.join_all(jobs, version)
        for route, count in Counter(job.route for job in following).items():
            self._metrics.single_flight(version.name, version.label, route, count)
        return running, following


def is_of_arm(job: ClaimedJob) -> bool:
    """Whether an experiment, while there is one, has given the job to its version: neither its client nor a failure."""
    return not job.header.version and job.fell_back is None


def _shares_answers(version: ServedVersion) -> bool:
    return bool(version.policy.cache_ttl_s) or version.policy.shares_flights


def _shares_answer(job: ClaimedJob, version: ServedVersion) -> bool:
    """As `_shares_answers`, for one job: of an engine, only some jobs have equal texts when they are equal."""
    return _shares_answers(version) and (not version.policy.seats or may_share_text(job))


def _needs_a_look(version: ServedVersion) -> bool:
    """Whether jobs of this version that look plain may differ in more than their inputs."""
    return version.policy.tokenises or bool(version.policy.seats)


def _forward_of(job: ClaimedJob, version: ServedVersion) -> Run | Suspect:
    # A process of an engine takes many jobs with it. They run together once more before each runs alone.
    spared = version.policy.max_crashes - 1 if version.policy.seats else 1
    return Suspect(version) if job.delivery.crashes >= max(1, spared) else Run(version)


def _refused(job: ClaimedJob, failure: Failure, version: ServedVersion | None = None) -> Answered:
    return Answered(JobOutcome(job, failure, "refused", version))
