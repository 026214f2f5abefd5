"""What Celery and Flower see of a worker: task events, inspect, revoke, the requests of the lane.

    drain --received, started, finished--> buffer --every 50 ms, own thread and connection--> task.multi --> Flower
    inspect, revoke --Celery's remote control--> what the drain holds, what it must not run

The only file that touches Celery's insides; tested on celery 5.6 and 5.7. Events are a courtesy: when Celery's
broker is away they are dropped and counted, and nothing here blocks or stops the drain.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol

import msgspec
from celery import Celery, states
from celery.events.event import get_exchange
from celery.exceptions import InvalidTaskError
from celery.utils.time import utcoffset
from celery.worker import heartbeat
from celery.worker import state as worker_state
from celery.worker.consumer import Consumer
from celery.worker.control import Panel
from celery.worker.request import Request
from kombu.messaging import Producer

from penstock.registry.broker.base import State
from penstock.registry.control import CONTROL_COMMAND, Command, CommandVerifier
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.errors import PenstockError
from penstock.registry.queues import CELERY_TASK
from penstock.workers.observe.listener import Ended, Failed

__all__ = [
    "CeleryEventSender",
    "DrainView",
    "TaskEventsFlag",
    "ResilientConsumer",
    "InferRequest",
    "CeleryResultStore",
    "register_control_command",
    "show_drain",
    "withdraw_commands",
]

MAX_BUFFERED: Final = 20_000
"""Jobs whose events may wait to be sent, counted once per event; beyond, events are dropped."""
_EVENTS_PER_MESSAGE: Final = 6_000
_COMPRESS_FROM_BYTES: Final = 8_192
_IDLE_S: Final = 1.0
"""How soon a silent feed notices that events were switched on."""
_RETRY_S: Final = 1.0
_CONNECTION: Final = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
_MAX_SHOWN_JOBS: Final = 1_000
_MAX_DESCRIPTIONS: Final = 4_096

OPEN_COMMANDS: Final = frozenset(
    (
        *("active", "active_queues", "clock", "conf", "disable_events", "enable_events", "heartbeat", "hello"),
        *("dump_active", "dump_conf", "dump_reserved", "dump_revoked", "dump_schedule", "dump_tasks"),
        *("memsample", "ping", "query_task", "registered", "report", "reserved", "revoke", "revoked", "scheduled"),
        *("stats", CONTROL_COMMAND),
    )
)
"""The remote control commands that stay: they look, switch events, withdraw a job, or are signed."""

_log = logging.getLogger("penstock.server")


class DrainView(Protocol):
    """What remote control may ask of a drain, from Celery's thread."""

    def active(self) -> list[JobHeader]:
        """Jobs that are running."""

    def reserved(self) -> list[JobHeader]:
        """Jobs that are held and wait for their batch."""


class _TaskEvent(msgspec.Struct, tag_field="type"):
    uuid: str
    timestamp: float
    clock: int
    hostname: str
    pid: int
    utcoffset: int


class _Received(_TaskEvent, tag="task-received"):
    name: str
    args: str
    kwargs: str


class _Started(_TaskEvent, tag="task-started"):
    pass


class _Succeeded(_TaskEvent, tag="task-succeeded"):
    result: str
    runtime: float


class _Failed(_TaskEvent, tag="task-failed"):
    exception: str
    runtime: float
    traceback: str = ""


class _Retried(_TaskEvent, tag="task-retried"):
    exception: str
    traceback: str = ""


class _Revoked(_TaskEvent, tag="task-revoked"):
    expired: bool
    terminated: bool = False
    signum: None = None


