"""The Celery application of a worker, and the step that runs a Worker in it: `celery -A penstock.workers.app worker`.

    settings -> device and its lock -> Worker.open -> Worker.start -> Celery's own loop
    SIGTERM -> the worker claims no more jobs -> running batches end or are released -> exit

The worker is a step of Celery's worker, not of its consumer, whose steps stop whenever Celery loses its broker.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Final

from celery import Celery, bootsteps
from celery.__main__ import main as celery_command
from celery.concurrency.solo import TaskPool
from celery.exceptions import SecurityWarning
from celery.signals import setup_logging, worker_shutting_down

from penstock.registry import logs
from penstock.registry.errors import BrokerUnavailable, ConfigurationError
from penstock.registry.queues import CELERY_QUEUE
from penstock.registry.settings import Settings
from penstock.registry.stack_file import with_broker
from penstock.safety.privacy import redactor_of
from penstock.workers import children
from penstock.workers.celery_bridge.application import WorkerApplication
from penstock.workers.celery_bridge.consumer import drop_message
from penstock.workers.celery_bridge.events import CeleryEventSender, TaskEventsFlag
from penstock.workers.celery_bridge.result_store import CeleryResultStore
from penstock.workers.celery_bridge.task_ingress import InferTask
from penstock.workers.process.descriptors import OwnLog
from penstock.workers.process.device import pin
from penstock.workers.process.exit_status import exit_with
from penstock.workers.worker import CeleryParts, Worker

__all__ = ["DrainStep", "app", "run"]

_TIMERS: Final = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
"""Signals of timers that a library may have started on a model thread."""

# Celery's five lines about the user root, at each start: they are about pickle, which is not accepted here.
warnings.filterwarnings("ignore", "You're running the worker with superuser privileges", SecurityWarning)


def _application() -> Celery:
    application = WorkerApplication("penstock")
    try:
        from penstock import celeryconfig

        application.config_from_object(celeryconfig)
        # Otherwise Celery prefers CELERY_RESULT_BACKEND, which may be that of another program.
        application.backend_cls = celeryconfig.result_backend
        _load_transport(application)
    except (ConfigurationError, ImportError) as error:
        exit_with(error)
    return application


def _load_transport(application: Celery) -> None:
    """Import what Celery needs for its broker, before it does so itself and ends in a traceback. Connects to nothing.

    Raises ConfigurationError for a URL that Celery cannot use, and ImportError.
    """
    try:
        application.connection_for_write().get_transport_cls()
    except KeyError:
        raise ConfigurationError(
            "The URL in PENSTOCK_CELERY_URL has a scheme that Celery does not know. Expected redis://, rediss://, "
            "unix:// or amqp://"
        ) from None


app = _application()
infer_task = app.register_task(InferTask())


def run(arguments: Sequence[str]) -> None:
    """Be Celery's command `worker` with these options; the process ends with it."""
    # Quiet: without Celery's banner of twenty lines at each start.
    sys.argv = ["celery", "-q", "-A", "penstock.workers.app", "worker", "-P", "solo", "-c", "1", *arguments]
    celery_command()


class DrainStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery is untyped
    """Opens, starts and stops a Worker with Celery's worker. After a configuration error the process ends here."""

    def __init__(self, worker: Any, **options: Any) -> None:
        # `options` are Celery's command line.
        super().__init__(worker, **options)
        try:
            self._worker = _open_worker(worker)
        except (ConfigurationError, BrokerUnavailable, ImportError) as error:
            exit_with(error)
        worker_shutting_down.connect(self._on_signal, weak=False)
        for number in _TIMERS:
            # Without a handler the signal would end the process. Only this thread can set one: no model can.
            signal.signal(number, lambda *_: None)

    def start(self, worker: Any) -> None:
        """See Worker.start."""
        try:
            self._worker.start()
        except (ConfigurationError, BrokerUnavailable, ImportError) as error:
            exit_with(error)

    def stop(self, worker: Any) -> None:
        """Warm shutdown: running batches may end within the grace period of the settings."""
        self._stop(is_cold=False)

    def terminate(self, worker: Any) -> None:
        """Cold shutdown: the jobs in memory are released at once."""
        self._stop(is_cold=True)

    def _stop(self, *, is_cold: bool) -> None:
        self._worker.ask_to_stop(is_cold=is_cold)
        self._worker.wait_until_stopped()
        self._worker.close()

    def _on_signal(self, how: str, **_: Any) -> None:
        # Celery's loop reacts within a second; the drain begins to stop at once.
        self._worker.ask_to_stop(is_cold=how == "Cold")


app.steps["worker"].add(DrainStep)


def _open_worker(worker: Any) -> Worker:
    """The Worker of this process, for Celery's `worker`. Raises ConfigurationError, BrokerUnavailable, ImportError."""
    if not issubclass(worker.pool_cls, TaskPool):
        raise ConfigurationError("A worker is one process with threads of its own. Expected the pool `-P solo`")
    _consume_own_queue(worker.app)
    settings = with_broker(Settings.load())
    # Before the lock: a fork of this process never holds it.
    urls = (settings.redis_url, settings.celery_url, settings.inference.state_redis_url)
    children.protect_forks(broker_urls=filter(None, urls))
    is_supervised = settings.worker.heartbeat_fd is not None
    supervisor = os.getppid() if is_supervised else None
    device = pin(settings.inference.device, settings.worker.index, settings.home, os.environ, supervisor=supervisor)
    name, _, host = worker.hostname.partition("@")
    if name == "celery":
        # Celery's default name, which says nothing about the device.
        worker.hostname = f"{device.name}@{host}"
    return Worker.open(settings, device, _celery_parts(settings, worker))


def _consume_own_queue(application: Celery) -> None:
    """Tasks of other programs on the same broker belong to their workers. Raises ConfigurationError for option -Q."""
    queues = application.amqp.queues
    if set(queues.consume_from) != {CELERY_QUEUE}:
        raise ConfigurationError(f"A worker consumes the queue {CELERY_QUEUE!r} only. Expected no option -Q or -X")
    # Otherwise a queue to which a follower was sent would be consumed, too, after the next reconnect.
    queues.select([CELERY_QUEUE])


def _celery_parts(settings: Settings, worker: Any) -> CeleryParts:
    hostname = str(worker.hostname)
    interval_s = settings.inference.celery.events_interval_ms / 1000
    listener = CeleryEventSender(app, hostname, interval_s=interval_s, is_wanted=TaskEventsFlag(worker))
    return CeleryParts(hostname, listener, CeleryResultStore(app), infer_task)


def _configure_logs(loglevel: int, **_: Any) -> None:
    inference = Settings.load().inference
    redactor = redactor_of(inference.privacy)
    logs.configure(
        logging.getLevelName(loglevel),
        _log_stream(),
        withholds_texts=inference.withholds_texts,
        redact=redactor.redact_all if redactor.is_active else None,
    )
    # With Celery's default, WARNING, the log would show no job.
    logging.getLogger("penstock").setLevel(min(loglevel, logging.INFO))
    for handler in logging.getLogger().handlers:
        handler.addFilter(_drop_payload)
        handler.addFilter(drop_message)


def _log_stream() -> OwnLog | None:
    """The log's copy of stderr; None for a process that was started without one."""
    try:
        return OwnLog()
    except OSError:
        return None


def _drop_payload(record: logging.LogRecord) -> bool:
    """Remove the arguments of tasks, which Celery attaches to its log records."""
    record.__dict__.pop("data", None)
    return True


setup_logging.connect(_configure_logs, weak=False)
