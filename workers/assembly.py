"""Settings, a broker and model packages -> a drain with all its parts."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.registry.broker.base import Broker
from penstock.registry.broker.breakers import BreakerEnd, BreakerRecord, split_breaker_name
from penstock.registry.errors import ConfigurationError
from penstock.registry.open_telemetry import tracer_of
from penstock.registry.overdue import OverdueJobs
from penstock.registry.package import Package
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import OpenTelemetryConfig
from penstock.registry.signed import Verifier
from penstock.safety.audit_accesses import CacheAccessAudit
from penstock.safety.orchestrator import SafetyOrchestrator, Subject
from penstock.safety.payload_keys import envelope_keys
from penstock.safety.sealing import DataKeys
from penstock.workers.backlog import Backlog
from penstock.workers.batch_run import OpenStream
from penstock.workers.cache import AnswerCache, CachedTexts, SharedTiers, SingleFlight
from penstock.workers.cache.tier import Tier
from penstock.workers.cache.tiers import MayLeave
from penstock.workers.claims import Claimer, WakeUp
from penstock.workers.completer import Completer
from penstock.workers.drain import Drain
from penstock.workers.drain_parts import DrainLimits, DrainParts, StopSignal
from penstock.workers.executor import Executor, seats_for
from penstock.workers.intake import Intake
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs
from penstock.workers.levels.arm_breakers import ArmBreakers
from penstock.workers.observe.listener import JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.crash_journal import Journal, NullJournal
from penstock.workers.release import Releaser
from penstock.workers.router import JobRouter
from penstock.workers.scheduler import Scheduler
from penstock.workers.shadow.mirror import Mirror, NullMirror
from penstock.workers.status import StatusReporter, WorkerIdentity
from penstock.workers.streaming import EventStream, EventWriter
from penstock.workers.telemetry import BatchTelemetry
from penstock.workers.transfers import JobTransfers
from penstock.workers.versions.arm_counts import ArmCounts
from penstock.workers.versions.deployment_store import DeploymentStore, FileDeploymentStore, NullDeploymentStore
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.loader import Loader
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.placement import Placement
from penstock.workers.versions.repository import EmptyRepository, ModelRepository
from penstock.workers.versions.tuner import NullTuner, Tuner

if TYPE_CHECKING:
    from penstock.workers.job_spans import JobSpans

__all__ = ["DrainOptions", "PartTypes", "build_drain"]

logger = logging.getLogger("penstock.server")


@dataclass(frozen=True, slots=True)
class PartTypes:
    """The classes of the parts. The simulator and the worker in memory put their own in their places."""

    drain: type[Drain] = Drain
    transfers: type[JobTransfers] = JobTransfers
    intake: type[Intake] = Intake
    router: type[JobRouter] = JobRouter
    flights: type[SingleFlight] = SingleFlight
    answers: type[AnswerCache] = AnswerCache
    tiers: type[SharedTiers] = SharedTiers
    scheduler: type[Scheduler] = Scheduler
    executor: type[Executor] = Executor
    completer: type[Completer] = Completer
    loader: type[Loader] = Loader
    placement: type[Placement] = Placement
    claimer: type[Claimer] = Claimer
    wake_up: type[WakeUp] = WakeUp


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOptions:
    """How one worker runs.

    device, threads: see Runtime.load. checkpoint: called with the name of each point at which a crash is worth testing.
    clock: monotonic seconds. jitter: random numbers in [0, 1). journal: opens the crash journal of this consumer, with
    so many seats. repository: where other versions of the models are found; None: nowhere. verify: checks the
    operators' signatures on records; None: no signatures are required. on_version_change: called with a model, the
    content hash that was active until now (empty: none) and the one that is active from now on. tuner: makes loaded
    versions faster. after_run: called on a model thread after each batch, before the next one. deployments: the
    decisions that this machine has followed; None: those under the home, if signatures are required. tiers: of the
    cache, behind the memory, the nearest first; the drain closes them. may_leave: see SharedTiers. data_keys: encrypt
    the data of these settings; None: they encrypt nothing. accesses: records look-ups in the cache; None: they are not
    recorded. mirror: of committed jobs, for their shadows; the drain closes it. breakers: of candidates, which the arms
    of experiments obey; None: there are none. on_arm_stopped: is told (subject, record) on a thread of its own when the
    failures of an arm on this worker have opened its breaker. gate: of what makes engines for text faster;
    None: its decisions are lines of the log.
    """

    name: str
    """The worker's, unique on the broker."""
    device: str
    threads: int
    listener: JobListener
    metrics: InferenceMetrics
    probe_url: str = ""
    """Where its probe answers, for its report."""
    checkpoint: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    journal: Callable[[str, int], Journal] = lambda _consumer, _seats: NullJournal()
    repository: ModelRepository | None = None
    verify: Verifier | None = None
    on_version_change: Callable[[str, str, str], None] = lambda _model, _old, _new: None
    tuner: Tuner | None = None
    after_run: Callable[[], None] = lambda: None
    deployments: DeploymentStore | None = None
    tiers: Sequence[Tier] = ()
    may_leave: MayLeave | None = None
    data_keys: DataKeys | None = None
    accesses: CacheAccessAudit | None = None
    mirror: Mirror = field(default_factory=NullMirror)
    breakers: BreakerEnd | None = None
    on_arm_stopped: Callable[[Subject, BreakerRecord], None] = lambda subject, record: None
    gate: SafetyOrchestrator | None = None
    types: PartTypes = field(default_factory=PartTypes)


