"""Ended runs -> another try, or a sealed commit -> settled.

    collect: a run that ended -> an outcome per job
    seal:    outcomes -> commits;  a failed try with tries left -> NextTry;  a follower without an answer -> Rejoin
    settle:  the broker's answer -> the committed jobs leave this worker's memory

The drain puts the jobs of each NextTry and Rejoin where they belong.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from penstock.registry.broker.base import Commit, CommitStatus, State
from penstock.registry.envelope import Failure, Keyring
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.backlog import Waiting
from penstock.workers.batch_run import BatchRun
from penstock.workers.cache import AnswerCache, SingleFlight
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.listener import Failed, JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import JobOutcome, commit_of
from penstock.workers.versions.version import ServedModel, ServedVersion

__all__ = ["Completer", "NextTry", "Rejoin", "Settlement"]

logger = logging.getLogger("penstock.server")


class NextTry(NamedTuple):
    """A job that failed, and that its retry policy gives another try after `pause_s` seconds."""

    job: ClaimedJob
    version: ServedVersion
    pause_s: float


class Rejoin(NamedTuple):
    """A job whose leader ended without an answer for it: it needs another leader, or a forward."""

    job: ClaimedJob
    version: ServedVersion


class Settlement(NamedTuple):
    """One commit that the broker answered. Times are monotonic seconds."""

    outcomes: list[tuple[JobOutcome, State]]
    by_run: dict[BatchRun | None, list[JobOutcome]]
    """The same outcomes by their run; None: without a run."""
    commit_s: float
    at: float


class Completer:
    """The ended jobs of one worker, until the broker has them. The I/O thread owns it.

    models: by name. client_tracebacks: see commit_of. jitter: random numbers in [0, 1). now_ms: milliseconds by the
    broker's clock. clock: monotonic seconds.
    """

    def __init__(
        self,
        worker: str,
        keyring: Keyring,
        models: dict[str, ServedModel],
        leased: LeasedJobs,
        flights: SingleFlight,
        answers: AnswerCache,
        listener: JobListener,
        metrics: InferenceMetrics,
        *,
        client_tracebacks: bool,
        now_ms: Callable[[], float],
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self._client_tracebacks = client_tracebacks
        self._worker = worker
        self._keyring = keyring
        self._models = models
        self._leased = leased
        self._flights = flights
        self._answers = answers
        self._listener = listener
        self._metrics = metrics
        self._now_ms = now_ms
        self._clock = clock
        self._jitter = jitter
        self._outcomes: list[JobOutcome] = []
        self._uncommitted: list[tuple[JobOutcome, Commit]] = []
        self._unobserved: list[tuple[BatchRun, float]] = []

    @property
    def has_work(self) -> bool:
        """Whether there is something to seal or to commit."""
        return bool(self._outcomes or self._uncommitted)

    # In

    def collect(self, runs: Iterable[BatchRun]) -> None:
        """These runs have ended: each of their jobs has an outcome."""
        for run in runs:
            version = run.version
            version.queue.in_flight -= 1
            version.used_at = run.ended
            if run.misfits:
                self._metrics.out_of_memory(version.name, version.label)
                if (too_large := run.too_large) is not None:
                    version.queue.cap_batches(too_large, self._clock())
            self._outcomes += [
                JobOutcome(item.job, answer, "refused", version)
                if answer is CANCELLED or answer is EXPIRED
                else JobOutcome(item.job, answer, "ran", version, run)
                for item, answer in zip(run.batch.items, run.answers, strict=True)
            ]

    def add(self, outcome: JobOutcome) -> None:
        """A job ended without a run."""
        self._outcomes.append(outcome)

    def refuse(self, jobs: Iterable[Waiting], failure: Failure) -> None:
        """These jobs will not run."""
        self._outcomes += [JobOutcome(job, failure, "refused", version) for job, version in jobs]

    # Outcomes -> commits

    def seal(self) -> list[NextTry | Rejoin]:
        """Seal every outcome, and the same outcome for each follower; returns the jobs that go on instead."""
        outcomes, self._outcomes = self._outcomes, []
        retries: list[NextTry | Rejoin] = []
        for outcome in outcomes:
            job = outcome.job
            if job.header.options.retry is not None and (pause_s := self._pause_s(outcome)) is not None:
                retries += self._try_again(outcome, pause_s)
                continue
            followers = self._flights.end(job) if job.digest else []
            if job.is_lost:
                self._forget(outcome)
            else:
                sealed = self._sealed(outcome)
                self._uncommitted.append(sealed)
                if job.digest:
                    outcome = sealed[0]
                    self._answers.keep(outcome, self._models[job.delivery.slot].active)
            if not followers:
                continue
            if job.is_lost or outcome.state in (State.CANCELLED, State.EXPIRED):
                # The end of the leader says nothing about its followers.
                retries += _rejoining(followers)
            else:
                self._uncommitted += [self._sealed(outcome.of_follower(*follower)) for follower in followers]
        return retries

    def _sealed(self, outcome: JobOutcome) -> tuple[JobOutcome, Commit]:
        return commit_of(outcome, worker=self._worker, keyring=self._keyring, client_tracebacks=self._client_tracebacks)

    def _pause_s(self, outcome: JobOutcome) -> float | None:
        """The pause before the job's next try; None: its retry policy gives it no other one."""
        job, policy = outcome.job, outcome.job.header.options.retry
        if policy is None or outcome.how != "ran" or outcome.state is not State.FAILED:
            return None
        if outcome.run is not None and outcome.run.is_given_up:
            # It was the last forward, and this process has none to give.
            return None
        if job.tries >= policy.attempts or job.is_lost or job.is_cancelled:
            return None
        pause_s = policy.pause_s(job.tries, self._jitter())
        return pause_s if self._now_ms() + pause_s * 1000 <= job.expires_ms else None

    def _try_again(self, outcome: JobOutcome, pause_s: float) -> list[NextTry | Rejoin]:
        job, version, failure = outcome.job, outcome.version, outcome.failure
        if failure is None or version is None:
            raise RuntimeError("a job that did not fail was to be tried again")
        self._listener.retried([Failed(job.header, failure)], time.time())
        self._metrics.retried(version.name, version.label, job.route)
        job.tries += 1
        # The pause may be longer than its followers can wait: they go ahead.
        return [*_rejoining(self._flights.end(job)), NextTry(job, version, pause_s)]

    # Commits -> settled

    @property
    def commits(self) -> list[Commit]:
        """The commits that the broker has not answered yet."""
        return [commit for _, commit in self._uncommitted]

    def settle(self, statuses: Sequence[CommitStatus], begun: float) -> Settlement:
        """The broker has answered `commits`, asked for at `begun`: the jobs leave this worker's memory."""
        pending, self._uncommitted = self._uncommitted, []
        now = self._clock()
        settled: list[tuple[JobOutcome, State]] = []
        by_run: defaultdict[BatchRun | None, list[JobOutcome]] = defaultdict(list)
        for (outcome, commit), status in zip(pending, statuses, strict=True):
            if outcome.version is not None:
                outcome.version.queue.release(outcome.job)
            if status is CommitStatus.COMMITTED:
                settled.append((outcome, commit.state))
                by_run[outcome.run].append(outcome)
            elif status is CommitStatus.FENCED:
                self._metrics.fenced(commit.slot, outcome.label, outcome.job.route)
                logger.warning("a late commit was discarded", extra={"job_id": commit.job_id, "model": commit.slot})
        self._leased.drop([outcome.job for outcome, _ in pending])
        self._unobserved += [(run, now) for run in by_run if run is not None and not run.is_given_up]
        return Settlement(settled, by_run, now - begun, now)

    def steer(self) -> None:
        """Let each committed run steer the size of the next batches, and let observers learn from it.

        Observers do not see runs of the model as built. Such runs would distort the measured time of the form in use,
        and their jobs may have killed a process.
        """
        unobserved, self._unobserved = self._unobserved, []
        for run, now in unobserved:
            version = run.version
            totals_s = [job.queue_ms / 1000 + now - job.claimed for job in run.jobs]
            version.queue.observe(run.batch, run.ended - run.started, totals_s, now)
            if version.observer is not None and not run.is_as_built:
                version.observer.observe(run.observation)

    def _forget(self, outcome: JobOutcome) -> None:
        """Another worker has the job: this outcome does not count."""
        if outcome.version is not None:
            outcome.version.queue.release(outcome.job)
        self._leased.drop([outcome.job])


def _rejoining(followers: Sequence[Waiting]) -> list[Rejoin]:
    return [Rejoin(job, version) for job, version in followers if version is not None]
