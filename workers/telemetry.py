"""What was settled -> events, metrics and log lines: told after the next batch and claim are on their way."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure
from penstock.workers.executor import BatchRun
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.listener import Ended, JobListener
from penstock.workers.observe.metrics import BatchStats, InferenceMetrics
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.versions.version import ENDPOINT

__all__ = ["Account"]

logger = logging.getLogger("penstock.server")


class Account:
    """Keeps what a commit settled until there is time to tell.

    Attributes:
        batches: told so far.
    """

    def __init__(self, listener: JobListener, metrics: InferenceMetrics) -> None:
        self.batches = 0
        self._listener = listener
        self._metrics = metrics
        self._lookups: Counter[tuple[str, bool]] = Counter()
        self._settled: list[tuple[list[tuple[JobOutcome, State]], float, float]] = []

    def looked_up(self, model: str, *, is_hit: bool) -> None:
        """A job's answer was looked for among those that are kept."""
        self._lookups[model, is_hit] += 1

    def settled(self, ends: list[tuple[JobOutcome, State]], commit_s: float, now: float) -> None:
        """These jobs are committed since `now`, monotonic; that took `commit_s` seconds."""
        self._settled.append((ends, commit_s, now))

    def tell(self) -> None:
        """Tells those who watch."""
        for (model, is_hit), count in self._lookups.items():
            self._metrics.cache_lookups(model, is_hit=is_hit, count=count)
        self._lookups.clear()
        settlements, self._settled = self._settled, []
        for settled, commit_s, now in settlements:
            ended: list[Ended] = []
            by_work: defaultdict[int, list[JobOutcome]] = defaultdict(list)
            for end, state in settled:
                work, job = end.work, end.job
                by_work[id(work)].append(end)
                runtime_s = max(0.0, now - (work.started if work else job.claimed))
                ended.append(Ended(job.header, state, runtime_s, end.failure, job.label))
            self._listener.finished(ended, time.time())
            self._count(ended)
            for ends in by_work.values():
                if (work := ends[0].work) is not None:
                    self._measure(work, [end.job for end in ends], commit_s, now)
                    if (version := ends[0].job.version) is not None:
                        version.observe(work, now)
                else:
                    self._time_kept([end.job for end in ends if isinstance(end.answer, EncodedOutputs)], now)

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

    def _time_kept(self, jobs: Sequence[ClaimedJob], now: float) -> None:
        """Jobs that kept answers ended took their time, too."""
        totals_s: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for job in jobs:
            totals_s[job.header.model, job.label].append(job.queue_ms / 1000 + now - job.claimed)
        for (name, version), seconds in totals_s.items():
            self._metrics.latency(name, version, ENDPOINT, seconds)
        if jobs and logger.isEnabledFor(logging.INFO):
            logger.info("answered as before", extra={"job_ids": [job.header.id for job in jobs]})

    def _measure(self, work: BatchRun, jobs: Sequence[ClaimedJob], commit_s: float, now: float) -> None:
        name, version = work.batch.key.model, work.batch.key.version
        self.batches += 1
        self._metrics.batch(
            BatchStats(
                model=name,
                version=version,
                endpoint=ENDPOINT,
                rows=work.batch.rows,
                jobs=len(work.batch.items),
                queue_s=[job.queue_ms / 1000 for job in jobs],
                batch_s=[max(0.0, work.started - job.claimed) for job in jobs],
                compute_s=work.ended - work.started,
                commit_s=commit_s,
                total_s=[job.queue_ms / 1000 + now - job.claimed for job in jobs],
            )
        )
        if work.padded_tokens:
            self._metrics.padding(name, version, ENDPOINT, 1 - work.tokens / work.padded_tokens)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "batch committed",
                extra={
                    "model": name,
                    "batch": self.batches,
                    "size": work.batch.rows,
                    "compute_ms": round((work.ended - work.started) * 1e3, 3),
                    "job_ids": [job.header.id for job in jobs],
                },
            )


def _exception_of(failure: Failure) -> str:
    """The class of what the model raised, where the failure says it."""
    name = failure.message.partition(":")[0]
    return name if failure.code == "ModelError" and name.isidentifier() else failure.code
