"""The backlog -> batches on the model threads: which batch is next, and which job runs alone.

    Backlog -- dispatch: model by model in turn --> Executor
            <-- recall: a more urgent job came ----'

An idle model thread gets a batch at once. While all are busy the next full batch is formed ahead, and is recalled when
a more urgent job comes. A suspect has the model threads to itself, so that its crash counts against no other job.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

from penstock.registry.envelope import Failure
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.backlog import Backlog, Waiting
from penstock.workers.batch_run import BatchRun, OpenStream
from penstock.workers.batching.batcher import Batch
from penstock.workers.executor import Executor
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.listener import JobListener
from penstock.workers.process.stall import StallDetector
from penstock.workers.versions.version import ServedVersion, VersionState

__all__ = ["Scheduler"]

logger = logging.getLogger("penstock.server")

_READY: Final = VersionState.READY
_STALL_S: Final = 1.0
"""An I/O thread takes several turns a second. If it took none for this time, the whole process was stopped."""
_POLL_ROUNDING_S: Final = 0.0005
"""`poll` counts whole milliseconds and may return early: aim behind the moment at which a batch is due."""


class Scheduler:
    """Takes jobs out of the backlog and hands batches to the executor. The I/O thread owns it.

    versions: all versions of this worker, in the order of their turns. broker_now: milliseconds by the broker's clock.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        backlog: Backlog,
        executor: Executor,
        versions: deque[ServedVersion],
        listener: JobListener,
        open_stream: OpenStream,
        *,
        broker_now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.unhealthy_reason = ""
        """Why this process must be replaced: a forward hangs, or the device is lost. Empty: it is healthy."""
        self._backlog = backlog
        self._executor = executor
        self._versions = versions
        self._listener = listener
        self._open_stream = open_stream
        self._broker_now = broker_now
        self._clock = clock
        self._stall = StallDetector(_STALL_S)
        self._last_was_suspect = False

    # Onto the model threads

    def dispatch(self) -> list[Waiting]:
        """Give every idle model thread a batch, and form the next one while they are busy.

        Returns the jobs whose time has passed: they take no place in a batch.
        """
        expired: list[Waiting] = []
        if self._executor.kept is not None or self._executor.device_lost:
            return expired
        idle = self._executor.idle
        if idle < 0:
            self._recall_for_urgent()
            idle = self._executor.idle
        if self._is_turn_of_suspects():
            is_kept = self._dispatch_with_suspects(expired)
            if is_kept or self._is_turn_of_suspects():
                return expired
            idle = self._executor.idle
        while idle >= 0 and (run := self.next_run(expired, is_idle=idle > 0)) is not None:
            if self._submit(run, is_idle=idle > 0):
                break
            idle = self._executor.idle
        return expired

    def _submit(self, run: BatchRun, *, is_idle: bool) -> bool:
        """Whether the run is kept for this thread."""
        self._listener.started([item.job.header for item in run.batch.items], time.time())
        queue = run.version.queue
        queue.runs_on_io_thread = is_idle and self._may_keep(run)
        if queue.runs_on_io_thread:
            self._executor.keep(run)
            return True
        self._executor.submit(run, prepare_apart=run.version.policy.tokenises and not is_idle)
        return False

    def _may_keep(self, run: BatchRun) -> bool:
        """Whether the I/O thread runs a batch itself: two hand-overs between threads take longer than a short forward.

        Only with one model thread, and if the forwards of late were short but for one. If this one hangs, the watchdog
        ends the process; see WorkerHealth.unhealthy_reason.
        """
        return (
            self._executor.threads == 1
            and run.version.queue.has_short_forwards
            and run.open_stream is None
            and not run.is_as_built
            and run.model.runtime.may_change_threads
        )

    def _is_turn_of_suspects(self) -> bool:
        """Whether one of them can run, or runs. One whose version is still loading delays no other job."""
        return self._last_was_suspect or self._backlog.has_ready_suspects

    def _dispatch_with_suspects(self, expired: list[Waiting]) -> bool:
        """One suspect alone, then one batch of others, in turn; nothing beside a suspect.

        Returns whether a batch is kept for this thread: then none must be submitted.
        """
        if self._executor.idle < self._executor.threads:
            return False
        run = self.next_run(expired, is_idle=True) if self._last_was_suspect else None
        self._last_was_suspect = run is None and (run := self._next_suspect(expired)) is not None
        if run is not None or (run := self.next_run(expired, is_idle=True)) is not None:
            return self._submit(run, is_idle=True)
        return False

    def _next_suspect(self, expired: list[Waiting]) -> BatchRun | None:
        """The suspect that has waited longest and can run now."""
        for _ in range(self._backlog.suspects):
            version, job = self._backlog.pop_suspect()
            if self._broker_now() > job.expires_ms:
                expired.append(Waiting(job, version))
            elif version.is_ready:
                return self._begin(version, version.alone(job), is_as_built=True)
            else:
                self._backlog.add_suspect(version, job)
        return None

    def next_run(self, expired: list[Waiting], *, is_idle: bool) -> BatchRun | None:
        """The next batch, version by version in turn. Jobs whose time has passed are added to `expired` instead."""
        now = self._clock()
        for turn, version in enumerate(self._versions, 1):
            if version.state is not _READY:
                continue
            queue = version.queue
            if now >= queue.raise_cap_at:
                queue.raise_cap(now)
            if not len(queue.batcher):
                continue
            if is_idle and not self._may_start(version):
                continue
            if not is_idle and not self._may_form_ahead(version):
                continue
            if queue.has_large_results and self._has_unsent():
                continue
            while (batch := queue.batcher.next(now, device_idle=is_idle)) is not None:
                broker_now = self._broker_now()
                if all([broker_now <= item.job.expires_ms for item in batch.items]):
                    self._versions.rotate(-turn)
                    return self._begin(version, batch)
                queue.batcher.put_back(batch)
                expired += self._backlog.take_expired(version, broker_now)
        return None

    def _may_start(self, version: ServedVersion) -> bool:
        """Whether the next batch of the version may run. Beyond the seats of an engine it is a more urgent one only."""
        seats, queue = version.policy.seats, version.queue
        if version.may_start <= 0:
            return False
        if not seats or queue.in_flight < seats:
            return True
        urgent = queue.batcher.most_urgent()
        runs = (*self._executor.running(), *self._executor.waiting())
        return urgent is not None and any(run.version is version and run.batch.priority > urgent for run in runs)

    def _begin(self, version: ServedVersion, batch: Batch[ClaimedJob], *, is_as_built: bool = False) -> BatchRun:
        version.queue.in_flight += 1
        return BatchRun(version, batch, self._open_stream if version.spec.streams else None, is_as_built)

    def _has_unsent(self) -> bool:
        """Whether the results of a large batch wait for their commits: memory has room for one such batch."""
        return any(version.queue.unsent_bytes for version in self._versions)

    def _may_form_ahead(self, version: ServedVersion) -> bool:
        """Whether a batch may wait for a thread: any thread that becomes free must be allowed to run it.

        A batch with large results does not wait: its own would come beside those of the batch that runs. Nor does the
        second batch of a version whose results are unknown.
        """
        if version.queue.has_large_results or not version.queue.row_bytes:
            return False
        spare = version.may_start
        threads = self._executor.threads
        return version.is_ready and (spare > 0 or (spare == 0 and version.policy.concurrency >= threads))

    # Back from there

    def _recall_for_urgent(self) -> None:
        """More batches are formed than model threads are idle: a more urgent job takes the place of the last one."""
        urgent = [
            priority
            for version in self._versions
            if version.is_ready and (priority := version.queue.batcher.most_urgent()) is not None
        ]
        if urgent and (run := self._executor.recall(more_urgent=min(urgent))) is not None:
            run.version.queue.put_back(run.batch)

    def recall_all(self) -> None:
        """Put every batch that has not begun back into the backlog."""
        while (run := self._executor.recall()) is not None:
            run.version.queue.put_back(run.batch)

    @staticmethod
    def too_late_check(broker_now: Callable[[], float]) -> Callable[[Sequence[ClaimedJob]], Mapping[int, Failure]]:
        """What a model thread asks right before a forward: the jobs that must not run any more, by id()."""

        def too_late(jobs: Sequence[ClaimedJob]) -> Mapping[int, Failure]:
            now = broker_now()
            late = [job for job in jobs if job.is_cancelled or job.is_lost or now > job.expires_ms]
            return {id(job): CANCELLED if job.is_cancelled or job.is_lost else EXPIRED for job in late}

        return too_late

    # Health and time

    def check_forwards(self) -> str:
        """Why this process must be replaced; empty while it is healthy. A hung forward ends only with its process.

        The executor has then given up the forwards over their limit.
        """
        now = self._clock()
        self._stall.turn(now)
        self.unhealthy_reason = self.unhealthy_reason or self._executor.device_lost
        for run in self._executor.running():
            if self._stall.gap_s > _STALL_S:
                run.disturb()
            if self._stall.gap_s > max(run.limit_s, _STALL_S):
                # The whole process was stopped, and the forward with it.
                run.touch()
            elif now - run.alive_at > run.limit_s:
                self._give_up(run)
        return self.unhealthy_reason

    def _give_up(self, run: BatchRun) -> None:
        trace = self._executor.give_up(run)
        if self.unhealthy_reason:
            return
        model = run.batch.key.model
        self.unhealthy_reason = f"a forward of {model} took longer than its limit of {run.limit_s:g} s"
        facts = {"model": model, "limit_s": run.limit_s, "job_ids": [job.header.id for job in run.jobs]}
        logger.error("a forward hangs", extra={**facts, "where": trace.where, "stack": trace.text})

    def next_wakeup(self) -> float:
        """When the next batch is due to be formed ahead, or a delayed job to run, in monotonic seconds."""
        due = self._backlog.next_due
        if self._executor.idle == 0 and not self._is_turn_of_suspects():
            for version in self._versions:
                if self._may_form_ahead(version) and (at := version.queue.batcher.next_flush_at()) is not None:
                    due = min(due, at)
        return due if due == inf else due + _POLL_ROUNDING_S
