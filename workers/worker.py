"""One worker process: the parts that run beside Celery's loop, and the order of their start and end.

    open -- broker, probe, drain, optimizer, task endpoint, remote control --> start -- models, threads --> ready
    SIGTERM -> ask_to_stop -> the watchdog thread stops the parts in order -> wait_until_stopped -> close

Twenty-six kinds of threads run beside Celery's own:

    thread         module                         work; what it may call
    drain          drain.py                       the loop of jobs; the broker, and every part of the drain
    leases         leases.py                      renews leases, reports; the broker, a queue that the drain reads
    model          executor.py                    forwards; the runtime, the crash journal. One or more threads
    events         streaming/event_writer.py      writes the events of streaming jobs; the broker. 0 or 1
    prepare        executor.py                    tokenises the next batch; Runtime.prepare
    tokenise       runtime/tokeniser.py           tokenises parts of a large batch; the tokenizer. 0 to 3 for a version
    engine         generation/runner.py           the steps of a text engine; the engine. 0 or 1 for a version
    delivery       generation/runner.py           hands the texts of steps over; the events. 0 or 1 for a version
    text-server    generation/server_address.py   connects to a text server; its name server. 0 to 64 for a version
    load           versions/loader.py             loads one version; Runtime.load. At most two threads
    instance       runtime/instances.py           replaces an instance that died; its child process. One for each death
    cache-reads    cache/tiers.py                 asks the cache on disk and in Redis; both. 0 or 1
    cache-writes   cache/tiers.py                 writes answers to both. 0 or 1
    cache-rekey    cache/rekeying.py              seals entries of older keys again; the cache on disk. 0 or 1
    shadow-mirror  shadow/mirror.py               appends sampled jobs to the shadow queue; the broker. 0 or 1
    optimizer      levels/optimizer.py            optimized forms; the compiler, the gate, the audit log
    audit          process/audit_thread.py        records cache accesses, stores the ends of the audit log; disk, broker
    breakers       levels/form_breakers.py        circuit breakers of forms, shared through the broker
    arms           levels/arm_breakers.py         circuit breakers of candidates that share jobs; the broker
    celery-events  celery_bridge/events.py        sends task events; Celery's broker
    task-results   celery_bridge/task_results.py  ends tasks of `send_task`; the broker, Celery's broker and backend
    reconciler     versions/reconciler.py         follows the shared state; its store, requests to the drain. 0 or 1
    probe          observe/probe.py               HTTP; reads metrics and readiness. One more thread for each request
    heartbeat      process/heartbeat.py           writes to the supervisor; reads health. 0 or 1
    watchdog       worker.py                      ends an unhealthy process, stops the parts; health, stop of each part
    operator-rpc   process/operator_rpc.py        one request of an operator; registry, files, broker. At most four

Each hook of safety alerts has a thread, too: see safety/alerts.py.

Only the thread `drain` changes the state of a job. Other threads leave values or requests for it, and wake it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

import redis

from penstock.registry import garbage
from penstock.registry.admission import JobBuilder, SpecCache, limits_of
from penstock.registry.broker.base import Broker
from penstock.registry.broker.breakers import BreakerEnd, BreakerRecord
from penstock.registry.broker.redis_audit_heads import RedisAuditHeads
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.broker.redis_connection import connection_options
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.control import Command, CommandVerifier
from penstock.registry.desired_state import StateStore
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, Forbidden, PenstockError, UnknownModel
from penstock.registry.open_telemetry import exported_metrics, exported_spans
from penstock.registry.queues import CELERY_QUEUE, Priority, parse_name, stream_key
from penstock.registry.settings import Settings
from penstock.registry.signed import Verifier
from penstock.safety.alert_hooks import open_alerts
from penstock.safety.alerts import Alerts
from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.audit_accesses import CacheAccessAudit
from penstock.safety.golden_archive import GoldenArchive
from penstock.safety.keys import Audit, key_audit, load_data_keys
from penstock.safety.orchestrator import SafetyOrchestrator, Subject
from penstock.safety.payload_keys import envelope_keys
from penstock.safety.privacy import redactor_of
from penstock.safety.sealing import DataKeys
from penstock.safety.security import check_settings, has_data_key
from penstock.safety.validator_registry import ValidatorRegistry
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.cache.opening import open_tiers
from penstock.workers.cache.rekeying import Rekeying
from penstock.workers.celery_bridge.events import CeleryEventSender
from penstock.workers.celery_bridge.remote_control import (
    keep_foreign_results,
    refuse_commands,
    refuse_pool_commands,
    register_control_command,
    restored_tables,
    show_drain,
)
from penstock.workers.celery_bridge.result_store import TaskResultBackend
from penstock.workers.celery_bridge.task_ingress import InferTask, TaskIngress
from penstock.workers.celery_bridge.task_request import TaskRequests
from penstock.workers.celery_bridge.task_results import TaskResultForwarder
from penstock.workers.compilation import TorchCompiler
from penstock.workers.drain import Drain
from penstock.workers.levels.decision_audit import audit_decision
from penstock.workers.levels.decision_log import DecisionLog
from penstock.workers.levels.engine_decisions import EngineDecisions
from penstock.workers.levels.optimizer import InferenceOptimizer
from penstock.workers.levels.stopped_arms import tell_arm_stopped
from penstock.workers.observe.cost import CostEstimator, CostLedger
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.observe.probe import Probe
from penstock.workers.process import heartbeat
from penstock.workers.process.audit_thread import AuditThread
from penstock.workers.process.crash_journal import FileJournal, Journal, journal_path, report_crashes
from penstock.workers.process.descriptors import OwnDescriptor, StandardStreams, first_lost
from penstock.workers.process.device import Pin, granted_threads
from penstock.workers.process.exit_status import EXIT_UNHEALTHY
from penstock.workers.process.operator_rpc import OperatorRpcServer
from penstock.workers.process.stall import StallDetector
from penstock.workers.shadow.mirror import ShadowMirror
from penstock.workers.versions.reconciler import Reconciler
from penstock.workers.versions.repository import DiskRepository

__all__ = ["CeleryParts", "OperatorCommands", "Worker"]

_SERVICE: Final = "penstock-worker"
"""Of the spans and metrics that this process sends."""
_WATCH_S: Final = 0.1
_HEALTH_S: Final = 1.0
_REDIS_TIMEOUT_S: Final = 5.0
_HEADS_TIMEOUT_S: Final = 2.0
_BREAKERS_TIMEOUT_S: Final = 0.5
"""Shorter than the second after which breakers count as unreadable."""
_SHADOW_TIMEOUT_S: Final = 2.0

logger = logging.getLogger("penstock.server")


@dataclass(frozen=True, slots=True)
class CeleryParts:
    """The parts of a worker that hold Celery's application; app.py builds them. hostname: `gpu0@host`."""

    hostname: str
    listener: CeleryEventSender
    results: TaskResultBackend
    task: InferTask