def build_drain(settings: Settings, broker: Broker, packages: Sequence[Package], options: DrainOptions) -> Drain:
    """A drain that serves the models of `packages`. Raises ConfigurationError without a package."""
    if not packages:
        raise ConfigurationError("There is no model to serve. Expected at least one package under the models root")
    return _Assembly(settings, broker, packages, options).drain()


class _Assembly:
    """The parts that several others need; the others are made on the way to the drain."""

    def __init__(self, settings: Settings, broker: Broker, packages: Sequence[Package], options: DrainOptions) -> None:
        self.settings = settings
        self.broker = broker
        self.options = options
        types, inference = options.types, settings.inference
        # A restarted worker must not pass the fence of its predecessor.
        consumer = f"{options.name}:{secrets.token_hex(4)}"
        keyring = envelope_keys(settings, options.data_keys)
        self.identity = WorkerIdentity(options.name, consumer, options.device, options.probe_url, keyring)
        self.most_jobs = inference.batching.max_queue_depth
        self.most_bytes = inference.batching.max_queue_bytes
        self.job_ttl_ms = int(inference.queue.job_ttl_s * 1000)
        self.tuner = options.tuner or NullTuner()
        self.wake_up = types.wake_up()
        self.stop = StopSignal(options.clock)
        self.leased = LeasedJobs()
        self.events = EventWriter(
            broker,
            consumer,
            ttl_ms=self.job_ttl_ms,
            max_bytes=inference.queue.max_event_bytes,
            may_wait=lambda: not self.stop.is_over(),
        )
        self.flights = types.flights()
        self.answers = types.answers(inference.cache, options.clock, self._tiers())
        self.arm_breakers = self._arm_breakers()
        self.lifecycle = self._lifecycle(packages)
        peers = Peers(broker, options.name, options.clock)
        self.placement = types.placement(self.lifecycle, peers, options.clock, most_waiting=self.most_jobs // 4)
        self.arms = self._arm_counts(consumer)
        self.telemetry = BatchTelemetry(
            options.listener,
            options.metrics,
            self.answers,
            options.accesses,
            self.arms,
            _job_spans(settings.inference.open_telemetry, options.name),
        )
        self.status = StatusReporter(
            self.identity,
            broker,
            self.lifecycle,
            self.leased,
            self.telemetry,
            self.answers,
            options.metrics,
            self.tuner,
            self._overdue(),
            options.mirror,
            self.arms,
            on_change=self.wake_up.ring,
        )

    def _tiers(self) -> SharedTiers | None:
        options, inference = self.options, self.settings.inference
        if not options.tiers:
            return None
        return options.types.tiers(
            options.tiers,
            isolates_tenants=inference.privacy.cache_tenant_isolation,
            may_leave=options.may_leave,
            timeout_s=inference.cache.lookup_timeout_ms / 1000,
            ring=self.wake_up.ring,
            clock=options.clock,
        )

    def _overdue(self) -> OverdueJobs:
        queue, keyring = self.settings.inference.queue, self.identity.keyring
        result_ttl_ms = int(queue.result_ttl_s * 1000)
        return OverdueJobs(
            self.broker, keyring, job_ttl_ms=self.job_ttl_ms, result_ttl_ms=result_ttl_ms, worker=self.identity.name
        )

    def drain(self) -> Drain:
        """The drain."""
        options, consumer = self.options, self.identity.consumer
        backlog = Backlog(self.lifecycle.turns)
        model_threads = max(version.policy.concurrency for version in self.lifecycle.turns)
        journal = options.journal(consumer, seats_for(model_threads))
        executor = self._executor(model_threads, journal)
        parts = DrainParts(
            broker=self.broker,
            listener=options.listener,
            metrics=options.metrics,
            lifecycle=self.lifecycle,
            placement=self.placement,
            intake=self._intake(),
            router=self._router(),
            answers=self.answers,
            flights=self.flights,
            backlog=backlog,
            scheduler=self._scheduler(backlog, executor),
            executor=executor,
            completer=self._completer(),
            claimer=self._claimer(),
            leased=self.leased,
            releaser=Releaser(self.broker, consumer, self.leased, self.flights, self.job_ttl_ms),
            telemetry=self.telemetry,
            status=self.status,
            events=self.events,
            texts=CachedTexts(
                self.events,
                self.identity.keyring,
                self.broker.job_events,
                max_bytes=self.settings.inference.queue.max_event_bytes,
                now_ms=self.broker.now_ms,
            ),
            journal=journal,
            mirror=options.mirror,
            stop=self.stop,
            arm_breakers=self.arm_breakers,
        )
        inference = self.settings.inference
        limits = DrainLimits(
            most_jobs=self.most_jobs,
            most_bytes=self.most_bytes,
            most_delayed=self.most_jobs // 2,
            lease_s=inference.queue.lease_s,
            progress_s=inference.progress_limit_s,
        )
        checkpoint, clock = options.checkpoint, options.clock
        transfers = options.types.transfers(parts, limits, checkpoint=checkpoint, clock=clock)
        return options.types.drain(options.name, consumer, parts, limits, transfers, checkpoint=checkpoint, clock=clock)

    def _arm_breakers(self) -> ArmBreakers | None:
        if self.options.breakers is None:
            return None

        def with_arms() -> list[str]:
            return [name for name, model in tuple(self.lifecycle.models.items()) if model.arms is not None]

        return ArmBreakers(
            self.options.breakers,
            with_arms,
            ring=self.wake_up.ring,
            limits=self.settings.inference.safety.breaker_limits,
            on_trip=self._arm_stopped,
            clock=self.options.clock,
        )

    def _arm_stopped(self, name: str, record: BreakerRecord) -> None:
        model, local = split_breaker_name(name)
        label = local.partition(":")[0]
        arms = self.lifecycle.models[model].arms
        # The experiment may have ended meanwhile.
        content_hash = arms.content_of(label) if arms is not None else ""
        self.options.on_arm_stopped(Subject(model, label, content_hash), record)

    def _arm_counts(self, consumer: str) -> ArmCounts:
        models, clock = self.lifecycle.models, self.options.clock
        if self.arm_breakers is None:
            return ArmCounts(consumer, models, clock=clock)
        return ArmCounts(consumer, models, on_failing=self.arm_breakers.stop, clock=clock)

    def _lifecycle(self, packages: Sequence[Package]) -> ModelLifecycle:
        options, inference = self.options, self.settings.inference
        loader = options.types.loader(
            options.device,
            options.threads,
            headroom_pct=inference.batching.gpu_headroom_pct,
            ceiling=max(1, self.most_jobs // 2),
            timeout_s=inference.load_timeout_s,
            ring=self.wake_up.ring,
            clock=options.clock,
        )
        return ModelLifecycle(
            inference,
            packages,
            self.broker,
            loader,
            repository=options.repository or EmptyRepository(),
            tuner=self.tuner,
            metrics=options.metrics,
            verify=options.verify,
            on_version_change=self._on_version_change,
            ring=self.wake_up.ring,
            accepts_new_models=not self.settings.worker.models,
            deployments=self._deployments(),
            admits_arm=self.arm_breakers.admits if self.arm_breakers is not None else lambda _name, _label: True,
            gate=options.gate,
        )

    def _on_version_change(self, model: str, old: str, new: str) -> None:
        forgotten = self.answers.forget(old) if old else 0
        facts = {"model": model, "old": old, "new": new, "forgotten": forgotten}
        logger.info("the active version changed", extra=facts)
        self.options.on_version_change(model, old, new)

    def _deployments(self) -> DeploymentStore:
        verify = self.options.verify
        if self.options.deployments is not None:
            return self.options.deployments
        return (
            NullDeploymentStore() if verify is None else FileDeploymentStore(self.settings.home / "deployments", verify)
        )

    def _executor(self, model_threads: int, journal: Journal) -> Executor:
        options = self.options
        too_late = options.types.scheduler.too_late_check(self.broker.now_ms)
        return options.types.executor(
            model_threads,
            self.wake_up.ring,
            too_late,
            options.checkpoint,
            options.clock,
            journal,
            options.after_run,
        )

    def _intake(self) -> Intake:
        return self.options.types.intake(
            self.broker,
            self.identity.consumer,
            self.identity.keyring,
            worker=self.identity.name,
            job_ttl_ms=self.job_ttl_ms,
            max_crashes=self.settings.inference.queue.max_crashes,
            version_of=lambda model: self.lifecycle.models[model].label,
            arms=self.arms,
            listener=self.options.listener,
            metrics=self.options.metrics,
        )

    def _router(self) -> JobRouter:
        inference = self.settings.inference
        return self.options.types.router(
            self.lifecycle,
            self.placement,
            self.answers,
            self.flights,
            self.options.listener,
            self.options.metrics,
            is_paused=self.status.is_paused,
            preloads=inference.preload,
            isolates_tenants=inference.privacy.cache_tenant_isolation,
        )

    def _scheduler(self, backlog: Backlog, executor: Executor) -> Scheduler:
        return self.options.types.scheduler(
            backlog,
            executor,
            self.lifecycle.turns,
            self.options.listener,
            self._open_stream(),
            broker_now=self.broker.now_ms,
            clock=self.options.clock,
        )

    def _open_stream(self) -> OpenStream:
        def open_stream(job: ClaimedJob, touch: Callable[[], None]) -> EventStream:
            return EventStream(job, touch, self.events, keyring, max_bytes, self.broker.job_events, clock)

        keyring, max_bytes = self.identity.keyring, self.settings.inference.queue.max_event_bytes
        clock = self.options.clock
        return open_stream

    def _completer(self) -> Completer:
        return self.options.types.completer(
            self.identity.name,
            self.identity.keyring,
            self.lifecycle.models,
            self.leased,
            self.flights,
            self.answers,
            self.options.listener,
            self.options.metrics,
            client_tracebacks=self.settings.inference.queue.client_tracebacks,
            now_ms=self.broker.now_ms,
            clock=self.options.clock,
            jitter=self.options.jitter,
        )

    def _claimer(self) -> Claimer:
        queue = self.settings.inference.queue
        return self.options.types.claimer(
            self.broker,
            self.identity.consumer,
            self.lifecycle.models,
            self.leased,
            self.wake_up,
            most_jobs=self.most_jobs,
            most_bytes=self.most_bytes,
            ageing_ms=int(queue.ageing_s * 1000),
            result_ttl_ms=int(queue.result_ttl_s * 1000),
            checkpoint=self.options.checkpoint,
            clock=self.options.clock,
        )


def _job_spans(config: OpenTelemetryConfig, worker: str) -> JobSpans | None:
    if not config.traces:
        return None
    tracer = tracer_of()
    # It imports the package, of whose absence `tracer_of` tells.
    from penstock.workers.job_spans import JobSpans

    return JobSpans(tracer, worker)
