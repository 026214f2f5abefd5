"""Settled batches -> events, metrics and log lines. It reports and steers nothing.

The drain flushes after the next batch and the next claim are on their way.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure
from penstock.workers.batch_run import BatchRun
from penstock.workers.cache import AnswerCache
from penstock.workers.completer import Settlement
from penstock.workers.job import ClaimedJob, Route, route_of
from penstock.workers.observe.listener import Ended, JobListener
from penstock.workers.observe.metrics import BatchStats, InferenceMetrics
from penstock.workers.results import JobOutcome

__all__ = ["BatchTelemetry"]

logger = logging.getLogger("penstock.server")

_MIXED: Final = "mixed"
"""The endpoint of a batch whose jobs came by different ways."""


class BatchTelemetry:
    """Keeps settlements until there is time to report them.

    Attributes:
        batches: reported so far.
    """

    def __init__(self, listener: JobListener, metrics: InferenceMetrics, answers: AnswerCache) -> None:
        self.batches = 0
        self._listener = listener
        self._metrics = metrics
        self._answers = answers
        self._settlements: list[Settlement] = []

    def add(self, settlement: Settlement) -> None:
        """These jobs are committed."""
        self._settlements.append(settlement)

    def flush(self) -> None:
        """Report what was added since the last call."""
        for (model, version, reply, is_hit), count in self._answers.take_lookups().items():
            self._metrics.cache_lookups(model, version, route_of(model, reply), is_hit=is_hit, count=count)
        settlements, self._settlements = self._settlements, []
        for settlement in settlements:
            self._report(settlement)

    def _report(self, settlement: Settlement) -> None:
        now = settlement.at
        ended = [_ended(outcome, state, now) for outcome, state in settlement.outcomes]
        self._listener.finished(ended, time.time())
        routes = self._count(ended)
        # Asking every job would cost more than all the rest: nearly always they all came by one way.
        shared = routes.pop() if len(routes) == 1 else None
        for run, outcomes in settlement.by_run.items():
            if run is not None:
                self._report_batch(run, outcomes, settlement.commit_s, now, shared)
            else:
                self._report_cached([outcome for outcome in outcomes if outcome.how == "cached"], now, shared)

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
                self._metrics.exception(end.header.model, _exception_of(end.error))
        return {route for _, route in requests}

    def _report_cached(self, outcomes: Sequence[JobOutcome], now: float, shared: Route | None) -> None:
        totals_s: defaultdict[tuple[str, str, Route], list[float]] = defaultdict(list)
        for outcome in outcomes:
            job = outcome.job
            labels = (job.header.model, outcome.label, shared or job.route)
            totals_s[labels].append(job.queue_ms / 1000 + now - job.claimed)
        for labels, seconds in totals_s.items():
            self._metrics.latency(*labels, seconds)
        if outcomes and logger.isEnabledFor(logging.INFO):
            logger.info("cache hits", extra={"job_ids": [outcome.job.header.id for outcome in outcomes]})

    def _report_batch(
        self, run: BatchRun, outcomes: Sequence[JobOutcome], commit_s: float, now: float, shared: Route | None
    ) -> None:
        name, version = run.batch.key.model, run.batch.key.version
        jobs = [outcome.job for outcome in outcomes]
        endpoint = shared or _endpoint_of(jobs)
        self.batches += 1
        self._metrics.batch(
            BatchStats(
                model=name,
                version=version,
                endpoint=endpoint,
                rows=run.batch.rows,
                jobs=len(run.batch.items),
                queue_s=[job.queue_ms / 1000 for job in jobs],
                batch_s=[max(0.0, run.started - job.claimed) for job in jobs],
                compute_s=run.ended - run.started,
                commit_s=commit_s,
                total_s=[job.queue_ms / 1000 + now - job.claimed for job in jobs],
            )
        )
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
                    "job_ids": [job.header.id for job in jobs],
                },
            )


def _ended(outcome: JobOutcome, state: State, now: float) -> Ended:
    run, job = outcome.run, outcome.job
    runtime_s = max(0.0, now - (run.started if run else job.claimed))
    return Ended(job.header, state, runtime_s, outcome.failure, outcome.label)


def _endpoint_of(jobs: Iterable[ClaimedJob]) -> str:
    route, *others = {job.route for job in jobs}
    return _MIXED if others else route


def _exception_of(failure: Failure) -> str:
    """The class of the model's exception, if the failure names it."""
    name = failure.message.partition(":")[0]
    return name if failure.code == "ModelError" and name.isidentifier() else failure.code
