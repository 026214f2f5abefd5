"""One worker process: the parts that run beside Celery's loop, and the order of their start and end.

    open -- broker, probe, drain, optimizer, task endpoint, remote control --> start -- models, threads --> ready
    SIGTERM -> ask_to_stop -> the watchdog thread stops the parts in order -> wait_until_stopped -> close

Fifteen kinds of threads run beside Celery's own:

    thread         module                         work; what it may call
    drain          drain.py                       the loop of jobs; the broker, and every part of the drain
    leases         leases.py                      renews leases, reports; the broker, a queue that the drain reads
    model          executor.py                    forwards; the runtime, the crash journal. One or more threads
    prepare        executor.py                    tokenises the next batch; Runtime.prepare
    tokenise       runtime/tokeniser.py           tokenises parts of a large batch; the tokenizer. 0 to 3 for a version
    load           versions/loader.py             loads one version; Runtime.load. At most two threads
    instance       runtime/instances.py           replaces an instance that died; its child process. One for each death
    optimizer      levels/optimizer.py            optimized forms; the compiler, the gate, the audit log
    celery-events  celery_bridge/events.py        sends task events; Celery's broker
    task-results   celery_bridge/task_results.py  ends tasks of `send_task`; the broker, Celery's broker and backend
    reconciler     versions/reconciler.py         follows the shared state; its store, requests to the drain. 0 or 1
    probe          observe/probe.py               HTTP; reads metrics and readiness. One more thread for each request
    heartbeat      process/heartbeat.py           writes to the supervisor; reads health. 0 or 1
    watchdog       worker.py                      ends an unhealthy process, stops the parts; health, stop of each part
    operator-rpc   process/operator_rpc.py        one request of an operator; registry, files, broker. At most four

Only the thread `drain` changes the state of a job. Other threads leave values or requests for it, and wake it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

import redis

from penstock.registry.admission import JobBuilder, SpecCache, limits_of
from penstock.registry.broker.base import Broker
from penstock.registry.broker.redis_connection import connection_options
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.control import Command, CommandVerifier
from penstock.registry.desired_state import StateStore
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, Forbidden, UnknownModel
from penstock.registry.queues import CELERY_QUEUE, Priority, stream_key
from penstock.registry.settings import Settings
from penstock.registry.signed import Verifier
from penstock.safety.audit import AuditLog
from penstock.safety.keys import PublicKeys
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.celery_bridge.events import CeleryEventSender
from penstock.workers.celery_bridge.remote_control import (
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
from penstock.workers.levels.decision_log import DecisionLog
from penstock.workers.levels.optimizer import Optimizer
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.observe.probe import Probe
from penstock.workers.process import garbage, heartbeat
from penstock.workers.process.crash_journal import FileJournal, Journal, journal_path, report_crashes
from penstock.workers.process.device import Pin, granted_threads
from penstock.workers.process.exit_status import EXIT_UNHEALTHY
from penstock.workers.process.operator_rpc import OperatorRpcServer
from penstock.workers.process.stall import StallDetector
from penstock.workers.versions.reconciler import Reconciler
from penstock.workers.versions.repository import DiskRepository

__all__ = ["CeleryParts", "OperatorCommands", "Worker"]

_WATCH_S: Final = 0.1
_HEALTH_S: Final = 1.0
_REDIS_TIMEOUT_S: Final = 5.0

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
    optimizer: Optimizer | None
    reconciler: Reconciler | None


class Worker:
    """Everything that runs beside Celery's loop in one worker process: open, start, ask_to_stop, close."""

    def __init__(self, settings: Settings, device: Pin, parts: _Parts, closing: ExitStack) -> None:
        self._settings = settings
        self._device = device
        self._drain, self._listener, self._forwarder, self._optimizer, self._reconciler = parts
        self._closing = closing
        self._grace_s: float | None = None
        """None until the worker is asked to stop."""
        self._was_ready = False
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @classmethod
    def open(cls, settings: Settings, device: Pin, celery: CeleryParts) -> Self:
        """Build the parts, listen on the metrics port, and take the task endpoint and remote control.

        After an error everything that was opened is closed again. Raises ConfigurationError for a model without a
        package and for a metrics port that is in use; BrokerUnavailable.
        """
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
        if self._settings.worker.heartbeat_fd is not None:
            heartbeat.start(self._settings.worker.heartbeat_fd, self._unhealthy_reason)
        self._drain.load()
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
        stall = StallDetector(_HEALTH_S)
        next_look = time.monotonic()
        while (grace_s := self._grace_s) is None:
            now = time.monotonic()
            if stall.turn(now):
                # The other threads stood still as well: let them run before they are judged.
                next_look = now + _HEALTH_S
            if now >= next_look:
                next_look = now + _HEALTH_S
                self._end_if_unhealthy()
            self._announce()
            time.sleep(_WATCH_S)
        self._stop(grace_s)

    def _end_if_unhealthy(self) -> None:
        if reason := self._unhealthy_reason():
            logger.critical("worker gives up", extra={"reason": reason})
            logging.shutdown()
            # Other threads may hang, so this does not wait for them. Their jobs return when the leases lapse.
            os._exit(EXIT_UNHEALTHY)

    def _unhealthy_reason(self) -> str | None:
        if self._watchdog.is_alive() and self._grace_s is None and not self._forwarder.is_alive():
            return "the thread of Celery task results has ended"
        return self._drain.unhealthy_reason()

    def _announce(self) -> None:
        """Log one line when the worker takes its first jobs."""
        if self._was_ready:
            return
        self._was_ready, facts = self._drain.readiness
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