class _Parts(NamedTuple):
    """Every part that `start` starts and `ask_to_stop` ends."""

    drain: Drain
    listener: CeleryEventSender
    forwarder: TaskResultForwarder
    optimizer: InferenceOptimizer | None
    reconciler: Reconciler | None
    streams: StandardStreams
    audit: AuditThread


class Worker:
    """Everything that runs beside Celery's loop in one worker process: open, start, ask_to_stop, close."""

    def __init__(self, settings: Settings, device: Pin, parts: _Parts, closing: ExitStack) -> None:
        self._settings = settings
        self._device = device
        self._drain, self._listener, self._forwarder, self._optimizer, self._reconciler, self._streams, self._audit = (
            parts
        )
        self._closing = closing
        self._grace_s: float | None = None
        """None until the worker is asked to stop."""
        self._was_ready = False
        self._descriptors: dict[str, OwnDescriptor] = {}
        """Those that cannot be put back, by name."""
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @classmethod
    def open(cls, settings: Settings, device: Pin, celery: CeleryParts) -> Self:
        """Build the parts, listen on the metrics port, and take the task endpoint and remote control.

        After an error everything that was opened is closed again. Raises ConfigurationError for a failed security
        check, for a data key that is missing, for a model without a package and for a metrics port that is in use;
        BrokerUnavailable.
        """
        _check_security(settings)
        with ExitStack() as closing:
            parts = _open_parts(settings, device, celery, closing)
            return cls(settings, device, parts, closing.pop_all())

    def close(self) -> None:
        """End everything that `open` began."""
        self._closing.close()

    def start(self) -> None:
        """Load the models and start the threads.

        Raises ConfigurationError for a model that cannot be loaded; BrokerUnavailable.
        """
        self._descriptors = _needed_descriptors(self._settings, self._device, self._drain)
        if self._settings.worker.heartbeat_fd is not None:
            heartbeat.start(self._settings.worker.heartbeat_fd, self._told_reason)
        self._drain.load()
        self._audit.start()
        if self._optimizer is not None:
            self._optimizer.start()
        garbage.freeze()
        self._listener.start()
        self._drain.start()
        self._forwarder.start()
        if self._reconciler is not None:
            self._reconciler.start()
        self._watchdog.start()

    def ask_to_stop(self, *, is_cold: bool) -> None:
        """Begin to stop. Sets one value and takes no lock, because signal handlers call it."""
        self._grace_s = 0.0 if is_cold else self._settings.inference.queue.drain_grace_s

    def wait_until_stopped(self) -> None:
        """Return when every part has ended that `ask_to_stop` ends; at once before `start`."""
        if self._watchdog.ident is None:
            return
        self._watchdog.join()
        if not self._drain.parts.stop.is_set:
            # The watchdog died before it was asked to stop.
            self._stop(self._grace_s or 0.0)

    def _watch(self) -> None:
        stall = StallDetector(_HEALTH_S, recovery_s=_HEALTH_S)
        next_look = time.monotonic()
        while (grace_s := self._grace_s) is None:
            now = time.monotonic()
            self._streams.restore()
            if lost := first_lost(self._descriptors):
                self._end_in_order(f"a model closed descriptors of this process: {lost}")
            if stall.turn(now):
                # The other threads stood still as well: let them run before they are judged.
                next_look = now
            elif now >= next_look:
                next_look = now + _HEALTH_S
                self._end_if_unhealthy(self._unhealthy_reason())
            else:
                # Soon, because the supervisor kills a process whose forward is over its limit, and gives nothing back.
                self._end_if_unhealthy(self._drain.health.overdue_here())
            self._announce()
            time.sleep(_WATCH_S)
        self._stop(grace_s)

    def _end_if_unhealthy(self, reason: str | None) -> None:
        if reason:
            _tell_the_end(reason)
            # Other threads may hang, so this does not wait for them. What they hold returns when the leases lapse.
            with suppress(PenstockError):
                self._drain.give_back_others()
            os._exit(EXIT_UNHEALTHY)

    def _end_in_order(self, reason: str) -> None:
        """End this process after what has run is committed. The new one has every descriptor."""
        _tell_the_end(reason)
        self._drain.wind_up(self._settings.inference.queue.drain_grace_s)
        os._exit(EXIT_UNHEALTHY)

    def _unhealthy_reason(self) -> str | None:
        if self._watchdog.is_alive() and self._grace_s is None and not self._forwarder.is_alive():
            return "the thread of Celery task results has ended"
        return self._drain.health.unhealthy_reason()

    def _told_reason(self) -> str | None:
        """What the supervisor hears. On a reason it kills the process at once: so it does not hear that of a forward on
        the I/O thread, after which the watchdog has jobs to give back.
        """
        if self._grace_s is None and self._watchdog.is_alive() and self._drain.health.overdue_here():
            return None
        return self._unhealthy_reason()

    def _announce(self) -> None:
        """Log one line when the worker takes its first jobs."""
        if self._was_ready:
            return
        self._was_ready, facts = self._drain.health.readiness
        if self._was_ready:
            logger.info(
                "ready",
                extra={
                    "worker": self._drain.name,
                    "models": facts["models"],
                    "device": self._device.device,
                    "queues": [*map(_queue_of, facts["models"]), CELERY_QUEUE],
                },
            )

    def _stop(self, grace_s: float) -> None:
        # The claims end first; the end of any other part may take a while.
        self._drain.ask_to_stop(grace_s)
        if self._reconciler is not None:
            self._reconciler.ask_to_stop()
        self._drain.stop(grace_s)
        if self._optimizer is not None:
            self._optimizer.stop()
        if self._reconciler is not None:
            self._reconciler.stop()
        self._forwarder.stop()
        self._listener.stop()
        self._audit.stop()


