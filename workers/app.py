"""The Celery application of a worker, and what a worker process consists of: `celery -A penstock.workers.app worker`.

    settings -> device and its lock -> drain, probe, lane, task events -> Celery's own loop
    SIGTERM -> no new claim; the running batch ends or is released -> what is left is told -> exit

The drain is a step of the worker, not of Celery's consumer, whose steps stop whenever Celery loses its broker.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import redis
from celery import Celery, Task, bootsteps
from celery.concurrency.solo import TaskPool
from celery.exceptions import Ignore, Reject
from celery.signals import setup_logging, worker_shutting_down

from penstock.registry import logs
from penstock.registry.admission import JobBuilder, SpecCache, limits_of
from penstock.registry.broker.redis_connection import connection_options
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.control import Command, CommandVerifier
from penstock.registry.desired_state import StateStore
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, Forbidden, QueueFull, Rejected, UnknownModel
from penstock.registry.queues import CELERY_TASK
from penstock.registry.settings import Settings
from penstock.registry.signed import Verifier
from penstock.registry.stack_file import with_broker
from penstock.safety.audit import AuditLog
from penstock.safety.keys import PublicKeys
from penstock.workers.celery_bridge.bridge import (
    CeleryEventSender,
    CeleryResultStore,
    TaskEventsFlag,
    register_control_command,
    show_drain,
    withdraw_commands,
)
from penstock.workers.celery_bridge.lane import TaskIngress, TaskResultForwarder
from penstock.workers.compilation import TorchCompiler
from penstock.workers.drain import Drain
from penstock.workers.levels.optimizer import Optimizer
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.observe.probe import Probe
from penstock.workers.process import heartbeat
from penstock.workers.process.crash_journal import FileJournal, Journal, journal_path, report_crashes
from penstock.workers.process.device import Pin, granted_threads, pin
from penstock.workers.process.exit_status import exit_with
from penstock.workers.process.operator_rpc import OperatorRpcServer
from penstock.workers.versions.reconciler import Reconciler
from penstock.workers.versions.repository import DiskRepository

__all__ = ["EXIT_UNHEALTHY", "DrainStep", "app"]

EXIT_UNHEALTHY: Final = 70
"""EX_SOFTWARE of sysexits.h: a thread died or hangs, and the supervisor is to start another process."""
_COLLECT_AFTER: Final = 10_000
_WATCH_S: Final = 0.1
_HEALTH_S: Final = 1.0
_LONGEST_WAIT_S: Final = 0.25
"""How long one lane message may keep Celery's thread waiting for room; remote control waits with it."""
_REDIS_TIMEOUT_S: Final = 5.0
_log = logging.getLogger("penstock.server")


def _application() -> Celery:
    try:
        from penstock import celeryconfig
    except ConfigurationError as error:
        exit_with(error)
    application = Celery("penstock")
    application.config_from_object(celeryconfig)
    return application


app = _application()


class InferTask(Task):  # type: ignore[misc]  # Celery is untyped
    """`penstock.infer`: publishes the job and ends; the result comes when the job does."""

    name = CELERY_TASK
    Request = "penstock.workers.celery_bridge.bridge:InferRequest"
    throws = (Rejected,)
    ingress: TaskIngress | None = None

    def run(
        self,
        model: str,
        inputs: Mapping[str, object],
        tenant: str | None = None,
        priority: str = "normal",
        deadline_s: float | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
    ) -> NoReturn:
        """Raises Rejected for a job that will never be accepted: that is the task's failure."""
        if self.ingress is None:
            raise ConfigurationError(f"{CELERY_TASK} runs in a Penstock worker only. Expected send_task to its queue")
        try:
            self.ingress.admit(
                self.request.id,
                model=model,
                inputs=inputs,
                tenant=tenant,
                priority=priority,
                deadline_s=deadline_s,
                version=version,
                outputs=outputs,
            )
        except (QueueFull, BrokerUnavailable) as error:
            # Back to the end of Celery's queue, where it keeps as well as here.
            time.sleep(min(getattr(error, "retry_after_s", _LONGEST_WAIT_S), _LONGEST_WAIT_S))
            raise Reject(str(error), requeue=True) from None
        # Acknowledged, and no result yet.
        raise Ignore


