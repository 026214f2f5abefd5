"""Settled batches -> events, metrics and log lines. It reports and steers nothing.

The drain flushes after the next batch and the next claim are on their way.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure
from penstock.workers.batch_run import BatchRun
from penstock.workers.cache import AnswerCache
from penstock.workers.completer import Settlement
from penstock.workers.observe.listener import Ended, JobListener
from penstock.workers.observe.metrics import BatchStats, InferenceMetrics
from penstock.workers.results import JobOutcome
from penstock.workers.versions.policy import ENDPOINT

__all__ = ["BatchTelemetry"]

logger = logging.getLogger("penstock.server")


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
        for (model, is_hit), count in self._answers.take_lookups().items():
            self._metrics.cache_lookups(model, is_hit=is_hit, count=count)
        settlements, self._settlements = self._settlements, []
        for settlement in settlements:
            self._report(settlement)

    def _report(self, settlement: Settlement) -> None:
        now = settlement.at
        ended = [_ended(outcome, state, now) for outcome, state in settlement.outcomes]
        self._listener.finished(ended, time.time())
        self._count(ended)
        for run, outcomes in settlement.by_run.items():
            if run is not None:
                self._report_batch(run, outcomes, settlement.commit_s, now)
            else:
                self._report_cached([outcome for outcome in outcomes if outcome.how == "cached"], now)

    def _count(self, ended: Sequence[Ended]) -> None:
        # Counted when they end: a job that runs again after a crash is still one request.
        for name, count in Counter(end.header.model for end in ended).items():
            self._metrics.requests(name, ENDPOINT, count)
        outcomes = Counter((end.header.model, end.version, end.state) for end in ended)
        for (name, version, state), count in outcomes.items():
            self._metrics.outcome(name, version, ENDPOINT, state.name.lower(), count)
        for end in ended:
            if end.error is not None and end.state is State.FAILED:
                self._metrics.exception(end.header.model, _exception_of(end.error))

    def _report_cached(self, outcomes: Sequence[JobOutcome], now: float) -> None:
        totals_s: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for outcome in outcomes:
            job = outcome.job
            totals_s[job.header.model, outcome.label].append(job.queue_ms / 1000 + now - job.claimed)
        for (name, version), seconds in totals_s.items():
            self._metrics.latency(name, version, ENDPOINT, seconds)
        if outcomes and logger.isEnabledFor(logging.INFO):
            logger.info("cache hits", extra={"job_ids": [outcome.job.header.id for outcome in outcomes]})

    def _report_batch(self, run: BatchRun, outcomes: Sequence[JobOutcome], commit_s: float, now: float) -> None:
        name, version = run.batch.key.model, run.batch.key.version
        jobs = [outcome.job for outcome in outcomes]
        self.batches += 1
        self._metrics.batch(
            BatchStats(
                model=name,
                version=version,
                endpoint=ENDPOINT,
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
            self._metrics.padding(name, version, ENDPOINT, 1 - run.tokens / run.padded_tokens)
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


def _exception_of(failure: Failure) -> str:
    """The class of the model's exception, if the failure names it."""
    name = failure.message.partition(":")[0]
    return name if failure.code == "ModelError" and name.isidentifier() else failure.code