class OperatorCommands:
    """Carries out the signed commands of operators, on Celery's thread."""

    def __init__(
        self,
        drain: Drain,
        rpc_server: OperatorRpcServer,
        *,
        optimizer: InferenceOptimizer | None,
        reconciler: Reconciler | None,
    ) -> None:
        self._lifecycle = drain.lifecycle
        self._answers = drain.parts.answers
        self._rpc_server = rpc_server
        self._optimizer = optimizer
        self._reconciler = reconciler

    def execute(self, command: Command) -> str:
        """Begin what the command asks for, and say so. Raises Rejected for what this worker cannot do."""
        if command.action == "rpc":
            return self._rpc_server.handle(command)
        if command.action == "reconcile":
            return self._reconcile()
        if command.action == "clear_cache" and not command.model:
            return f"removed {self._answers.clear()} cached answers from memory"
        parse_name("model", command.model)
        if command.action in ("load", "unload"):
            parse_name("version", command.version)
        if not self._lifecycle.may_serve(command.model):
            raise UnknownModel(f"{command.model} is not served here. Expected one of this worker's models")
        reference = f"{command.model}/{command.version}"
        if command.action == "load":
            self._request(self._lifecycle.request_load, command)
            return f"loading {reference}"
        if command.action == "unload":
            self._request(self._lifecycle.request_unload, command)
            return f"unloading {reference}"
        if command.action == "clear_cache":
            contents = self._lifecycle.offers.contents_of(command.model)
            return f"removed {sum(map(self._answers.forget, contents))} cached answers of {command.model} from memory"
        if self._optimizer is None:
            raise Forbidden("Optimization is off on this worker. Expected inference.enabled on the worker")
        self._optimizer.ask(command.model, command.action)
        return f"asked to {command.action} {command.model}; `penstock models levels` shows the result"

    def _request(self, request: Callable[..., None], command: Command) -> None:
        asked = partial(request, command.model, command.version, content_hash=command.content_hash)
        if self._reconciler is None:
            asked()
        else:
            self._reconciler.sweep_before(asked)

    def _reconcile(self) -> str:
        if self._reconciler is None:
            raise Forbidden("This worker follows no shared state. Expected the command load or unload")
        self._reconciler.nudge()
        return "reconciling"


