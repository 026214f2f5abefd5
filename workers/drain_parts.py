"""The parts and limits of a drain, and the signal that stops it; see workers/assembly.py and workers/drain.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.registry.broker.base import Broker
from penstock.workers.backlog import Backlog
from penstock.workers.cache import AnswerCache, CachedTexts, SingleFlight
from penstock.workers.claims import Claimer
from penstock.workers.completer import Completer
from penstock.workers.executor import Executor
from penstock.workers.intake import Intake
from penstock.workers.leases import LeasedJobs
from penstock.workers.levels.arm_breakers import ArmBreakers
from penstock.workers.observe.listener import JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.crash_journal import Journal
from penstock.workers.release import Releaser
from penstock.workers.router import JobRouter
from penstock.workers.scheduler import Scheduler
from penstock.workers.shadow.mirror import Mirror
from penstock.workers.status import StatusReporter
from penstock.workers.streaming import EventWriter
from penstock.workers.telemetry import BatchTelemetry
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.placement import Placement

__all__ = ["DrainLimits", "DrainParts", "StopSignal"]


class StopSignal:
    """Whether the worker stops, and until when running batches may finish; for any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_set = False
        self.at = float("inf")
        self._clock = clock

    def set(self, grace_s: float) -> None:
        """Stop; running batches have `grace_s` seconds."""
        self.at = self._clock() + grace_s
        self.is_set = True

    def is_over(self) -> bool:
        """Whether nothing may run any more."""
        return self._clock() >= self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainParts:
    """The parts of one drain; see workers/assembly.py."""

    broker: Broker
    listener: JobListener
    metrics: InferenceMetrics
    lifecycle: ModelLifecycle
    placement: Placement
    intake: Intake
    router: JobRouter
    flights: SingleFlight
    answers: AnswerCache
    backlog: Backlog
    scheduler: Scheduler
    executor: Executor
    completer: Completer
    claimer: Claimer
    leased: LeasedJobs
    releaser: Releaser
    telemetry: BatchTelemetry
    status: StatusReporter
    events: EventWriter
    texts: CachedTexts
    journal: Journal
    mirror: Mirror
    stop: StopSignal
    arm_breakers: ArmBreakers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainLimits:
    """most_jobs, most_bytes: what is in memory at a time. most_delayed: a job that fails beyond these, or beyond half
    of the bytes, is tried again without a pause. lease_s: a job whose worker is silent for so long goes to another one.
    progress_s: an I/O or lease thread that has ended no turn for so long makes no progress."""

    most_jobs: int
    most_bytes: int
    most_delayed: int
    lease_s: float
    progress_s: float