class OperatorCommands:
    """Carries out the signed commands of operators, on Celery's thread."""

    def __init__(
        self,
        drain: Drain,
        rpc_server: OperatorRpcServer,
        *,
        optimizer: Optimizer | None,
        reconciler: Reconciler | None,
    ) -> None:
        self._lifecycle = drain.lifecycle
        self._rpc_server = rpc_server
        self._optimizer = optimizer
        self._reconciler = reconciler

    def execute(self, command: Command) -> str:
        """Begin what the command asks for, and say so. Raises Rejected for what this worker cannot do."""
        if command.action == "rpc":
            return self._rpc_server.handle(command)
        if command.action == "reconcile":
            return self._reconcile()
        if not self._lifecycle.may_serve(command.model):
            raise UnknownModel(f"{command.model} is not served here. Expected one of this worker's models")
        reference = f"{command.model}/{command.version}"
        if command.action == "load":
            self._lifecycle.request_load(command.model, command.version, content_hash=command.content_hash)
            return f"loading {reference}"
        if command.action == "unload":
            self._lifecycle.request_unload(command.model, command.version, content_hash=command.content_hash)
            return f"unloading {reference}"
        if self._optimizer is None:
            raise Forbidden("Optimization is off on this worker. Expected inference.enabled on the worker")
        self._optimizer.ask(command.model, command.action)
        return f"asked to {command.action} {command.model}; `penstock models levels` shows the result"

    def _reconcile(self) -> str:
        if self._reconciler is None:
            raise Forbidden("This worker follows no shared state. Expected the command load or unload")
        self._reconciler.nudge()
        return "reconciling"


class _DrainReadiness:
    """The probe's readiness check: not ready until there is a drain, then as the drain says."""

    drain: Drain | None = None

    def __call__(self) -> tuple[bool, Mapping[str, Any]]:
        return self.drain.readiness if self.drain else (False, {"problem": "starting"})


def _open_parts(settings: Settings, device: Pin, celery: CeleryParts, closing: ExitStack) -> _Parts:
    verify, metrics = _verifier(settings), InferenceMetrics(settings.inference.metrics_buckets)
    broker = _open_broker(settings, closing)
    optimizer = _build_optimizer(settings, device.device, metrics)
    drain = _open_drain(settings, broker, device, celery, metrics, verify, optimizer, closing)
    reconciler = _build_reconciler(settings, drain, celery.hostname, verify)
    rpc_server = OperatorRpcServer(settings, broker, verify)
    commands = OperatorCommands(drain, rpc_server, optimizer=optimizer, reconciler=reconciler)
    ingress, forwarder = _build_endpoint(settings, broker, celery, closing)
    closing.enter_context(_task_endpoint(celery.task, ingress))
    closing.enter_context(_remote_control(settings, drain, celery, CommandVerifier(verify, celery.hostname), commands))
    return _Parts(drain, celery.listener, forwarder, optimizer, reconciler)


def _open_drain(
    settings: Settings,
    broker: Broker,
    device: Pin,
    celery: CeleryParts,
    metrics: InferenceMetrics,
    verify: Verifier | None,
    optimizer: Optimizer | None,
    closing: ExitStack,
) -> Drain:
    """The drain, its journal, and the probe that shows its readiness: the probe listens before there is a drain."""
    repository = DiskRepository.of(settings)
    packages = repository.initial_packages(settings)
    readiness = _DrainReadiness()
    probe = _open_probe(settings, device, metrics, readiness, closing)
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
            tuner=optimizer,
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


def _build_optimizer(settings: Settings, device: str, metrics: InferenceMetrics) -> Optimizer | None:
    """None where the settings turn optimization off. Raises ConfigurationError for folders that it cannot use."""
    inference, home = settings.inference, settings.home
    if not inference.enabled:
        return None
    return Optimizer(
        inference,
        home=home,
        device=device,
        audit=_audit_of(settings),
        metrics=metrics,
        compiler=TorchCompiler(inference.compilation, home / "compilation.key"),
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
    settings: Settings, broker: RedisStreams, celery: CeleryParts, closing: ExitStack
) -> tuple[TaskIngress, TaskResultForwarder]:
    """Both ends of the Celery task endpoint."""
    client = redis.Redis.from_url(settings.redis_url or "", **connection_options(_REDIS_TIMEOUT_S))
    closing.callback(client.close)
    queue = settings.inference.queue
    limits, result_ttl_ms = limits_of(queue), int(queue.result_ttl_s * 1000)
    # A result may expire unread, and its task ends after that.
    keep_ms = limits.job_ttl_ms + 2 * result_ttl_ms
    requests = TaskRequests(client, settings.keyring, keep_ms=keep_ms, settled_ms=result_ttl_ms)
    ingress = TaskIngress(
        broker,
        JobBuilder.of(settings),
        SpecCache(settings.inference.repo_root),
        limits,
        requests.keep,
        is_open=settings.is_lane_open,
    )
    return ingress, TaskResultForwarder(
        client, broker, settings.keyring, requests, celery.results, worker=celery.hostname
    )


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
        if settings.inference.celery.remote_control:
            refuse_pool_commands()
        else:
            refuse_commands()
        yield


def _queue_of(model: str) -> str:
    """The name that the queues of a model's four priorities begin with: `infer.{mlp}`."""
    return stream_key(model, Priority.NORMAL).rpartition(".")[0]


def _verifier(settings: Settings) -> Verifier | None:
    """Checks operators' signatures; None where the settings name no key."""
    keys = PublicKeys.parse(settings.operator_public_keys)
    return keys.verify if len(keys) else None


def _audit_of(settings: Settings) -> Callable[[Mapping[str, object]], None]:
    privacy = settings.inference.privacy
    if not privacy.audit_log_enabled:
        return lambda _facts: None
    return partial(AuditLog(privacy.audit_log_path, "levels").record, "level")