def _check_security(settings: Settings) -> None:
    """Log the warnings. Raises ConfigurationError for a check that failed."""
    checks = check_settings(settings, has_data_key=has_data_key(settings))
    for check in checks:
        if check.status == "warning":
            facts = {"check": check.name, "reason": check.reason, "fix": check.fix}
            logger.warning("a security check warns", extra=facts)
    failed = [check for check in checks if not check.passed]
    if failed:
        told = "; ".join(f"{check.name}: {check.reason}. Expected {check.fix}" for check in failed)
        raise ConfigurationError(f"The worker does not start, because of a security check. {told}")


class _DrainReadiness:
    """The probe's readiness check: not ready until there is a drain, then as the drain says."""

    drain: Drain | None = None

    def __call__(self) -> tuple[bool, Mapping[str, Any]]:
        return self.drain.health.readiness if self.drain else (False, {"problem": "starting"})


def _open_parts(settings: Settings, device: Pin, celery: CeleryParts, closing: ExitStack) -> _Parts:
    verify, metrics = _verifier(settings), _open_metrics(settings, device)
    metrics.ready(False)
    # Closed at last: the drain's last jobs have spans, too.
    closing.enter_context(exported_spans(settings.inference.open_telemetry, _SERVICE, celery.hostname))
    broker = _open_broker(settings, closing)
    log = _open_audit_log(settings, celery.hostname, closing)
    audit_key = key_audit(log)
    data_keys = load_data_keys(settings, audit_key)
    privacy = settings.inference.privacy
    how = privacy.audit_cache_accesses if privacy.audit_log_enabled else "off"
    accesses = CacheAccessAudit(log, how, on_failure=metrics.audit_failed)
    breakers = RedisBreakers.from_url(settings.redis_url or "", timeout_s=_BREAKERS_TIMEOUT_S)
    closing.callback(breakers.close)
    archive = GoldenArchive.of(settings, data_keys)
    opened = open_alerts(settings, metrics.alert)
    closing.callback(opened.close)
    optimizer = _build_optimizer(settings, device.device, metrics, log, archive, breakers, opened.alerts)
    run = secrets.token_hex(8) if optimizer is None else optimizer.log.run
    gate = SafetyOrchestrator(EngineDecisions(partial(audit_decision, log), metrics, run))
    streams = StandardStreams()
    drain = _open_drain(
        settings,
        broker,
        device,
        celery,
        metrics,
        verify,
        data_keys,
        audit_key,
        optimizer,
        streams,
        accesses,
        breakers,
        partial(tell_arm_stopped, metrics, opened.alerts, log),
        gate,
        closing,
    )
    reconciler = _build_reconciler(settings, drain, celery.hostname, verify)
    rpc_server = OperatorRpcServer(settings, broker, verify)
    commands = OperatorCommands(drain, rpc_server, optimizer=optimizer, reconciler=reconciler)
    ingress, forwarder = _build_endpoint(settings, broker, celery, data_keys, closing)
    closing.enter_context(_task_endpoint(celery.task, ingress))
    closing.enter_context(_remote_control(settings, drain, celery, CommandVerifier(verify, celery.hostname), commands))
    return _Parts(drain, celery.listener, forwarder, optimizer, reconciler, streams, AuditThread(log, accesses))