infer_task = app.register_task(InferTask())


class Readiness:
    """What the probe asks, which listens before there is a drain."""

    drain: Drain | None = None

    def __call__(self) -> tuple[bool, Mapping[str, Any]]:
        """See the Readiness of workers/observe/probe.py."""
        return self.drain.readiness if self.drain else (False, {"problem": "starting"})


def _freeze_gc() -> None:
    """Leaves the framework's half a million objects out of every garbage collection from now on.

    Jobs allocate a few thousand containers a second and free them by reference count; with the default thresholds
    the full collections that they trigger took a sixth of the worker's time per job.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 10)


class WorkerParts:
    """Everything that runs beside Celery's loop in one worker process.

    Raises ConfigurationError for a model without a package, and for a metrics port that is taken.
    """

    def __init__(self, settings: Settings, device: Pin, worker: Any) -> None:
        queue, celery = settings.inference.queue, settings.inference.celery
        hostname = str(worker.hostname)
        self._settings = settings
        self._broker = RedisStreams.from_url(
            settings.redis_url or "", timeout_s=_REDIS_TIMEOUT_S, result_ttl_ms=int(queue.result_ttl_s * 1000)
        )
        self._listener = CeleryEventSender(
            app, hostname, interval_s=celery.events_interval_ms / 1000, is_wanted=TaskEventsFlag(worker)
        )
        metrics = InferenceMetrics(settings.inference.metrics_buckets)
        readiness = Readiness()
        self._optimizer = self._open_optimizer(device.device, metrics)
        repository = DiskRepository.of(settings)
        packages = repository.answering(settings)
        self._probe = Probe(
            metrics,
            readiness,
            host=settings.worker.metrics_host,
            port=settings.worker.probe_port(device.index),
            bearer_file=settings.worker.metrics_bearer_file,
        )
        self._probe.start()
        self._drain = readiness.drain = Drain(
            settings,
            self._broker,
            packages,
            name=hostname,
            device=device.device,
            threads=granted_threads(device.device, os.environ),
            listener=self._listener,
            metrics=metrics,
            probe_url=f"http://{settings.worker.metrics_host}:{self._probe.port}",
            journal=self._open_journal,
            repository=repository,
            verify=_verifier(settings),
            tuner=self._optimizer,
        )
        self._replies = TaskResultForwarder(
            _redis_client(settings), self._broker, settings.keyring, CeleryResultStore(app), worker=hostname
        )
        self._reconciler = self._open_reconciler(hostname)
        self._grace_s: float | None = None
        self._guard = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        infer_task.ingress = _task_ingress(settings, self._broker)
        show_drain(self._drain, self._listener, hostname, settings=settings.inference.as_shown())
        self._rpc_server = OperatorRpcServer(settings, self._broker, _verifier(settings))
        register_control_command(CommandVerifier(_verifier(settings), hostname), self._act)
        if not celery.remote_control:
            withdraw_commands()

    def start(self) -> None:
        """Load the models, and run. Raises ConfigurationError for a model that cannot be loaded; BrokerUnavailable."""
        if self._settings.worker.heartbeat_fd is not None:
            heartbeat.start(self._settings.worker.heartbeat_fd, self._ailment)
        self._drain.load()
        if self._optimizer is not None:
            self._optimizer.start()
        _freeze_gc()
        self._listener.start()
        self._drain.start()
        self._replies.start()
        if self._reconciler is not None:
            self._reconciler.start()
        self._guard.start()

    def _open_journal(self, consumer: str, seats: int) -> Journal:
        """A journal of this process, once the deaths of others on this machine are reported.

        Their supervisors do that at once where there are any; here come those that had none. Raises
        ConfigurationError when the journal cannot be written, BrokerUnavailable.
        """
        home = self._settings.home
        try:
            report_crashes(home, self._broker, int(self._settings.inference.queue.job_ttl_s * 1000))
            return FileJournal(journal_path(home, os.getpid()), consumer, seats)
        except BrokerUnavailable:
            raise
        except OSError as error:
            raise ConfigurationError(
                f"The journal of running jobs cannot be written ({error.strerror}). Expected a PENSTOCK_HOME that this "
                "user may write to"
            ) from None

    def _open_optimizer(self, device: str, metrics: InferenceMetrics) -> Optimizer | None:
        """None where models answer as their authors built them. Raises ConfigurationError for folders it cannot use."""
        inference, home = self._settings.inference, self._settings.home
        if not inference.enabled:
            return None
        return Optimizer(
            inference,
            home=home,
            device=device,
            audit=_auditor(self._settings),
            metrics=metrics,
            compiler=TorchCompiler(inference.compilation, home / "compilation.key"),
        )

    def _open_reconciler(self, worker: str) -> Reconciler | None:
        """None without a shared state: then each worker keeps its own, and control commands tell it what to load."""
        inference = self._settings.inference
        if not inference.state_reconcile_enabled:
            return None
        url = inference.state_redis_url or self._settings.redis_url or ""
        return Reconciler(
            StateStore.from_url(url, inference.state_prefix),
            self._drain,
            worker=worker,
            interval_s=inference.state_reconcile_interval_s,
            verify=_verifier(self._settings),
        )

    def _act(self, command: Command) -> str:
        """Obeys an operator, on Celery's thread. Raises Rejected for what this worker cannot do."""
        if command.action == "rpc":
            return self._rpc_server.handle(command)
        if command.action == "reconcile":
            if self._reconciler is None:
                raise Forbidden("This worker keeps a state of its own. Expected load or unload")
            self._reconciler.nudge()
            return "sweeping"
        if not self._drain.may_serve(command.model):
            raise UnknownModel(f"{command.model} is not served here. Expected one of this worker's models")
        if command.action == "load":
            self._drain.request_load(command.model, command.version, content_hash=command.content_hash)
            return f"loading {command.model}/{command.version}"
        if command.action == "unload":
            self._drain.request_unload(command.model, command.version, content_hash=command.content_hash)
            return f"letting go of {command.model}/{command.version}"
        if self._optimizer is None:
            raise Forbidden("Models answer here as their authors built them. Expected inference.enabled on the worker")
        self._optimizer.ask(command.model, command.action)
        return f"asked to {command.action} {command.model}; `penstock models levels` shows what comes of it"

    def ask_to_stop(self, *, is_cold: bool) -> None:
        """Begin to stop, at once. Sets one value and takes no lock: this is called from signal handlers."""
        self._grace_s = 0.0 if is_cold else self._settings.inference.queue.drain_grace_s

    def wait_until_stopped(self) -> None:
        """Return when everything has ended that `ask_to_stop` ends."""
        self._guard.join()

    def _watch(self) -> None:
        next_look = looped = time.monotonic()
        while self._grace_s is None:
            now = time.monotonic()
            if now - looped > _HEALTH_S:
                # The whole process stood still: let the other threads come round before they are judged.
                next_look = now + _HEALTH_S
            looped = now
            if now >= next_look:
                next_look = now + _HEALTH_S
                if ailment := self._ailment():
                    _log.critical("worker gives up", extra={"reason": ailment})
                    logging.shutdown()
                    # Other threads may hang, so nothing waits for them; what they held lapses with its lease.
                    os._exit(EXIT_UNHEALTHY)
            time.sleep(_WATCH_S)
        # First of all nothing more is claimed; whatever else ends may have to wait for others.
        self._drain.ask_to_stop(self._grace_s)
        if self._reconciler is not None:
            self._reconciler.ask_to_stop()
        self._drain.stop(self._grace_s)
        if self._optimizer is not None:
            self._optimizer.stop()
        if self._reconciler is not None:
            self._reconciler.stop()
        self._replies.stop()
        self._listener.stop()
        self._probe.stop()
        self._broker.close()

    def _ailment(self) -> str | None:
        if self._guard.is_alive() and self._grace_s is None and not self._replies.is_alive():
            return "the thread of lane results has ended"
        return self._drain.is_healthy()


