"""Settled batches -> events, metrics and log lines. It reports and steers nothing.

The drain flushes after the next batch and the next claim are on their way.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.registry.broker.base import State
from penstock.safety.audit_accesses import CacheAccessAudit
from penstock.workers.batch_run import BatchRun
from penstock.workers.cache import AnswerCache
from penstock.workers.completer import CompletedFromCache, CompletedRun, Settlement
from penstock.workers.job import ClaimedJob, Route, route_of
from penstock.workers.observe.listener import Ended, JobListener
from penstock.workers.observe.metrics import BatchStats, InferenceMetrics
from penstock.workers.results import JobOutcome
from penstock.workers.versions.arm_counts import ArmCounts
from penstock.workers.versions.version import ServedVersion

if TYPE_CHECKING:
    from penstock.workers.job_spans import JobSpans

__all__ = ["BatchTelemetry"]

logger = logging.getLogger("penstock.server")

_DIRECT: Final[Route] = "queue"
"""The way of every plain job; see joint_results.py."""
_MIXED: Final = "mixed"
"""The endpoint of a batch whose jobs came by different ways."""


class BatchTelemetry:
    """Keeps settlements until there is time to report them.

    accesses: records look-ups in the audit log. arms: counts what the arms of experiments did. spans: of jobs with a
    trace; None: they have none here.

    Attributes:
        batches: reported so far.
    """

    def __init__(
        self,
        listener: JobListener,
        metrics: InferenceMetrics,
        answers: AnswerCache,
        accesses: CacheAccessAudit | None = None,
        arms: ArmCounts | None = None,
        spans: JobSpans | None = None,
    ) -> None:
        self.batches = 0
        self._spans = spans
        self._arms = arms
        self._accesses = accesses
        self._listener = listener
        self._metrics = metrics
        self._answers = answers
        self._settlements: list[Settlement] = []

    def add(self, settlement: Settlement) -> None:
        """These jobs are committed."""
        self._settlements.append(settlement)

    @property
    def has_work(self) -> bool:
        """Whether a settlement waits for `flush`."""
        return bool(self._settlements)

    def flush(self) -> None:
        """Report what was added since the last call."""
        for access, count in self._answers.take_accesses().items():
            model, version, reply, tenant, tier, is_hit = access
            self._metrics.cache_lookups(model, version, route_of(model, reply), tier, is_hit=is_hit, count=count)
            if self._accesses is not None:
                self._accesses.count(model, version, tenant, tier, is_hit=is_hit, count=count)
        settlements, self._settlements = self._settlements, []
        for settlement in settlements:
            try:
                self._report(settlement)
            except Exception:  # the jobs are committed: a report that fails is no reason to end a worker
                logger.exception("a report of ended jobs failed")

    def _report(self, settlement: Settlement) -> None:
        now = settlement.at
        for completed in settlement.completed:
            self._report_completed(completed, settlement.commit_s, now)
        for found in settlement.from_cache:
            self._report_found(found, now)
        if not settlement.outcomes and not settlement.by_run:
            return
        if self._arms is not None:
            _count_arms(self._arms, settlement.outcomes, now)
        if self._spans is not None:
            self._spans.report(settlement.outcomes, now)
        ended = [_ended(outcome, state, now) for outcome, state in settlement.outcomes]
        self._listener.finished(ended, time.time())
        routes = self._count(ended)
        for outcome, state in settlement.outcomes:
            if state is State.COMPLETED and (level := outcome.level):
                version = outcome.job.fell_back.version if outcome.job.fell_back is not None else outcome.label
                self._metrics.fallback(outcome.job.header.model, version, outcome.job.route, level)
        # Asking every job would cost more than all the rest: nearly always they all came by one way.
        shared = routes.pop() if len(routes) == 1 else None
        for run, outcomes in settlement.by_run.items():
            if run is not None:
                jobs = [outcome.job for outcome in outcomes]
                totals_s = [job.queue_ms / 1000 + now - job.claimed for job in jobs]
                endpoint = shared or _endpoint_of(jobs)
                self._report_batch(run, jobs, totals_s, settlement.commit_s, endpoint, _traced(jobs, totals_s))
            else:
                self._report_cached([outcome for outcome in outcomes if outcome.how == "cached"], now, shared)

    def _report_completed(self, completed: CompletedRun, commit_s: float, now: float) -> None:
        run, jobs, totals_s = completed
        if self._arms is not None and self._arms.is_open(run.version.name):
            self._arms.ran(run.version.name, run.version.label, totals_s)
        self._report_plain(run.version, jobs, max(0.0, now - run.started))
        if level := run.level:
            self._metrics.fallback(run.version.name, run.version.label, _DIRECT, level, len(jobs))
        self._report_batch(run, jobs, totals_s, commit_s, _DIRECT)

    def _report_found(self, found: CompletedFromCache, now: float) -> None:
        version, jobs, totals_s = found
        if self._arms is not None and self._arms.is_open(version.name):
            self._arms.found(version.name, version.label, len(jobs))
        # Jobs of one claim were claimed at the same time.
        self._report_plain(version, jobs, max(0.0, now - jobs[0].claimed))
        self._metrics.latency(version.name, version.label, _DIRECT, totals_s)
        _log_hits(jobs)

    def _report_plain(self, version: ServedVersion, jobs: Sequence[ClaimedJob], runtime_s: float) -> None:
        """Plain jobs are committed with outputs; see joint_results.py. For runtime_s see Ended."""
        model, label = version.name, version.label
        self._listener.completed([job.header for job in jobs], runtime_s, label, time.time())
        self._metrics.requests(model, _DIRECT, len(jobs))
        self._metrics.outcome(model, label, _DIRECT, State.COMPLETED.name.lower(), len(jobs))

    def _count(self, ended: Sequence[Ended]) -> set[Route]:
        """Count jobs that ended; returns the ways by which they came."""
        # Counted when they end: a job that runs again after a crash is still one request.
        requests: Counter[tuple[str, Route]] = Counter()
        outcomes: Counter[tuple[str, str, Route, str]] = Counter()
        alike = Counter((end.header.model, end.version, end.state, end.header.reply) for end in ended)
        for (name, version, state, reply), count in alike.items():
            route = route_of(name, reply)
            requests[name, route] += count
            outcomes[name, version, route, state.name.lower()] += count
        for (name, route), count in requests.items():
            self._metrics.requests(name, route, count)
        for labels, count in outcomes.items():
            self._metrics.outcome(*labels, count)
        for end in ended:
            if end.error is not None and end.state is State.FAILED:
                self._metrics.exception(end.header.model, end.exception or end.error.code)
        return {route for _, route in requests}

    def _report_cached(self, outcomes: Sequence[JobOutcome], now: float, shared: Route | None) -> None:
        found: defaultdict[tuple[str, str, Route], list[ClaimedJob]] = defaultdict(list)
        for outcome in outcomes:
            job = outcome.job
            found[job.header.model, outcome.label, shared or job.route].append(job)
        for labels, jobs in found.items():
            totals_s = [job.queue_ms / 1000 + now - job.claimed for job in jobs]
            traced = _traced(jobs, totals_s)
            self._metrics.latency(*labels, totals_s)
            if traced:
                self._metrics.traced(*labels, traced, time.time())
            _log_hits(jobs, traced)

    def _report_batch(
        self,
        run: BatchRun,
        jobs: Sequence[ClaimedJob],
        totals_s: Sequence[float],
        commit_s: float,
        endpoint: str,
        traced: Sequence[tuple[str, float]] = (),
    ) -> None:
        """traced: see InferenceMetrics.traced. Plain jobs have no trace."""
        name, version = run.batch.key.model, run.batch.key.version
        started = run.started
        self.batches += 1
        self._metrics.batch(
            BatchStats(
                model=name,
                version=version,
                endpoint=endpoint,
                rows=run.batch.rows,
                jobs=len(run.batch.items),
                queue_s=[job.queue_ms / 1000 for job in jobs],
                batch_s=[started - job.claimed if started > job.claimed else 0.0 for job in jobs],
                compute_s=run.ended - run.started,
                commit_s=commit_s,
                total_s=totals_s,
            )
        )
        if traced:
            self._metrics.traced(name, version, endpoint, traced, time.time())
        if run.padded_tokens:
            self._metrics.padding(name, version, endpoint, 1 - run.tokens / run.padded_tokens)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "batch committed",
                extra={
                    "model": name,
                    "batch": self.batches,
                    "size": run.batch.rows,
                    "compute_ms": round((run.ended - run.started) * 1e3, 3),
                    **_ids(jobs, traced),
                },
            )


def _count_arms(arms: ArmCounts, outcomes: Iterable[tuple[JobOutcome, State]], now: float) -> None:
    """Count jobs that ended one by one. Jobs that name a version, and jobs that did not run, belong to no arm."""
    for outcome, state in outcomes:
        job, version = outcome.job, outcome.version
        if outcome.failure is not None and outcome.failure.code == "ForwardTimeout":
            # The process that ran it has ended, and this one does not know its version.
            arms.stopped(job.header)
            continue
        if job.fell_back is not None and arms.is_open(job.header.model):
            # Another version may have saved the job: that is no success of its arm.
            arms.failed(job.header.model, job.fell_back.version)
            continue
        if version is None or job.header.version or not arms.is_open(version.name):
            continue
        if state in (State.FAILED, State.DEAD):
            arms.failed(version.name, version.label)
        elif state is State.COMPLETED and outcome.how == "cached":
            arms.found(version.name, version.label, 1)
        elif state is State.COMPLETED:
            arms.ran(version.name, version.label, [job.queue_ms / 1000 + now - job.claimed])


def _log_hits(jobs: Sequence[ClaimedJob], traced: Sequence[tuple[str, float]] = ()) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("cache hits", extra=_ids(jobs, traced))


def _traced(jobs: Sequence[ClaimedJob], totals_s: Sequence[float]) -> list[tuple[str, float]]:
    """(trace id, latency) of the jobs that have a trace."""
    return [
        (trace_id, total_s)
        for job, total_s in zip(jobs, totals_s, strict=True)
        if job.header.traceparent and (trace_id := job.header.trace_id)
    ]


def _ids(jobs: Sequence[ClaimedJob], traced: Sequence[tuple[str, float]]) -> dict[str, list[str]]:
    """The ids of jobs, and those of their traces, for a line of the log."""
    ids = {"job_ids": [job.header.id for job in jobs]}
    return {**ids, "trace_ids": [trace_id for trace_id, _ in traced]} if traced else ids


def _ended(outcome: JobOutcome, state: State, now: float) -> Ended:
    run, job = outcome.run, outcome.job
    runtime_s = max(0.0, now - (run.started if run else job.claimed))
    exception = "" if run is None else run.exceptions.get(job, "")
    return Ended(job.header, state, runtime_s, outcome.failure, outcome.label, exception)


def _endpoint_of(jobs: Iterable[ClaimedJob]) -> str:
    route, *others = {job.route for job in jobs}
    return _MIXED if others else route