def _open_metrics(settings: Settings, device: Pin) -> InferenceMetrics:
    """Raises ConfigurationError where costs are to be estimated, and this device has no rate."""
    estimator = CostEstimator.of(settings.inference.cost, device.gpu_name or device.device)
    return InferenceMetrics(settings.inference.metrics_buckets, CostLedger(estimator) if estimator else None)


def _open_drain(
    settings: Settings,
    broker: Broker,
    device: Pin,
    celery: CeleryParts,
    metrics: InferenceMetrics,
    verify: Verifier | None,
    data_keys: DataKeys | None,
    audit_key: Audit,
    optimizer: InferenceOptimizer | None,
    streams: StandardStreams,
    accesses: CacheAccessAudit,
    breakers: BreakerEnd,
    on_arm_stopped: Callable[[Subject, BreakerRecord], None],
    gate: SafetyOrchestrator,
    closing: ExitStack,
) -> Drain:
    """The drain, its journal, and the probe that shows its readiness: the probe listens before there is a drain."""
    repository = DiskRepository.of(settings)
    packages = repository.initial_packages(settings)
    redactor, tiers = redactor_of(settings.inference.privacy), open_tiers(settings, data_keys)
    if (rekeying := Rekeying.begin(tiers, data_keys, audit_key)) is not None:
        closing.callback(rekeying.stop)
    readiness = _DrainReadiness()
    probe = _open_probe(settings, device, metrics, readiness, closing)
    config = settings.inference.open_telemetry
    closing.enter_context(exported_metrics(config, metrics, probe.refresh, _SERVICE, celery.hostname))
    readiness.drain = build_drain(
        settings,
        broker,
        packages,
        DrainOptions(
            name=celery.hostname,
            device=device.device,
            threads=granted_threads(device.device, os.environ),
            listener=celery.listener,
            metrics=metrics,
            probe_url=f"http://{settings.worker.metrics_host}:{probe.port}",
            journal=partial(_open_journal, settings, broker, closing),
            repository=repository,
            verify=verify,
            data_keys=data_keys,
            tiers=tiers,
            may_leave=redactor.may_leave_memory if redactor.is_active else None,
            tuner=optimizer,
            after_run=streams.restore,
            accesses=accesses,
            mirror=_open_mirror(settings, data_keys, metrics, verify),
            breakers=breakers,
            on_arm_stopped=on_arm_stopped,
            gate=gate,
        ),
    )
    return readiness.drain


