"""Settings, a broker and model packages -> a drain with all its parts."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.registry.broker.base import Broker
from penstock.registry.errors import ConfigurationError
from penstock.registry.package import Package
from penstock.registry.settings import Settings
from penstock.registry.signed import Verifier
from penstock.workers.backlog import Backlog
from penstock.workers.cache import AnswerCache, SingleFlight
from penstock.workers.claims import Claimer, WakeUp
from penstock.workers.completer import Completer
from penstock.workers.drain import Drain, DrainLimits, DrainParts, StopSignal
from penstock.workers.executor import Executor, seats_for
from penstock.workers.intake import Intake
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.listener import JobListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.process.crash_journal import Journal, NullJournal
from penstock.workers.router import JobRouter
from penstock.workers.scheduler import Scheduler
from penstock.workers.status import StatusReporter, WorkerIdentity
from penstock.workers.streaming import EventStream
from penstock.workers.telemetry import BatchTelemetry
from penstock.workers.versions.deployment_store import DeploymentStore, FileDeploymentStore, NullDeploymentStore
from penstock.workers.versions.handover import HandOver
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.loader import Loader
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.repository import EmptyRepository, ModelRepository
from penstock.workers.versions.tuner import NullTuner, Tuner

__all__ = ["PartTypes", "build_drain"]

logger = logging.getLogger("penstock.server")


@dataclass(frozen=True, slots=True)
class PartTypes:
    """The classes of the parts. The simulator puts its own in their places."""

    drain: type[Drain] = Drain
    intake: type[Intake] = Intake
    router: type[JobRouter] = JobRouter
    flights: type[SingleFlight] = SingleFlight
    answers: type[AnswerCache] = AnswerCache
    scheduler: type[Scheduler] = Scheduler
    executor: type[Executor] = Executor
    completer: type[Completer] = Completer
    loader: type[Loader] = Loader
    placement: type[HandOver] = HandOver
    wake_up: type[WakeUp] = WakeUp


def build_drain(
    settings: Settings,
    broker: Broker,
    packages: Sequence[Package],
    *,
    name: str,
    device: str,
    threads: int,
    listener: JobListener,
    metrics: InferenceMetrics,
    probe_url: str = "",
    checkpoint: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    jitter: Callable[[], float] = random.random,
    journal: Callable[[str, int], Journal] = lambda _consumer, _seats: NullJournal(),
    repository: ModelRepository | None = None,
    verify: Verifier | None = None,
    on_version_change: Callable[[str, str, str], None] = lambda _model, _old, _new: None,
    tuner: Tuner | None = None,
    deployments: DeploymentStore | None = None,
    types: PartTypes | None = None,
) -> Drain:
    """A drain that serves the models of `packages`. Raises ConfigurationError without a package.

    name: the worker's, unique on the broker. device, threads: see Runtime.load. probe_url: where its probe answers, for
    its report. checkpoint: called with the name of each point at which a crash is worth testing. clock: monotonic
    seconds. jitter: random numbers in [0, 1). journal: opens the crash journal of this consumer, with so many seats.
    repository: where other versions of the models are found; None: nowhere. verify: checks the operators' signatures
    on records; None: no signatures are required. on_version_change: called with a model, the content hash that was
    active until now (empty: none) and the one that is active from now on. tuner: makes loaded versions faster.
    deployments: the decisions that this machine has followed; None: where signatures are required, those under the
    home.
    """
    if not packages:
        raise ConfigurationError("There is no model to serve. Expected at least one package under the models root")
    types = types or PartTypes()
    inference = settings.inference
    queue, batching = inference.queue, inference.batching
    most_jobs = batching.max_queue_depth
    job_ttl_ms, result_ttl_ms = int(queue.job_ttl_s * 1000), int(queue.result_ttl_s * 1000)
    # A restarted worker must not pass the fence of its predecessor.
    identity = WorkerIdentity(name, f"{name}:{secrets.token_hex(4)}", device, probe_url)
    tuner = tuner or NullTuner()
    wake_up = types.wake_up()
    answers = types.answers(inference.cache, clock)
    loader = types.loader(
        device,
        threads,
        headroom_pct=batching.gpu_headroom_pct,
        ceiling=max(1, most_jobs // 2),
        timeout_s=inference.load_timeout_s,
        ring=wake_up.ring,
        clock=clock,
    )
    lifecycle = ModelLifecycle(
        inference,
        packages,
        broker,
        loader,
        repository=repository or EmptyRepository(),
        tuner=tuner,
        metrics=metrics,
        verify=verify,
        on_version_change=_forgetting(answers, on_version_change),
        ring=wake_up.ring,
        accepts_new_models=not settings.worker.models,
        deployments=deployments or _deployments_of(settings, verify),
    )
    placement = types.placement(lifecycle, Peers(broker, name, clock), clock, most_waiting=most_jobs // 4)
    flights, leased, stop = types.flights(), LeasedJobs(), StopSignal(clock)
    telemetry = BatchTelemetry(listener, metrics, answers)
    status = StatusReporter(
        identity, broker, lifecycle, leased, telemetry, answers.memory, metrics, tuner, on_change=wake_up.ring
    )
    backlog = Backlog(lifecycle.turns)
    model_threads = max(version.policy.concurrency for version in lifecycle.turns)
    opened_journal = journal(identity.consumer, seats_for(model_threads))
    too_late = types.scheduler.too_late_check(broker.now_ms)
    executor = types.executor(model_threads, wake_up.ring, too_late, checkpoint, clock, opened_journal)

    def open_stream(job: ClaimedJob, touch: Callable[[], None]) -> EventStream:
        return EventStream(
            job,
            touch,
            broker,
            identity.consumer,
            settings.keyring,
            job_ttl_ms,
            may_wait=lambda: not stop.is_over(),
        )

    parts = DrainParts(
        broker=broker,
        listener=listener,
        metrics=metrics,
        lifecycle=lifecycle,
        placement=placement,
        intake=types.intake(
            broker,
            identity.consumer,
            settings.keyring,
            worker=name,
            job_ttl_ms=job_ttl_ms,
            max_crashes=queue.max_crashes,
            version_of=lambda model: lifecycle.models[model].label,
            listener=listener,
            metrics=metrics,
        ),
        router=types.router(
            lifecycle,
            placement,
            answers,
            flights,
            listener,
            metrics,
            is_paused=status.is_paused,
            preloads=inference.preload,
            isolates_tenants=inference.privacy.cache_tenant_isolation,
        ),
        flights=flights,
        answers=answers,
        backlog=backlog,
        scheduler=types.scheduler(
            backlog, executor, lifecycle.turns, listener, open_stream, broker_now=broker.now_ms, clock=clock
        ),
        executor=executor,
        completer=types.completer(
            name,
            settings.keyring,
            lifecycle.models,
            leased,
            flights,
            answers,
            listener,
            metrics,
            now_ms=broker.now_ms,
            clock=clock,
            jitter=jitter,
        ),
        claimer=Claimer(
            broker,
            identity.consumer,
            lifecycle.models,
            leased,
            wake_up,
            most_jobs=most_jobs,
            ageing_ms=int(queue.ageing_s * 1000),
            result_ttl_ms=result_ttl_ms,
            checkpoint=checkpoint,
            clock=clock,
        ),
        leased=leased,
        telemetry=telemetry,
        status=status,
        journal=opened_journal,
        stop=stop,
    )
    limits = DrainLimits(most_jobs=most_jobs, most_delayed=most_jobs // 2, lease_s=queue.lease_s)
    return types.drain(name, identity.consumer, parts, limits, checkpoint=checkpoint, clock=clock)


def _forgetting(
    answers: AnswerCache, on_version_change: Callable[[str, str, str], None]
) -> Callable[[str, str, str], None]:
    """Empties the cache of a version's answers when another version is activated, then calls `on_version_change`."""

    def changed(model: str, old: str, new: str) -> None:
        forgotten = answers.memory.forget(old) if old else 0
        logger.info(
            "the active version changed", extra={"model": model, "old": old, "new": new, "forgotten": forgotten}
        )
        on_version_change(model, old, new)

    return changed


def _deployments_of(settings: Settings, verify: Verifier | None) -> DeploymentStore:
    return FileDeploymentStore(settings.home / "deployments", verify) if verify is not None else NullDeploymentStore()
