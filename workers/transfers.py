"""Jobs from part to part: each is put where its route says.

    claimed, tried again, or left over -- JobRouter --> a route --> Backlog, Completer, Releaser, or AnswerCache

All methods are called on the I/O thread; see workers/drain.py.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from penstock.registry.broker.base import Delivery, Held
from penstock.registry.envelope import Failure
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.safety.fallback import LevelFailure
from penstock.workers.completer import FallBack, NextTry, Rejoin
from penstock.workers.drain_parts import DrainLimits, DrainParts
from penstock.workers.job import ClaimedJob
from penstock.workers.results import CachedAnswers, JobOutcome
from penstock.workers.router import Answered, Aside, HandOver, Route, Run, Seek, Suspect, is_of_arm
from penstock.workers.versions.version import ServedVersion, VersionState

__all__ = ["JobTransfers"]

logger = logging.getLogger("penstock.server")

_REFUSE_EVERY_S: Final = 0.25
"""Between two looks for jobs whose time has passed."""


class JobTransfers:
    """Moves the jobs of one drain between its parts. checkpoint, clock: see Drain."""

    def __init__(
        self,
        parts: DrainParts,
        limits: DrainLimits,
        *,
        checkpoint: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._parts: Final = parts
        self._limits = limits
        self._checkpoint = checkpoint
        self._clock = clock
        self._broker = parts.broker
        self._backlog = parts.backlog
        self._completer = parts.completer
        self._refuse_at = clock()

    def admit(self, deliveries: Sequence[Delivery]) -> None:
        """Open the claimed jobs, and put each where its route says."""
        if not deliveries:
            return
        self._checkpoint("after-claim")
        now, broker_now = self._clock(), self._broker.now_ms()
        opened = self._parts.intake.open_all(deliveries, now, broker_now)
        self._parts.leased.take(opened)
        self._parts.listener.received([job.header for job in opened], time.time())
        routed = self._parts.router.route_all(opened, broker_now)
        for cached in routed.cached:
            self._completer.add_cached(cached)
        for job, route in routed.others:
            self.put(job, route)
        for version, jobs in routed.sought.items():
            self._seek(version, jobs)
        for version, jobs in routed.running.items():
            self._await_batch(version, jobs)
        self._checkpoint("before-batch")

    def resume_delayed(self) -> None:
        """Jobs whose pause before another try has passed go on."""
        for job, version in self._backlog.take_due(self._clock()):
            self.put(job, self._parts.router.resume(job, version))

    def apply_retries(self, retries: Iterable[NextTry | Rejoin | FallBack]) -> None:
        """Jobs that failed wait for another try, follow a new leader, or fall back to another version."""
        for retry in retries:
            job, version = retry.job, retry.version
            if isinstance(retry, Rejoin):
                self.put(job, self._parts.router.rejoin(job, version))
                continue
            if isinstance(retry, FallBack):
                self._fall_back(retry)
                continue
            pause_s = retry.pause_s
            limits = self._limits
            if self._backlog.delayed >= limits.most_delayed or self._backlog.delayed_bytes > limits.most_bytes // 2:
                # Too many wait already: they would keep out jobs that have not failed.
                pause_s = 0.0
            self._backlog.delay(version, job, self._clock() + pause_s)

    def reroute(self, jobs: Iterable[ClaimedJob]) -> None:
        """Their version cannot be loaded here: another worker may have it. Each follower goes its own way."""
        for job in self._parts.flights.end_all(jobs):
            if job.fell_back is not None:
                failure = Failure("ModelError", job.fell_back.failures[-1].reason)
                self._end_fallen(JobOutcome(job, failure, "ran", None), "skipped: its version cannot be loaded here")
                continue
            self.put(job, Aside.UNPLACED if job.header.version else Aside.GIVE_BACK)

    def take_in_answers(self) -> None:
        """Jobs whose answer a tier had are answered, with their followers; the others wait for a forward."""
        for version, found, missing in self._parts.answers.take_answered():
            if running := self._backlog.take_sought(missing):
                self._await_batch(version, running)
            answers = dict(found)
            jobs = self._backlog.take_sought(answers)
            if not jobs:
                continue
            version.queue.release_all(jobs)
            self._parts.listener.started([job.header for job in jobs], time.time())
            cached = CachedAnswers(version, [], [])
            for leader in jobs:
                for job in self._parts.flights.end_all([leader]):
                    cached.jobs.append(job)
                    cached.answers.append(answers[leader])
            self._completer.add_cached(cached)

    def leave_stopped_arms(self) -> None:
        """Jobs that wait for an arm whose circuit breaker has opened go to the version in production."""
        if self._parts.arm_breakers is None:
            return
        for change in self._parts.arm_breakers.take_changes():
            if stopped := self._parts.lifecycle.follow_breaker(*change):
                self._parts.scheduler.recall_all()
            for version in stopped:
                waiting = self._backlog.take_version(version, is_of_arm)
                self._backlog.add_unplaced(self._parts.flights.end_all(job for job, _ in waiting))

    def place_unplaced(self) -> None:
        """Give each job that names a version to the workers that have it; it fails if no live worker has it.

        Raises BrokerUnavailable, and then keeps the jobs.
        """
        if not self._backlog.has_unplaced:
            return
        with_searched, broker_now = self._parts.placement.look(), self._broker.now_ms()
        leaving: defaultdict[tuple[str, str], list[ClaimedJob]] = defaultdict(list)
        for job in self._backlog.take_unplaced(with_searched=with_searched):
            route = self._parts.router.place(job, broker_now, waiting=self._backlog.searched)
            if isinstance(route, HandOver):
                leaving[job.header.model, route.label].append(job)
            elif route is Aside.UNPLACED:
                self._backlog.add_unplaced([job], is_searched=True)
            else:
                self.put(job, route)
        self._hand_over(leaving)

    def send_ahead(self) -> None:
        """Send what comes before the commits. Raises BrokerUnavailable, and then keeps the jobs."""
        self._hand_over_long()
        self._write_texts()

    def _hand_over_long(self) -> None:
        """Jobs with too many tokens for this worker go to those with the most room. Where none has enough, they fail.

        Raises BrokerUnavailable, and then keeps the jobs.
        """
        outcomes = deque(self._completer.take_too_long())
        while outcomes:
            outcome = outcomes.popleft()
            job, version, run = outcome.job, outcome.version, outcome.run
            receiver = ""
            if version is not None and run is not None and not (job.is_lost or job.is_cancelled):
                receiver = self._parts.placement.receiver_with_room(version, run.num_tokens_needed)
            if version is None or not receiver:
                self._completer.add(outcome)
                continue
            try:
                self._parts.releaser.hand_over([job], version.name, receiver)
            except BrokerUnavailable:
                self._completer.keep_too_long([outcome, *outcomes])
                raise
            version.queue.release(job)

    def _write_texts(self) -> None:
        """Write the events of cached texts. Raises BrokerUnavailable, and then keeps the jobs."""
        if not (outcomes := self._completer.take_texts()):
            return
        try:
            self._parts.texts.write(outcomes)
        except BrokerUnavailable:
            self._completer.keep_texts(outcomes)
            raise
        self._completer.add_written(outcomes)

    def put(self, job: ClaimedJob, route: Route) -> None:
        """Put one job where its route says."""
        if isinstance(route, Answered):
            self._completer.add(route.outcome)
        elif isinstance(route, Run):
            self._await_batch(route.version, [job])
        elif isinstance(route, Seek):
            self._seek(route.version, [job])
        elif isinstance(route, Suspect):
            self._await_batch(route.version, [job], are_suspects=True)
        elif route is Aside.UNPLACED:
            self._backlog.add_unplaced([job])
        elif route is Aside.GIVE_BACK:
            self._parts.releaser.add([job])
        elif route is not Aside.FOLLOWS:
            raise RuntimeError(f"a route that is not known: {route!r}")

    def _await_batch(self, version: ServedVersion, jobs: Sequence[ClaimedJob], *, are_suspects: bool = False) -> None:
        """The jobs wait for a forward of the version, which is loaded if it is not."""
        while version.successor is not None:
            version.queue.release_all(jobs)
            version = version.successor
        self._parts.lifecycle.load(version)
        if version.state is VersionState.FAILED:
            self.reroute(jobs)
        elif are_suspects:
            for job in jobs:
                self._backlog.add_suspect(version, job)
        else:
            self._backlog.add(version, jobs)

    def _seek(self, version: ServedVersion, jobs: Sequence[ClaimedJob]) -> None:
        """Look up the answers to these jobs in the tiers of the cache behind the memory."""
        self._backlog.add_sought(version, jobs)
        self._parts.answers.ask(version, jobs)

    def _fall_back(self, failed: FallBack) -> None:
        """The job becomes one of the version that its policy names. Where that is not here, it ends as it failed."""
        job, version = failed.job, failed.version
        label = version.policy.fallback_version
        route = self._parts.router.fall_back(job, label)
        facts = {"job_id": job.header.id, "model": version.name, "version": version.label, "fallback": label}
        if route is None:
            logger.warning("a job cannot fall back: the version of its policy is not here", extra=facts)
            self._end_fallen(failed.outcome, f"skipped: version {label} is not here, or takes other inputs")
            return
        logger.warning("a job falls back to the version of its policy", extra=facts)
        version.queue.release(job)
        self.put(job, route)

    def _end_fallen(self, outcome: JobOutcome, reason: str) -> None:
        """No level is left for the job of this outcome."""
        if (fell_back := outcome.job.fell_back) is not None:
            failures = (*fell_back.failures, LevelFailure("fallback", reason))
            outcome.job.fell_back = fell_back._replace(failures=failures)
        self._completer.add(outcome)

    def _hand_over(self, leaving: dict[tuple[str, str], list[ClaimedJob]]) -> None:
        while leaving:
            (model, label), jobs = leaving.popitem()
            try:
                self._parts.releaser.hand_over(jobs, model, label)
            except BrokerUnavailable:
                self._backlog.add_unplaced([*jobs, *(job for others in leaving.values() for job in others)])
                raise

    # Jobs that end without a forward

    def refuse_overdue(self, now: float) -> None:
        """A busy device, or a long load, must not keep the end of a job whose time has passed from its client."""
        if now < self._refuse_at:
            return
        self._refuse_at = now + _REFUSE_EVERY_S
        if not len(self._parts.leased):
            return
        broker_now = self._broker.now_ms()
        formed = (item.job for run in self._parts.executor.waiting() for item in run.batch.items)
        if any(broker_now > job.expires_ms for job in formed):
            self._parts.scheduler.recall_all()
        for version in self._parts.lifecycle.turns:
            self._completer.refuse(self._backlog.take_expired(version, broker_now), EXPIRED)
        self.refuse_late_followers()

    def refuse_late_followers(self) -> None:
        """A follower begins with its leader: what has begun in time goes on."""
        flights, broker_now = self._parts.flights, self._broker.now_ms()
        if flights.may_have_late(broker_now):
            formed = (item.job for run in self._parts.executor.waiting() for item in run.batch.items)
            unbegun = {*self._backlog, *formed}
            late = flights.take_followers(
                lambda leader, job: broker_now > job.expires_ms and leader in unbegun, looked_at_ms=broker_now
            )
            self._completer.refuse(late, EXPIRED)

    def drop_unwanted(self, lost: frozenset[Held], cancelled: frozenset[str]) -> None:
        """Lost jobs are forgotten, cancelled ones refused. Running jobs are marked, and end with their batch."""
        executor = self._parts.executor
        for run in (*executor.running(), *executor.waiting()):
            for item in run.batch.items:
                item.job.mark(lost, cancelled)
        self._completer.refuse(self._backlog.take(lambda job: job.mark(lost, cancelled)), CANCELLED)
        unwanted = self._parts.flights.take_followers(lambda _leader, job: job.mark(lost, cancelled))
        self._completer.refuse(unwanted, CANCELLED)