def _open_broker(settings: Settings, closing: ExitStack) -> RedisStreams:
    broker = RedisStreams.from_url(
        settings.redis_url or "",
        timeout_s=_REDIS_TIMEOUT_S,
        result_ttl_ms=int(settings.inference.queue.result_ttl_s * 1000),
    )
    closing.callback(broker.close)
    return broker


def _open_mirror(
    settings: Settings, data_keys: DataKeys | None, metrics: InferenceMetrics, verify: Verifier | None
) -> ShadowMirror:
    """On a connection of its own: no call of the drain waits behind one of the mirror. The drain closes it."""
    end = RedisShadow.from_url(settings.redis_url or "", timeout_s=_SHADOW_TIMEOUT_S)
    return ShadowMirror(end, envelope_keys(settings, data_keys), metrics, verify=verify)


def _open_probe(
    settings: Settings, device: Pin, metrics: InferenceMetrics, readiness: _DrainReadiness, closing: ExitStack
) -> Probe:
    probe = Probe(
        metrics,
        readiness,
        host=settings.worker.metrics_host,
        port=settings.worker.probe_port(device.index),
        bearer_file=settings.worker.metrics_bearer_file,
    )
    probe.start()
    closing.callback(probe.stop)
    return probe


def _open_journal(settings: Settings, broker: Broker, closing: ExitStack, consumer: str, seats: int) -> Journal:
    """The crash journal of this process. Reports the journals of dead processes on this machine first.

    A supervisor reports them at once; those of unsupervised workers are reported here. Raises ConfigurationError when
    the journal cannot be written; BrokerUnavailable.
    """
    home, ttl_ms = settings.home, int(settings.inference.queue.job_ttl_s * 1000)
    try:
        report_crashes(home, broker, ttl_ms, DecisionLog(home).note_death)
        journal = FileJournal(journal_path(home, os.getpid()), consumer, seats)
    except BrokerUnavailable:
        raise
    except OSError as error:
        raise ConfigurationError(
            f"The journal of running jobs cannot be written ({error.strerror}). Expected a PENSTOCK_HOME that this "
            "user may write to"
        ) from None
    closing.callback(journal.close)
    return journal


def _open_audit_log(settings: Settings, name: str, closing: ExitStack) -> AuditLogger:
    """The audit log of this worker. The broker keeps the ends of its chain: the registry's client takes 30 MB.

    Raises ConfigurationError when the log cannot be written.
    """
    heads = RedisAuditHeads.from_url(settings.redis_url or "", timeout_s=_HEADS_TIMEOUT_S)
    closing.callback(heads.close)
    redact = redactor_of(settings.inference.privacy).redact
    log = AuditLogger(config=AuditConfig.of(settings), writer=name, redact=redact, heads=[heads])
    closing.callback(log.close)
    return log


def _build_optimizer(
    settings: Settings,
    device: str,
    metrics: InferenceMetrics,
    log: AuditLogger,
    archive: GoldenArchive | None,
    breakers: BreakerEnd,
    alerts: Alerts,
) -> InferenceOptimizer | None:
    """None where the settings turn optimization off.

    Raises ConfigurationError for folders that it cannot use, and for an entry point of a validator that it cannot load.
    """
    inference, home = settings.inference, settings.home
    if not inference.enabled:
        return None
    validators = ValidatorRegistry()
    if found := validators.load_entry_points():
        logger.info("custom validators", extra={"validators": found})
    return InferenceOptimizer(
        inference,
        home=home,
        device=device,
        audit=partial(audit_decision, log),
        metrics=metrics,
        compiler=TorchCompiler(inference.compilation, home / "compilation.key"),
        validators=validators,
        archive=archive,
        breakers=breakers,
        alerts=alerts,
    )


def _build_reconciler(settings: Settings, drain: Drain, worker: str, verify: Verifier | None) -> Reconciler | None:
    """None without a shared state: then control commands alone tell this worker which versions to load."""
    inference = settings.inference
    if not inference.state_reconcile_enabled:
        return None
    url = inference.state_redis_url or settings.redis_url or ""
    return Reconciler(
        StateStore.from_url(url, inference.state_prefix),
        drain.lifecycle,
        worker=worker,
        interval_s=inference.state_reconcile_interval_s,
        verify=verify,
    )


