"""Workers that break a fast way: what a worker does once for all jobs of a claim or a batch, and not for each.

    shared_headers.py  the header of one job is taken for that of another
    router.py          one look at a model decides for all plain jobs of a claim
    job.py, version.py inputs of alike jobs are joined as bytes;  their description is looked at once
    joint_results.py   the results of a batch are cut out of its outputs, and settled together; cached after that
    drain.py           the commit of a short forward carries the next claims
    scheduler.py       an idle worker runs a short forward on its I/O thread
    input_samples.py   jobs that are unlike all others lead without a digest
    key.py             the part of a key that jobs with one header share is hashed once

What the simulator cannot show, because another part keeps the promise or nothing in it lies, is tested beside the fast
way: signatures, revocations, a plain job that is expired at its claim (the scheduler looks once more), a lost job
that is committed (the broker fences it), the status of one commit taken for that of another, and claims that wait for
a long forward: no job is lost by that. Samples that say "new" of an input that was there before, or "not new" of a
new one, cost forwards or digests only: no answer is wrong. A key without its tenant, or without its description, gives
no wrong answer either: the model of a schedule answers equal inputs alike, whoever asks, and other shapes have other
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from msgspec import structs

from penstock.registry.broker.base import Claim, CommitStatus, Delivery
from penstock.workers.backlog import Waiting
from penstock.workers.batch_run import BatchRun, JointAnswers
from penstock.workers.cache import JobKeys, SingleFlight
from penstock.workers.completer import CompletedRun, Completer, FallBack, NextTry, Rejoin, Settlement
from penstock.workers.intake import Intake
from penstock.workers.job import ClaimedJob
from penstock.workers.joint_results import JointResults
from penstock.workers.results import CachedAnswers
from penstock.workers.router import RoutedClaim
from penstock.workers.shared_headers import SharedHeaders
from penstock.workers.versions.version import ServedVersion
from tests.simulation.checker import Mutation
from tests.simulation.mutants import Mutant
from tests.simulation.parts import SteppedExecutor, SteppedRouter, SteppedScheduler
from tests.simulation.worker import STEPPED, SteppedDrain

__all__ = ["FAST_WAY_MUTANTS"]

_FOREVER_MS: Final = 1 << 50


# Headers


class _Headers(Intake):
    """An intake with other shared headers."""

    headers: type[SharedHeaders]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers.__class__ = self.headers


class _OneBody(SharedHeaders):
    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        job = super().open(delivery, now, broker_now)
        if job is not None:
            job.body = self.__dict__.setdefault("bodies", {}).setdefault(job.shared, job.body)
        return job


class HeaderWithABody(_Headers):
    """Jobs with one header have the body of the first of them."""

    headers = _OneBody


class _OneId(SharedHeaders):
    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        job = super().open(delivery, now, broker_now)
        if job is not None:
            first = self.__dict__.setdefault("ids", {}).setdefault(job.shared, job.header.id)
            job.header = structs.replace(job.header, id=first)
        return job


class HeaderWithAnId(_Headers):
    """Jobs with one header have the id of the first of them."""

    headers = _OneId


class _NoExpiry(SharedHeaders):
    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        job = super().open(delivery, now, broker_now)
        if job is not None:
            job.expires_ms += _FOREVER_MS
        return job


class HeaderWithoutADeadline(_Headers):
    """Jobs with a header that was seen before never expire."""

    headers = _NoExpiry


class _OneExpiry(SharedHeaders):
    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        job = super().open(delivery, now, broker_now)
        if job is not None:
            job.expires_ms = self.__dict__.setdefault("expiries", {}).setdefault(job.shared, job.expires_ms)
        return job


class HeaderWithAnExpiry(_Headers):
    """Jobs with one header expire when the first of them does."""

    headers = _OneExpiry


class _CrashesUnseen(SharedHeaders):
    def open(self, delivery: Delivery, now: float, broker_now: float) -> ClaimedJob | None:
        job = super().open(structs.replace(delivery, crashes=0), now, broker_now)
        if job is not None:
            job.delivery = delivery
        return job


class HeaderOfPoison(_Headers):
    """However many processes died of a job, it is opened if its header was seen before."""

    headers = _CrashesUnseen


# Routes


class ClaimFollowsItsFirstJob(SteppedRouter):
    """A new record of the active version counts for the next claim with jobs that are not plain."""

    def route_all(self, jobs: Iterable[ClaimedJob], broker_now: float) -> RoutedClaim:
        models = self._lifecycle.models
        for job in (jobs := list(jobs)):
            if job.shared is not None and job.shared.is_plain:
                job.delivery = structs.replace(job.delivery, active=models[job.delivery.slot].record)
        return super().route_all(jobs, broker_now)


class PlainSuspects(SteppedRouter):
    """A plain job runs with the others of its claim, also if a process died of it."""

    def route_all(self, jobs: Iterable[ClaimedJob], broker_now: float) -> RoutedClaim:
        jobs = list(jobs)
        deliveries = [(job, job.delivery) for job in jobs]
        for job, delivery in deliveries:
            job.delivery = structs.replace(delivery, crashes=0)
        routes = super().route_all(jobs, broker_now)
        for job, delivery in deliveries:
            job.delivery = delivery
        return routes


class OnlyPlainJobsRouted(SteppedRouter):
    """Of a claim with plain jobs the others are forgotten."""

    def route_all(self, jobs: Iterable[ClaimedJob], broker_now: float) -> RoutedClaim:
        routed = super().route_all(jobs, broker_now)
        return routed._replace(others=[]) if routed.running else routed


# Inputs and their description


class InputsJoinedInReverse(SteppedExecutor):
    """The inputs of a batch whose jobs are alike are joined from its last job to its first."""

    def run(self, run: BatchRun) -> None:
        jobs = run.jobs
        if len({job.header.content for job in jobs}) == 1 and all(job.decoded is None for job in jobs):
            for job, body in zip(jobs, [job.body for job in reversed(jobs)], strict=True):
                job.body = body
        super().run(run)


class _OneDescription(ServedVersion):
    def knows(self, job: ClaimedJob) -> bool:
        fit = next(iter(self._fits.values()), None)
        if fit is not None:
            job.rows = fit.rows
        return fit is not None


class DescriptionOfAnother(SteppedDrain):
    """Jobs have as many rows as the first job of their version."""

    def load(self) -> None:
        super().load()
        for version in self.lifecycle.turns:
            version.__class__ = _OneDescription


# Results


class RowsOfTheNeighbour(Completer):
    """Results that are sealed together have the rows of the next job."""

    def _joint_results(self, run: BatchRun) -> JointResults | None:
        answers, jobs = run.answers, run.jobs
        if isinstance(answers, JointAnswers):
            outputs = {name: np.roll(values, jobs[0].rows, axis=0) for name, values in answers.outputs.items()}
            run.answers = JointAnswers(outputs, jobs)
        return super()._joint_results(run)


class SecondDeliveryAsTheFirst(Completer):
    """Results that are sealed together state the first delivery of their jobs."""

    def _joint_results(self, run: BatchRun) -> JointResults | None:
        deliveries = [(job, job.delivery) for job in run.jobs]
        for job, delivery in deliveries:
            job.delivery = structs.replace(delivery, attempt=1)
        results = super()._joint_results(run)
        for job, delivery in deliveries:
            job.delivery = delivery
        return results


class RunCommittedByHalf(Completer):
    """Of the results that are sealed together the last is not committed."""

    def _joint_results(self, run: BatchRun) -> JointResults | None:
        results = super()._joint_results(run)
        if results is not None and len(results.commits) > 1:
            results.commits[-1] = results.commits[0]
        return results


class FencedRunCounted(Completer):
    """Of the results that were sealed together, those that the broker fenced count as completed."""

    def settle(self, statuses: Sequence[CommitStatus], begun: float) -> Settlement:
        together = sum(len(results.commits) for _, results in self._uncommitted_runs)
        return super().settle([CommitStatus.COMMITTED] * together + list(statuses[together:]), begun)


class RunNeverReleased(Completer):
    """Jobs that were settled together keep their room and their leases."""

    def _settle_run(self, run: BatchRun, jobs: list[ClaimedJob], now: float) -> CompletedRun:
        leased, self._leased = self._leased, type(self._leased)()
        rooms = [job.takes_room for job in jobs]
        completed = super()._settle_run(run, jobs, now)
        self._leased = leased
        for job, takes_room in zip(jobs, rooms, strict=True):
            job.takes_room = takes_room
            run.version.queue.in_memory += takes_room
        return completed


class RunSealedOnce(Completer):
    """Results that were sealed together are forgotten when the next ones are sealed, answered or not."""

    def seal(self) -> list[NextTry | Rejoin | FallBack]:
        self._uncommitted_runs = []
        return super().seal()


class AnswersCachedForTheNeighbour(Completer):
    """The answers of a batch are cached under the keys of the next jobs: they are made after the batch was sealed."""

    def keep_answers(self) -> None:
        for _, results in self._unkept:
            results.bodies.append(results.bodies.pop(0))
        super().keep_answers()


class ClaimsBesideCommitsOnly(SteppedDrain):
    """Jobs are claimed only when there is something to commit, and not only while a commit is near."""

    def _claims(self) -> list[Claim]:
        return super()._claims() if self._completer.has_work else []


class FoundAnswerForTheNeighbour(Completer):
    """Found answers that are sealed together are sealed for the jobs before theirs."""

    def add_cached(self, cached: CachedAnswers) -> None:
        super().add_cached(cached._replace(answers=[*cached.answers[1:], *cached.answers[:1]]))


# Short forwards


class ShortForwardsBesideOthers(SteppedScheduler):
    """A short forward is kept for the I/O thread while a model thread is busy."""

    def _submit(self, run: BatchRun, *, is_idle: bool) -> bool:
        return super()._submit(run, is_idle=True)


class ShortForwardsOfSuspects(SteppedScheduler):
    """A suspect runs on the I/O thread where its model's forwards were short."""

    def _may_keep(self, run: BatchRun) -> bool:
        is_as_built, run.is_as_built = run.is_as_built, False
        may_keep = super()._may_keep(run)
        run.is_as_built = is_as_built
        return may_keep