def _verifier(settings: Settings) -> Verifier | None:
    """The operators' signatures; None where no key is known and none is asked for."""
    keys = PublicKeys.parse(settings.operator_public_keys)
    return keys.verify if len(keys) else None


def _auditor(settings: Settings) -> Callable[[Mapping[str, object]], None]:
    privacy = settings.inference.privacy
    if not privacy.audit_log_enabled:
        return lambda _facts: None
    return partial(AuditLog(privacy.audit_log_path, "levels").record, "level")


def _redis_client(settings: Settings) -> redis.Redis:
    return redis.Redis.from_url(settings.redis_url or "", **connection_options(_REDIS_TIMEOUT_S))


def _task_ingress(settings: Settings, broker: RedisStreams) -> TaskIngress:
    return TaskIngress(
        broker,
        JobBuilder.of(settings),
        SpecCache(settings.inference.repo_root),
        limits_of(settings.inference.queue),
        is_open=settings.is_lane_open,
    )


class DrainStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery is untyped
    """Starts and stops the worker's parts with Celery's worker. A worker that cannot work ends here, in one line."""

    def __init__(self, worker: Any, **options: Any) -> None:
        # `options` are Celery's command line.
        super().__init__(worker, **options)
        try:
            self._parts = _parts(worker)
        except (ConfigurationError, BrokerUnavailable) as error:
            exit_with(error)
        worker_shutting_down.connect(self._on_signal, weak=False)

    def start(self, worker: Any) -> None:
        """See WorkerParts.start."""
        try:
            self._parts.start()
        except (ConfigurationError, BrokerUnavailable) as error:
            exit_with(error)

    def stop(self, worker: Any) -> None:
        """Warm shutdown: within the grace period of the settings."""
        self._parts.ask_to_stop(is_cold=False)
        self._parts.wait_until_stopped()

    def terminate(self, worker: Any) -> None:
        """Cold shutdown: held jobs are released at once."""
        self._parts.ask_to_stop(is_cold=True)
        self._parts.wait_until_stopped()

    def _on_signal(self, how: str, **_: Any) -> None:
        # Celery's loop takes up to a second to notice; the drain need not wait for it.
        self._parts.ask_to_stop(is_cold=how == "Cold")


app.steps["worker"].add(DrainStep)


def _parts(worker: Any) -> WorkerParts:
    if not issubclass(worker.pool_cls, TaskPool):
        raise ConfigurationError("A worker is one process with threads of its own. Expected the pool `-P solo`")
    settings = with_broker(Settings.load())
    device = pin(settings.inference.device, settings.worker.index, settings.home, os.environ)
    name, _, host = worker.hostname.partition("@")
    if name == "celery":
        # Celery's default: nobody chose it.
        worker.hostname = f"{device.name}@{host}"
    return WorkerParts(settings, device, worker)


def _configure_logs(loglevel: int, **_: Any) -> None:
    logs.configure(logging.getLevelName(loglevel))
    # Celery's default is WARNING, and with it no job could be followed.
    logging.getLogger("penstock").setLevel(min(loglevel, logging.INFO))
    for handler in logging.getLogger().handlers:
        handler.addFilter(_drop_payload)


def _drop_payload(record: logging.LogRecord) -> bool:
    """Celery hands the arguments of tasks to its log lines."""
    record.__dict__.pop("data", None)
    return True


setup_logging.connect(_configure_logs, weak=False)