def _build_endpoint(
    settings: Settings, broker: RedisStreams, celery: CeleryParts, data_keys: DataKeys | None, closing: ExitStack
) -> tuple[TaskIngress, TaskResultForwarder]:
    """Both ends of the Celery task endpoint. Raises ConfigurationError where it is to be open and payloads sealed."""
    if settings.inference.celery.lane == "trusted" and settings.inference.seals_payloads:
        raise ConfigurationError(
            "celery.lane is trusted and payloads must be sealed, but Celery's broker and result backend hold the "
            "arguments and results of send_task in plaintext. Expected PENSTOCK_INFERENCE_CELERY_LANE=off, or "
            "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS=off"
        )
    client = redis.Redis.from_url(settings.redis_url or "", **connection_options(_REDIS_TIMEOUT_S))
    closing.callback(client.close)
    queue = settings.inference.queue
    limits, result_ttl_ms = limits_of(queue), int(queue.result_ttl_s * 1000)
    # A result may expire unread, and its task ends after that.
    keep_ms = limits.job_ttl_ms + 2 * result_ttl_ms
    keyring = envelope_keys(settings, data_keys)
    requests = TaskRequests(client, keyring, keep_ms=keep_ms, settled_ms=result_ttl_ms)
    ingress = TaskIngress(
        broker,
        JobBuilder.of(settings, keyring),
        SpecCache(settings.inference.repo_root),
        limits,
        requests.keep,
        is_open=settings.is_lane_open,
    )
    return ingress, TaskResultForwarder(client, broker, keyring, requests, celery.results, worker=celery.hostname)


@contextmanager
def _task_endpoint(task: InferTask, ingress: TaskIngress) -> Iterator[None]:
    """Inside the block, the task `penstock.infer` submits jobs."""
    task.ingress = ingress
    try:
        yield
    finally:
        task.ingress = None


@contextmanager
def _remote_control(
    settings: Settings, drain: Drain, celery: CeleryParts, verifier: CommandVerifier, commands: OperatorCommands
) -> Iterator[None]:
    """Inside the block, Celery's remote control shows the drain and accepts operators' commands."""
    with restored_tables():
        show_drain(drain, celery.listener, celery.hostname, settings=settings.inference.as_shown())
        register_control_command(verifier, commands.execute)
        keep_foreign_results()
        if settings.inference.celery.remote_control:
            refuse_pool_commands()
        else:
            refuse_commands()
        yield


def _tell_the_end(reason: str) -> None:
    # A log that raises, for example a handler of a model, must not keep the process alive.
    with suppress(BaseException):
        logger.critical("worker gives up", extra={"reason": reason})
        logging.shutdown()


def _needed_descriptors(settings: Settings, device: Pin, drain: Drain) -> dict[str, OwnDescriptor]:
    numbers = {"the lock of the device": device.lock, "the wake-up of the drain": drain.parts.claimer.wake_up.fd}
    if settings.worker.heartbeat_fd is not None:
        numbers["the pipe of the heartbeat"] = settings.worker.heartbeat_fd
    if isinstance(drain.parts.journal, FileJournal):
        numbers["the crash journal"] = drain.parts.journal.fd
    found = {name: OwnDescriptor(number) for name, number in numbers.items()}
    return {name: descriptor for name, descriptor in found.items() if descriptor.is_intact}


def _queue_of(model: str) -> str:
    """The name that the queues of a model's four priorities begin with: `infer.{mlp}`."""
    return stream_key(model, Priority.NORMAL).rpartition(".")[0]


def _verifier(settings: Settings) -> Verifier | None:
    """Checks operators' signatures; None where the settings name no key."""
    if not settings.operator_public_keys:
        return None
    # Here: a worker that checks no signature and encrypts nothing runs without the library cryptography.
    from penstock.safety.operator_key import PublicKeys

    keys = PublicKeys.parse(settings.operator_public_keys)
    return keys.verify if len(keys) else None