class KeptBehindSuspects(SteppedScheduler):
    """A batch that is kept in the turn of suspects is forgotten: further ones are submitted beside it."""

    def _dispatch_with_suspects(self, expired: list[Waiting]) -> bool:
        super()._dispatch_with_suspects(expired)
        return False


class ShortForwardNotHandedIn(SteppedExecutor):
    """What has run on the I/O thread is not among the ended runs."""

    def run_kept(self) -> None:
        run = self.kept
        super().run_kept()
        if run is not None and run in self._done:
            self._done.remove(run)


class ShortForwardForgotten(SteppedExecutor):
    """A batch that was kept for the I/O thread never runs."""

    def run_kept(self) -> None:
        run, self.kept = self.kept, None
        if run is not None and run in self._ready:
            self._ready.remove(run)


class ShortForwardNotWatched(SteppedExecutor):
    """No thread sees that a forward on the I/O thread hangs."""

    def overdue_here(self, now: float) -> str | None:
        return None


# Samples and keys


class SampledLeadersNeverEnd(SingleFlight):
    """A job that leads without a digest goes on leading when it has ended: later equal jobs wait for its answer."""

    def end_all(self, jobs: Iterable[ClaimedJob]) -> list[ClaimedJob]:
        jobs = list(jobs)
        alone = [job for job in jobs if job in self._alone]
        together = super().end_all(jobs)
        self._alone.update(dict.fromkeys(alone))
        return together