class CeleryEventSender:
    """The drain's watcher that turns jobs into Celery's task events, and knows Celery's revoked ids.

    Attributes:
        dropped: events lost, one per job, because Celery's broker was away or slow.
        totals: jobs finished, by the name under which Flower shows their model.
    """

    def __init__(self, app: Celery, hostname: str, *, interval_s: float, is_wanted: Callable[[], bool]) -> None:
        self.dropped = 0
        self.totals: Counter[str] = Counter()
        self._app = app
        self._hostname = hostname
        self._interval_s = interval_s
        self._is_wanted = is_wanted
        self._sends = False
        self._buffer: list[Callable[[int], Iterator[_TaskEvent]]] = []
        self._buffered = 0
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._descriptions: dict[object, str] = {}
        self._encode = msgspec.json.Encoder().encode
        self._producer: Any = None
        self._thread = threading.Thread(target=self._run, name="celery-events", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._sends = self._is_wanted()
        self._thread.start()

    def stop(self, timeout_s: float = 3.0) -> None:
        """Send what is buffered, and end."""
        self._stopping.set()
        self._work.set()
        self._thread.join(timeout_s)

    # The drain's side

    def received(self, jobs: Sequence[JobHeader], at: float) -> None:
        """See JobListener.received."""
        self._note(len(jobs), lambda clock: self._receptions(jobs, at, clock))

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        """See JobListener.started."""
        self._note(len(jobs), lambda clock: self._starts(jobs, at, clock))

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        """See JobListener.finished."""
        for model, count in Counter(each.header.model for each in ended).items():
            self.totals[_shown_name(model)] += count
        self._note(len(ended), lambda clock: self._ends(ended, at, clock))

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        """See JobListener.retried."""
        self._note(len(failed), lambda clock: self._retries(failed, at, clock))

    def is_revoked(self, job_id: str) -> bool:
        """See JobListener.is_revoked. A job of the lane is also withdrawn by the id of its Celery task."""
        revoked = worker_state.revoked
        return bool(revoked) and (job_id in revoked or job_id.rpartition(".")[2] in revoked)

    def _note(self, jobs: int, events: Callable[[int], Iterator[_TaskEvent]]) -> None:
        if not self._sends:
            return
        with self._lock:
            if self._buffered + jobs > MAX_BUFFERED:
                self.dropped += jobs
                return
            self._buffered += jobs
            self._buffer.append(events)
        if not self._work.is_set():
            self._work.set()

    # The thread's side

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._work.wait(_IDLE_S)
            self._work.clear()
            self._stopping.wait(self._interval_s)
            self._sends = self._is_wanted()
            self._flush()
        self._disconnect()

    def _flush(self) -> None:
        with self._lock:
            buffer, self._buffer = self._buffer, []
            self._buffered = 0
        if not buffer:
            return
        clock = self._app.clock.forward()
        events = (event for each in buffer for event in each(clock))
        while message := list(islice(events, _EVENTS_PER_MESSAGE)):
            try:
                self._publish(self._encode(message))
            except Exception as error:
                # Whatever it was, the next flush starts from a new connection; this thread outlives it.
                self._give_up(len(message) + sum(1 for _ in events), error)

    def _publish(self, events: bytes) -> None:
        if self._producer is None:
            self._producer = self._connect()
        headers = {"hostname": self._hostname}
        if len(events) >= _COMPRESS_FROM_BYTES:
            # Events repeat themselves: a tenth of the bytes, and so of the broker's work, for 2 us a job.
            headers["compression"] = "application/x-gzip"
            events = zlib.compress(events, 1)
        self._producer.publish(
            events,
            routing_key="task.multi",
            content_type="application/json",
            content_encoding="utf-8",
            headers=headers,
            delivery_mode=1,
            declare=[self._producer.exchange],
        )

    def _connect(self) -> Any:
        connection = self._app.connection_for_write(transport_options=_CONNECTION, connect_timeout=2.0)
        exchange = get_exchange(connection, name=self._app.conf.event_exchange)
        make_producer: Any = Producer
        return make_producer(connection, exchange=exchange, auto_declare=False)

    def _give_up(self, events: int, error: Exception) -> None:
        self.dropped += events
        _log.warning("Task events cannot be sent: %s", type(error).__name__, extra={"dropped": self.dropped})
        self._disconnect()
        self._stopping.wait(_RETRY_S)

    def _disconnect(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # `collect` closes without a farewell, which a broker that is away would not hear.
            producer.connection.collect(socket_timeout=1.0)

    def _receptions(self, jobs: Sequence[JobHeader], at: float, clock: int) -> Iterator[_TaskEvent]:
        common = (at, clock, self._hostname, os.getpid(), utcoffset())
        return (
            _Received(job.id, *common, name=_shown_name(job.model), args="()", kwargs=self._describe(job))
            for job in jobs
        )

    def _starts(self, jobs: Sequence[JobHeader], at: float, clock: int) -> Iterator[_TaskEvent]:
        common = (at, clock, self._hostname, os.getpid(), utcoffset())
        return (_Started(job.id, *common) for job in jobs)

    def _retries(self, failed: Sequence[Failed], at: float, clock: int) -> Iterator[_TaskEvent]:
        common = (at, clock, self._hostname, os.getpid(), utcoffset())
        return (_Retried(each.header.id, *common, exception=_shown_failure(each.error)) for each in failed)

    def _ends(self, ended: Sequence[Ended], at: float, clock: int) -> Iterator[_TaskEvent]:
        common = (at, clock, self._hostname, os.getpid(), utcoffset())
        for each in ended:
            yield _end(each, each.header.id, *common)
            if each.header.options.lane:
                # The task that brought the job was acknowledged long ago; this is when its sender's task ended.
                yield _end(each, each.header.id.rpartition(".")[2], *common)

    def _describe(self, job: JobHeader) -> str:
        key = (job.model, job.tenant, job.priority, job.content)
        described = self._descriptions.get(key)
        if described is None:
            if len(self._descriptions) >= _MAX_DESCRIPTIONS:
                self._descriptions.clear()
            described = self._descriptions[key] = _described(job)
        return described


def _end(ended: Ended, uuid: str, timestamp: float, clock: int, hostname: str, pid: int, offset: int) -> _TaskEvent:
    common = (uuid, timestamp, clock, hostname, pid, offset)
    if ended.state is State.COMPLETED:
        return _Succeeded(*common, result=f"version {ended.version}", runtime=ended.runtime_s)
    if ended.state in (State.CANCELLED, State.EXPIRED):
        return _Revoked(*common, expired=ended.state is State.EXPIRED)
    exception = _shown_failure(ended.error) if ended.error else ended.state.name
    return _Failed(*common, exception=exception, runtime=ended.runtime_s)


def _shown_failure(failure: Failure) -> str:
    return f"{failure.code}({failure.message!r:.300})"


def _shown_name(model: str) -> str:
    return f"{CELERY_TASK}.{model}"


def _described(job: JobHeader) -> str:
    """What Flower shows as the arguments: shapes, never values."""
    inputs = {tensor.name: f"{tensor.dtype} {tensor.shape}" for tensor in job.content}
    return repr({"tenant": job.tenant, "priority": job.priority, **inputs})


class TaskEventsFlag:
    """Whether task events are on, as `enable_events` and `disable_events` leave it."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._is_on = bool(worker.task_events)

    def __call__(self) -> bool:
        """The state now; while Celery reconnects, the last one."""
        dispatcher = self._worker.consumer.event_dispatcher
        if dispatcher is not None:
            if dispatcher.enabled and not dispatcher.groups:
                # No groups means all of them, and then Celery's `disable_events` finds nothing to take out.
                dispatcher.groups = {"worker", "task"}
            # `enabled` alone stays true while task events are off.
            self._is_on = bool(dispatcher.enabled) and "task" in dispatcher.groups
        return self._is_on


def show_drain(view: DrainView, listener: CeleryEventSender, hostname: str, *, settings: Mapping[str, object]) -> None:
    """Make `inspect active`, `reserved` and `stats` and Celery's heartbeat tell of the drain's jobs too.

    settings: what `stats` shows under `inference`, plain data without secrets. Costs nothing per job: the drain is
    asked when somebody asks. Replaces entries of Celery's process-wide table.
    """
    celery_active, celery_reserved, celery_stats = (Panel.data[name] for name in ("active", "reserved", "stats"))

    def active(state: Any, safe: bool = False) -> list[dict[str, Any]]:
        return [*celery_active(state, safe=safe), *_infos(view.active(), hostname)]

    def reserved(state: Any) -> list[dict[str, Any]]:
        return [*celery_reserved(state), *_infos(view.reserved(), hostname)]

    def stats(state: Any) -> dict[str, Any]:
        known = celery_stats(state)
        return {
            **known,
            "total": {**known["total"], **listener.totals.copy()},
            "events": {"dropped": listener.dropped},
            "inference": settings,
        }

    Panel.data.update(active=active, dump_active=active, reserved=reserved, dump_reserved=reserved, stats=stats)
    heartbeat.active_requests = _ActiveJobs(view)
    heartbeat.all_total_count = _FinishedJobs(listener)


def register_control_command(obedience: CommandVerifier, act: Callable[[Command], str]) -> None:
    """Take signed commands through Celery's remote control: `act` says what was done, or raises PenstockError."""

    def command(state: Any, command: object = None) -> dict[str, str]:
        try:
            return {"ok": act(obedience.open(command))}
        except PenstockError as error:
            _log.warning("a control command was refused: %s", error)
            return {"error": str(error)}

    Panel.register(command, type="control", name=CONTROL_COMMAND, args=[("command", str)], signature="<sealed>")


def withdraw_commands() -> None:
    """Take the commands that stop, resize or re-route a worker out of Celery's remote control."""
    for name in Panel.data.keys() - OPEN_COMMANDS:
        del Panel.data[name]


def _infos(jobs: Sequence[JobHeader], hostname: str) -> list[dict[str, Any]]:
    """As Celery's Request.info shows a task."""
    return [
        {
            "id": job.id,
            "name": _shown_name(job.model),
            "args": "()",
            "kwargs": _described(job),
            "type": _shown_name(job.model),
            "hostname": hostname,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": {"exchange": "", "routing_key": "", "priority": job.priority, "redelivered": False},
            "worker_pid": os.getpid(),
        }
        for job in jobs[:_MAX_SHOWN_JOBS]
    ]


class _ActiveJobs:
    """Stands for Celery's set of active requests where the heartbeat counts them."""

    def __init__(self, view: DrainView) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(worker_state.active_requests) + len(self._view.active())


class _FinishedJobs:
    """Stands for Celery's one-element total where the heartbeat reads it."""

    def __init__(self, listener: CeleryEventSender) -> None:
        self._listener = listener

    def __getitem__(self, index: int) -> int:
        return int(worker_state.all_total_count[index]) + self._listener.totals.total()


class InferRequest(Request):  # type: ignore[misc]  # Celery is untyped
    """The request of a `penstock.infer` task: its payload appears in no event, no `inspect` and no log line."""

    def __init__(self, message: Any, **options: Any) -> None:
        # `options` are Celery's own and differ between its versions.
        try:
            super().__init__(message, **options)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            # Celery catches this one and drops the message; any other ends the worker.
            raise InvalidTaskError(f"not a task message: {type(error).__name__}") from None
        model = self._kwargs.get("model") if isinstance(self._kwargs, dict) else None
        self._argsrepr = self._request_dict["argsrepr"] = "()"
        self._kwargsrepr = self._request_dict["kwargsrepr"] = repr({"model": str(model)[:64]})

    def info(self, safe: bool = False) -> dict[str, Any]:
        """As Celery's, but never with the arguments themselves."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown


_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError)


class ResilientConsumer(Consumer):  # type: ignore[misc]  # Celery is untyped
    """Celery's consumer, that takes a message nobody can read for a lost connection, not for its own end.

    Celery would end the worker, and the drain with it. kombu has removed such a message before it fails to read it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.channel_errors = (*self.conninfo.channel_errors, *_UNREADABLE)

    def create_task_handler(self, *args: Any, **options: Any) -> Callable[[Any], None]:
        """Celery's handler; a message that it fails over would come back at every reconnect, and is dropped."""
        handle = super().create_task_handler(*args, **options)

        def handle_or_drop(message: Any) -> None:
            try:
                handle(message)
            except _UNREADABLE as error:
                _log.error("a message that is no task was dropped: %s", type(error).__name__)
                message.reject_log_error(_log, self.connection_errors)

        return handle_or_drop


class CeleryResultStore:
    """Celery's result backend, for tasks whose jobs ended after their message was acknowledged."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def succeeded(self, task_id: str, result: dict[str, Any]) -> None:
        """Make `AsyncResult.get` return `result`, which is plain data."""
        self._app.backend.mark_as_done(task_id, result)

    def failed(self, task_id: str, error: Exception) -> None:
        """Make `AsyncResult.get` raise an exception of the class name and the text of `error`."""
        self._app.backend.mark_as_failure(task_id, error)

    def revoked(self, task_id: str) -> None:
        """Make `AsyncResult.get` raise Celery's TaskRevokedError."""
        self._app.backend.mark_as_revoked(task_id, reason="cancelled", state=states.REVOKED)
