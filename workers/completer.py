"""Ended runs -> another try, or a sealed commit -> settled.

    collect: a run that ended -> an outcome per job; those with large results wait for their turns
             a job of more tokens than have room here -> take_too_long
    seal:    outcomes -> commits;  a failed try with tries left -> NextTry;  a follower without an answer -> Rejoin
             a failed job whose policy names another version -> FallBack
    settle:  the broker's answer -> the committed jobs leave this worker's memory

A run whose jobs are alike and all completed stays whole from `collect` to `settle`, and so do the jobs of a claim that
the cache answered: see joint_results.py.

The drain puts the jobs of each NextTry, Rejoin and FallBack where they belong.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from msgspec import structs

from penstock.registry.broker.base import Commit, CommitStatus, State
from penstock.registry.envelope import Failure, Keyring
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.backlog import Waiting
from penstock.workers.batch_run import BatchRun, JointAnswers, Outputs
from penstock.workers.cache import AnswerCache, SingleFlight
from penstock.workers.credit import TURN_BYTES
from penstock.workers.fallback import fallen_back, with_levels
from penstock.workers.job import ClaimedJob, FellBack
from penstock.workers.joint_results import JointResults, JointSealer
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.listener import Failed, JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import UNTELLABLE, CachedAnswers, EncodedOutputs, JobOutcome, commit_of
from penstock.workers.runtime.tracebacks import name_of
from penstock.workers.unsent import UnsentOutcomes, without_outputs
from penstock.workers.versions.version import ServedModel, ServedVersion

__all__ = ["CompletedFromCache", "CompletedRun", "Completer", "FallBack", "NextTry", "Rejoin", "Settlement"]

_LARGE_BYTES: Final = 64 * 1024
"""A cached answer above this waits for its turn, like the results of a large batch."""

logger = logging.getLogger("penstock.server")


class NextTry(NamedTuple):
    """A job that failed, and that its retry policy gives another try after `pause_s` seconds."""

    job: ClaimedJob
    version: ServedVersion
    pause_s: float


class FallBack(NamedTuple):
    """A job that every level of its version failed, and that goes on to the version of the policy. outcome: the end of
    the job, where that version is not here."""

    job: ClaimedJob
    version: ServedVersion
    outcome: JobOutcome


class Rejoin(NamedTuple):
    """A job whose leader ended without an answer for it: it needs another leader, or a forward of its own."""

    job: ClaimedJob
    version: ServedVersion


class CompletedRun(NamedTuple):
    """A run whose jobs are all committed with outputs, and the seconds of each from its acceptance on."""

    run: BatchRun
    jobs: list[ClaimedJob]
    """With their followers."""
    totals_s: list[float]


class CompletedFromCache(NamedTuple):
    """Jobs of one claim that are all committed with cached answers, and the seconds of each from its acceptance on."""

    version: ServedVersion
    jobs: list[ClaimedJob]
    totals_s: list[float]


class Settlement(NamedTuple):
    """One commit that the broker answered. Times are monotonic seconds."""

    completed: list[CompletedRun]
    """Whole runs; their jobs have no outcomes below."""
    outcomes: list[tuple[JobOutcome, State]]
    by_run: dict[BatchRun | None, list[JobOutcome]]
    """The same outcomes by their run; None: without a run."""
    commit_s: float
    at: float
    from_cache: Sequence[CompletedFromCache] = ()
    """Their jobs have no outcomes above."""


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
        self._too_long: list[JobOutcome] = []
        """Of jobs with more tokens than have room here. Another worker may have room for them."""
        self._texts: list[JobOutcome] = []
        """Of jobs with cached texts, whose events are not written yet."""
        self._unsent = UnsentOutcomes()
        self._committed_parts: defaultdict[BatchRun, list[JobOutcome]] = defaultdict(list)
        """Of the batches that are committed in part."""
        self._uncommitted: list[tuple[JobOutcome, Commit]] = []
        self._joint: list[BatchRun] = []
        """Runs with joint answers that are not sealed yet."""
        self._uncommitted_runs: list[tuple[BatchRun, JointResults]] = []
        self._cached: list[CachedAnswers] = []
        """Not sealed yet."""
        self._uncommitted_cached: list[tuple[CachedAnswers, list[Commit]]] = []
        self._unkept: deque[tuple[BatchRun, JointResults]] = deque()
        """Answers of sealed runs that are not cached yet."""
        self._sealer = JointSealer(worker=worker, keyring=keyring)
        self._unobserved: list[tuple[BatchRun, list[float], float]] = []

    @property
    def has_work(self) -> bool:
        """Whether there is something to seal or to commit."""
        return bool(
            self._outcomes
            or self._too_long
            or self._texts
            or self._joint
            or self._cached
            or self._uncommitted
            or self._uncommitted_runs
            or self._uncommitted_cached
            or self._unsent
        )

    @property
    def _has_uncommitted(self) -> bool:
        return bool(self._uncommitted or self._uncommitted_runs or self._uncommitted_cached)

    @property
    def has_unsent(self) -> bool:
        """Whether large results wait for their turns."""
        return bool(self._unsent)

    def give_up_unsent(self) -> list[ClaimedJob]:
        """Drop the large results that wait; returns their jobs."""
        return self._unsent.take_all()

    # In

    def collect(self, runs: Iterable[BatchRun]) -> None:
        """These runs have ended: each of their jobs has an outcome."""
        for run in runs:
            version = run.version
            version.queue.in_flight -= 1
            version.used_at = run.ended
            version.queue.note_forward(run.ended - run.started)
            if run.misfits:
                self._metrics.out_of_memory(version.name, version.label)
                if (too_large := run.too_large) is not None:
                    version.queue.cap_batches(too_large, self._clock())
            if run.output_bytes or version.queue.row_bytes:
                version.queue.learn_results(run.batch, run.output_bytes)
            # A refused job leaves as one that was refused when it came: of no version.
            version.queue.release_all(run.refusals)
            if run.num_tokens_needed:
                self._too_long += _outcomes_of(run)
            elif run.output_bytes > TURN_BYTES:
                self._unsent.add(_outcomes_of(run))
            elif isinstance(run.answers, JointAnswers):
                self._joint.append(run)
            else:
                self._outcomes += _outcomes_of(run)

    def take_too_long(self) -> list[JobOutcome]:
        """The outcomes of jobs that are too long for this worker. `add` those that no other one has room for."""
        outcomes, self._too_long = self._too_long, []
        return outcomes

    def keep_too_long(self, outcomes: Iterable[JobOutcome]) -> None:
        """These could not be handed over yet: `take_too_long` returns them again."""
        self._too_long += outcomes

    def add(self, outcome: JobOutcome) -> None:
        """A job ended without a run. If it has a cached text, its events come first: see take_texts."""
        if outcome.how == "cached" and outcome.version is not None and outcome.version.spec.streams:
            self._texts.append(outcome)
        else:
            self._add(outcome)

    def take_texts(self) -> list[JobOutcome]:
        """The outcomes of jobs with cached texts. `add_written` those whose events are written."""
        outcomes, self._texts = self._texts, []
        return outcomes

    def keep_texts(self, outcomes: Iterable[JobOutcome]) -> None:
        """The events of these could not be written yet: `take_texts` returns them again."""
        self._texts += outcomes

    def add_written(self, outcomes: Iterable[JobOutcome]) -> None:
        """The subscribers of these jobs have the cached texts."""
        for outcome in outcomes:
            self._add(outcome)

    def _add(self, outcome: JobOutcome) -> None:
        if isinstance(outcome.answer, EncodedOutputs) and outcome.nbytes > _LARGE_BYTES:
            self._unsent.add([outcome])
        else:
            self._outcomes.append(outcome)

    def add_cached(self, cached: CachedAnswers) -> None:
        """The cache has answered these jobs."""
        if cached.version.spec.streams or any(len(answer.body) > _LARGE_BYTES for answer in cached.answers):
            for outcome in cached.outcomes():
                self.add(outcome)
        else:
            self._cached.append(cached)

    def refuse(self, jobs: Iterable[Waiting], failure: Failure) -> None:
        """These jobs will not run."""
        self._outcomes += [JobOutcome(job, failure, "refused", version) for job, version in jobs]

    # Outcomes -> commits

    def seal(self) -> list[NextTry | Rejoin | FallBack]:
        """Seal every outcome, and the same outcome for each follower; returns the jobs that go on instead.

        Of large results: as many as one round trip carries. While commits wait for their answer, none.
        """
        has_uncommitted = self._has_uncommitted
        self._seal_together()
        outcomes, self._outcomes = self._outcomes, []
        # Small results of this turn do not count: beside a steady flow of them, a large one would wait for ever.
        if self._unsent and not has_uncommitted:
            outcomes += self._unsent.take()
        retries: list[NextTry | Rejoin | FallBack] = []
        for outcome in outcomes:
            job = outcome.job
            if isinstance(outcome.answer, Failure):
                if (fell_back := fallen_back(outcome)) is not None:
                    retries += self._fall_back(outcome, fell_back)
                    continue
                outcome = with_levels(outcome)
            if job.header.options.retry is not None and (pause_s := self._pause_s(outcome)) is not None:
                retries += self._try_again(outcome, pause_s)
                continue
            followers = self._flights.end(job)
            if job.is_lost:
                self._forget(outcome)
            else:
                sealed = self._sealed(outcome)
                self._uncommitted.append(sealed)
                if job.digest:
                    outcome = sealed[0]
                    self._answers.keep(outcome, self._models[job.delivery.slot].answering(outcome.version))
            if not followers:
                continue
            if not job.is_lost and outcome.state is State.COMPLETED:
                self._follow(outcome, followers)
                continue
            # The end of the leader says nothing about its followers.
            if outcome.state is State.FAILED:
                _part(followers)
            retries += _rejoining(followers)
        return retries

    def _seal_together(self) -> None:
        """Seal the runs and the cached answers whose jobs are alike; the others become outcomes."""
        runs, self._joint = self._joint, []
        for run in runs:
            if (results := self._joint_results(run)) is not None:
                self._uncommitted_runs.append((run, results))
            else:
                self._outcomes += _outcomes_of(run)
        found, self._cached = self._cached, []
        for cached in found:
            if (commits := self._sealer.of_cached(cached)) is not None:
                self._uncommitted_cached.append((cached, commits))
            else:
                self._outcomes += cached.outcomes()

    def _joint_results(self, run: BatchRun) -> JointResults | None:
        """The results of a run as a whole; its jobs lead no longer, and equal ones may find their answers."""
        jobs, active = run.jobs, self._models[run.version.name].answering(run.version)
        followers = self._flights.followers_of(jobs)
        keeps = self._answers.keeps(run, active)
        try:
            results = self._sealer.of_run(run, followers, keeps=keeps)
        except BaseException as error:  # as in _sealed, which meets the error again, job by job
            logger.debug("a batch is sealed job by job: %s", name_of(error))
            return None
        if results is not None:
            self._flights.end_all(jobs)
            if results.bodies:
                self._unkept.append((run, results))
        return results

    def keep_answers(self) -> None:
        """Cache the answers of sealed runs. Call it before the next jobs are looked up, or equal ones run again."""
        while self._unkept:
            run, results = self._unkept.popleft()
            if (alike := results.answers_alike(run)) is not None:
                self._answers.keep_alike(run.jobs, alike, run)
            else:
                self._answers.keep_all(results.answers(run), run)

    def _follow(self, outcome: JobOutcome, followers: Sequence[Waiting]) -> None:
        """Followers of a large result wait for their turns: each has a copy of it."""
        outcomes = [outcome.of_follower(*follower) for follower in followers]
        if outcome.nbytes * len(outcomes) > TURN_BYTES:
            self._unsent.add(outcomes)
        else:
            self._uncommitted += map(self._sealed, outcomes)

    def _sealed(self, outcome: JobOutcome) -> tuple[JobOutcome, Commit]:
        """The commit of an outcome, or of its failure if the outcome cannot be sent: the outputs are the model's."""
        try:
            return self._commit_of(outcome)
        except BaseException as error:  # an element of an output may be any object, with methods that raise anything
            facts = {"job_id": outcome.job.header.id, "model": outcome.job.delivery.slot, "error": name_of(error)}
            logger.error("an outcome cannot be sent", extra=facts)
            return self._commit_of(structs.replace(outcome, answer=UNTELLABLE))

    def _commit_of(self, outcome: JobOutcome) -> tuple[JobOutcome, Commit]:
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

    def _fall_back(self, outcome: JobOutcome, fell_back: FellBack) -> list[NextTry | Rejoin | FallBack]:
        job, version, failure = outcome.job, outcome.version, outcome.failure
        if failure is None or version is None:
            raise RuntimeError("a job that did not fail was to fall back")
        self._listener.retried([Failed(job.header, failure)], time.time())
        self._metrics.retried(version.name, version.label, job.route)
        followers = _rejoining(self._flights.end(job))
        # Its answer is that of another version: no equal job shares it, and no other result looks like it.
        job.fell_back, job.digest, job.shared = fell_back, b"", None
        return [*followers, FallBack(job, version, outcome)]

    def _try_again(self, outcome: JobOutcome, pause_s: float) -> list[NextTry | Rejoin | FallBack]:
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
        commits = [commit for _, results in self._uncommitted_runs for commit in results.commits]
        for _, of_cached in self._uncommitted_cached:
            commits += of_cached
        return commits + [commit for _, commit in self._uncommitted]

    def settle(self, statuses: Sequence[CommitStatus], begun: float) -> Settlement:
        """The broker has answered `commits`, asked for at `begun`: the jobs leave this worker's memory."""
        runs, self._uncommitted_runs = self._uncommitted_runs, []
        found, self._uncommitted_cached = self._uncommitted_cached, []
        pending, self._uncommitted = self._uncommitted, []
        now = self._clock()
        completed: list[CompletedRun] = []
        from_cache: list[CompletedFromCache] = []
        told = iter(statuses)
        one_by_one: list[tuple[tuple[JobOutcome, Commit], CommitStatus]] = []
        for joint, results in runs:
            of_run = [*itertools.islice(told, len(results.commits))]
            if of_run.count(CommitStatus.COMMITTED) == len(of_run):
                completed.append(self._settle_run(joint, results.jobs, now))
            else:
                outcomes = _outcomes_with(joint, results)
                one_by_one += zip(zip(outcomes, results.commits, strict=True), of_run, strict=True)
        for cached, commits in found:
            of_cached = [*itertools.islice(told, len(commits))]
            if of_cached.count(CommitStatus.COMMITTED) == len(of_cached):
                self._leased.drop(cached.jobs)
                from_cache.append(CompletedFromCache(cached.version, cached.jobs, _totals_s(cached.jobs, now)))
            else:
                one_by_one += zip(zip(cached.outcomes(), commits, strict=True), of_cached, strict=True)
        one_by_one += zip(pending, told, strict=True)
        settled: list[tuple[JobOutcome, State]] = []
        by_run: defaultdict[BatchRun | None, list[JobOutcome]] = defaultdict(list)
        for (outcome, commit), status in one_by_one:
            if outcome.version is not None:
                outcome.version.queue.release(outcome.job)
            if status is CommitStatus.COMMITTED:
                settled.append((outcome, commit.state))
                by_run[outcome.run].append(outcome)
            elif status is CommitStatus.FENCED:
                self._metrics.fenced(commit.slot, outcome.label, outcome.job.route)
                logger.warning("a late commit was discarded", extra={"job_id": commit.job_id, "model": commit.slot})
        self._leased.drop([outcome.job for (outcome, _), _ in one_by_one])
        whole = self._whole_runs(by_run) if self._unsent or self._committed_parts else by_run
        observed = [run for run in whole if run is not None and not run.is_given_up]
        self._unobserved += [(run, _totals_s(run.jobs, now), now) for run in observed]
        return Settlement(completed, settled, whole, now - begun, now, from_cache)

    def _settle_run(self, run: BatchRun, jobs: list[ClaimedJob], now: float) -> CompletedRun:
        """jobs: with their followers."""
        run.version.queue.release_all(jobs)
        self._leased.drop(jobs)
        totals_s = _totals_s(jobs, now)
        has_followers = len(jobs) > len(run.batch.items)
        self._unobserved.append((run, _totals_s(run.jobs, now) if has_followers else totals_s, now))
        return CompletedRun(run, jobs, totals_s)

    def _whole_runs(self, by_run: dict[BatchRun | None, list[JobOutcome]]) -> dict[BatchRun | None, list[JobOutcome]]:
        """The same with every batch whole: one that is committed in part waits for its last part."""
        whole: dict[BatchRun | None, list[JobOutcome]] = {None: by_run[None]} if None in by_run else {}
        for run, outcomes in by_run.items():
            if run is not None:
                self._committed_parts[run] += map(without_outputs, outcomes)
        for run in [run for run in self._committed_parts if not self._unsent.has(run)]:
            whole[run] = self._committed_parts.pop(run)
        return whole

    def steer(self) -> None:
        """Let each committed run steer the size of the next batches, and let observers learn from it.

        Observers do not see runs of the model as built. Such runs would distort the measured time of the form in use,
        and their jobs may have killed a process.
        """
        unobserved, self._unobserved = self._unobserved, []
        for run, totals_s, now in unobserved:
            version = run.version
            version.queue.observe(run.batch, run.ended - run.started, totals_s, now)
            if version.observer is not None and not run.is_as_built:
                version.observe(run.observation)

    def _forget(self, outcome: JobOutcome) -> None:
        """Another worker has the job: this outcome does not count."""
        if outcome.version is not None:
            outcome.version.queue.release(outcome.job)
        self._leased.drop([outcome.job])