class OneKeyForAClaim(SteppedRouter):
    """The jobs of a claim have the digest of its first job."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keys.__class__ = _OneKey


class _OneKey(JobKeys):
    def begin_all(self, jobs: Sequence[ClaimedJob], label: str) -> None:
        super().begin_all(jobs, label)
        for job in jobs:
            job.digest = jobs[0].digest


def _misled(finding: str, **part: type[Any]) -> Mutant:
    (kind,) = part.values()
    return Mutant(Mutation(kind.__name__, types=replace(STEPPED, **part)), finding)


FAST_WAY_MUTANTS: Final[tuple[Mutant, ...]] = (
    _misled("the answer of another", intake=HeaderWithABody),
    _misled("lost", intake=HeaderWithAnId),
    _misled("ran after its deadline", intake=HeaderWithoutADeadline),
    _misled("expired before its deadline", intake=HeaderWithAnExpiry),
    _misled("no end", intake=HeaderOfPoison),
    _misled("answered by a version of before", router=ClaimFollowsItsFirstJob),
    _misled("a suspect in company", router=PlainSuspects),
    _misled("no end", router=OnlyPlainJobsRouted),
    _misled("the answer of another", executor=InputsJoinedInReverse),
    _misled("ended failed", drain=DescriptionOfAnother),
    _misled("the answer of another", completer=RowsOfTheNeighbour),
    _misled("told of attempt", completer=SecondDeliveryAsTheFirst),
    _misled("reported", completer=RunCommittedByHalf),
    _misled("reported", completer=FencedRunCounted),
    _misled("no end", completer=RunNeverReleased),
    _misled("no end", completer=RunSealedOnce),
    _misled("the answer of another", completer=AnswersCachedForTheNeighbour),
    _misled("no end", drain=ClaimsBesideCommitsOnly),
    _misled("the answer of another", completer=FoundAnswerForTheNeighbour),
    _misled("ran on the I/O thread beside a model thread", scheduler=ShortForwardsBesideOthers),
    _misled("ran a suspect on the I/O thread", scheduler=ShortForwardsOfSuspects),
    _misled("submitted beside a batch that is kept", scheduler=KeptBehindSuspects),
    _misled("no end", executor=ShortForwardNotHandedIn),
    _misled("no end", executor=ShortForwardForgotten),
    _misled("no end", executor=ShortForwardNotWatched),
    _misled("no end", flights=SampledLeadersNeverEnd),
    _misled("the answer of another", router=OneKeyForAClaim),
)