def _outcomes_of(run: BatchRun) -> list[JobOutcome]:
    return [_outcome_of(item.job, answer, run) for item, answer in zip(run.batch.items, run.answers, strict=True)]


def _outcome_of(job: ClaimedJob, answer: Outputs | Failure, run: BatchRun) -> JobOutcome:
    if run.refusals and run.refusals.get(job) is answer:
        return JobOutcome(job, answer, "refused", None)
    if answer is CANCELLED or answer is EXPIRED:
        return JobOutcome(job, answer, "refused", run.version)
    return JobOutcome(job, answer, "ran", run.version, run)


def _outcomes_with(run: BatchRun, results: JointResults) -> list[JobOutcome]:
    """The outcomes of the jobs of a run and of their followers, in the order of their results."""
    of_batch = {outcome.job: outcome for outcome in _outcomes_of(run)}
    outcomes: list[JobOutcome] = []
    for job in results.jobs:
        own = of_batch.get(job)
        if own is not None:
            leader = own
        outcomes.append(own or leader.of_follower(job, run.version))
    return outcomes


def _totals_s(jobs: Iterable[ClaimedJob], now: float) -> list[float]:
    return [job.queue_ms / 1000 + now - job.claimed for job in jobs]


def _part(followers: Sequence[Waiting]) -> None:
    """Let each of them have a forward of its own: they would fail one after the other behind a new leader."""
    for job, _ in followers:
        job.digest = b""


def _rejoining(followers: Sequence[Waiting]) -> list[NextTry | Rejoin | FallBack]:
    return [Rejoin(job, version) for job, version in followers if version is not None]
