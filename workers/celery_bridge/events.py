"""Task events: the jobs of a worker, for Celery's monitors and Flower.

    drain -- received, started, finished, retried --> buffer -- every 50 ms --> task.multi on Celery's broker --> Flower

A job that a Celery task brought goes on under the id of that task: Celery's consumer has reported it as received, and
monitors see one task. A thread with a connection of its own sends the buffer. Events are best effort: while Celery's
broker is away they are dropped and counted, and no call of the drain waits or raises.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from celery import Celery
from celery.events.event import get_exchange
from celery.utils.time import utcoffset
from celery.worker import state as worker_state
from kombu.messaging import Producer

from penstock.registry.broker.base import State
from penstock.registry.envelope import JobHeader
from penstock.workers.celery_bridge.presentation import (
    shown_arguments,
    shown_failure,
    shown_id,
    shown_name,
    shown_traceback,
)
from penstock.workers.observe.listener import Ended, Failed

__all__ = ["CeleryEventSender", "TaskEventsFlag"]

_MAX_BUFFERED: Final = 20_000
_EVENTS_PER_MESSAGE: Final = 6_000
_COMPRESS_FROM_BYTES: Final = 8_192
_IDLE_S: Final = 1.0
"""An idle sender notices within this time that events were switched on."""
_RETRY_S: Final = 1.0
_CALLS_AT_ONCE: Final = 16
_PAUSE_S: Final = 0.0002
"""Long enough for a thread that waits for the interpreter's lock to take it."""
_CONNECTION: Final = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
_MAX_TEMPLATES: Final = 4_096
_UUID: Final = "\0"
"""Stands for the uuids of events that differ in nothing else. No text of an event has this character."""
_ENCODED_UUID: Final = b'"\\u0000"'
_NO_TIME: Final = (-1.0, -1)
_ENCODED_NO_TIME: Final = b',"timestamp":-1.0,"clock":-1'
_ENCODED_NO_RUNTIME: Final = b',"runtime":-1.0}'
"""The same for the timestamp and the clock, and for the runtime at the end of an event."""

T = TypeVar("T")

logger = logging.getLogger("penstock.server")


class _TaskEvent(msgspec.Struct, tag_field="type"):
    uuid: str
    timestamp: float
    clock: int
    hostname: str
    pid: int
    utcoffset: int


class _TaskReceived(_TaskEvent, tag="task-received"):
    name: str
    args: str
    kwargs: str


class _TaskStarted(_TaskEvent, tag="task-started"):
    pass


class _TaskSucceeded(_TaskEvent, tag="task-succeeded"):
    result: str
    runtime: float


class _TaskFailed(_TaskEvent, tag="task-failed"):
    exception: str
    runtime: float
    traceback: str = ""


class _TaskRetried(_TaskEvent, tag="task-retried"):
    exception: str
    traceback: str = ""


class _TaskRevoked(_TaskEvent, tag="task-revoked"):
    expired: bool
    terminated: bool = False
    signum: None = None


class _Events(NamedTuple):
    """So many events, as JSON objects with commas between them."""

    number: int
    encoded: bytes


class _Template(NamedTuple):
    """An encoded event: what is before its uuid, and what is behind its clock."""

    front: bytes
    behind: bytes


class CeleryEventSender:
    """The drain's JobListener that sends Celery's task events, and knows the ids that Celery has revoked.

    is_wanted: whether task events are on. max_buffered: how many events may wait to be sent; further ones are dropped.

    Attributes:
        dropped: events that were lost because Celery's broker was away or slow.
        totals: finished jobs by the name under which Flower shows their model.
    """

    def __init__(
        self,
        app: Celery,
        hostname: str,
        *,
        interval_s: float,
        is_wanted: Callable[[], bool],
        max_buffered: int = _MAX_BUFFERED,
    ) -> None:
        self.dropped = 0
        self.totals: Counter[str] = Counter()
        self._app = app
        self._hostname = hostname
        self._interval_s = interval_s
        self._is_wanted = is_wanted
        self._max_buffered = max_buffered
        self._sends = False
        self._buffer: list[Callable[[int], Iterator[_Events]]] = []
        self._buffered = 0
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._templates: dict[object, _Template] = {}
        self._last_received: tuple[JobHeader, _Template] | None = None
        self._process = (0, 0)
        """Its id and the offset of its clock from UTC, which every template has."""
        self._encode = msgspec.json.Encoder().encode
        self._producer: Any = None
        self._thread = threading.Thread(target=self._run, name="celery-events", daemon=True)

    def start(self) -> None:
        """Start the thread that sends."""
        self._sends = self._is_wanted()
        self._thread.start()

    def stop(self, timeout_s: float = 3.0) -> None:
        """Send the buffered events, and end the thread."""
        self._stopping.set()
        self._work.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # Called by the drain

    def received(self, jobs: Sequence[JobHeader], at: float) -> None:
        """See JobListener.received."""
        self._note(len(jobs), lambda clock: self._receptions(jobs, at, clock))

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        """See JobListener.started."""
        self._note(len(jobs), lambda clock: self._starts(jobs, at, clock))

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        """See JobListener.finished."""
        for model, count in Counter(each.header.model for each in ended).items():
            self.totals[shown_name(model)] += count
        self._note(len(ended), lambda clock: self._ends(ended, at, clock))

    def completed(self, jobs: Sequence[JobHeader], runtime_s: float, version: str, at: float) -> None:
        """See JobListener.completed."""
        self.totals[shown_name(jobs[0].model)] += len(jobs)
        self._note(len(jobs), lambda clock: self._completions(jobs, runtime_s, version, at, clock))

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        """See JobListener.retried."""
        self._note(len(failed), lambda clock: self._retries(failed, at, clock))

    @property
    def has_revoked(self) -> bool:
        """See JobListener.has_revoked."""
        return bool(worker_state.revoked)

    def is_revoked(self, job_id: str) -> bool:
        """See JobListener.is_revoked. A job that a Celery task brought is also revoked by the task's id."""
        revoked = worker_state.revoked
        return bool(revoked) and (job_id in revoked or job_id.rpartition(".")[2] in revoked)

    def _note(self, jobs: int, events: Callable[[int], Iterator[_Events]]) -> None:
        if not self._sends:
            return
        with self._lock:
            if self._buffered + jobs > self._max_buffered:
                self.dropped += jobs
                return
            self._buffered += jobs
            self._buffer.append(events)
        if not self._work.is_set():
            self._work.set()

    # On the thread of its own

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
        self._follow_process()
        clock = self._app.clock.forward()
        events = (event for each in _without_haste(buffer) for event in each(clock))
        while message := _first(events, _EVENTS_PER_MESSAGE):
            try:
                self._publish(b"[%b]" % b",".join(each.encoded for each in message))
            except Exception as error:
                # After any error the next flush opens a new connection; the thread goes on.
                self._drop(sum(each.number for each in (*message, *events)), error)

    def _publish(self, events: bytes) -> None:
        if self._producer is None:
            self._producer = self._connect()
        headers = {"hostname": self._hostname}
        if len(events) >= _COMPRESS_FROM_BYTES:
            # Events are repetitive: for 2 us a job, compression leaves the broker a tenth of the bytes.
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

    def _drop(self, events: int, error: Exception) -> None:
        self.dropped += events
        logger.warning("Task events cannot be sent: %s", type(error).__name__, extra={"dropped": self.dropped})
        self._disconnect()
        self._stopping.wait(_RETRY_S)

    def _disconnect(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # `collect` closes without a closing handshake, for which a broker that is away would keep us waiting.
            producer.connection.collect(socket_timeout=1.0)

    def _follow_process(self) -> None:
        process = (os.getpid(), utcoffset())
        if process != self._process or len(self._templates) >= _MAX_TEMPLATES:
            self._process, self._last_received = process, None
            self._templates.clear()

    def _receptions(self, jobs: Sequence[JobHeader], at: float, clock: int) -> Iterator[_Events]:
        for alike in _alike([job for job in jobs if not job.options.lane]):
            yield _repeated(self._reception(alike[0]), [job.id for job in alike], at, clock)

    def _starts(self, jobs: Sequence[JobHeader], at: float, clock: int) -> Iterator[_Events]:
        template = self._templates.get(_TaskStarted)
        if template is None:
            event = _TaskStarted(_UUID, *_NO_TIME, self._hostname, *self._process)
            template = self._templates[_TaskStarted] = self._template(event)
        yield _repeated(template, [shown_id(job) for job in jobs], at, clock)

    def _completions(
        self, jobs: Sequence[JobHeader], runtime_s: float, version: str, at: float, clock: int
    ) -> Iterator[_Events]:
        key = _TaskSucceeded, version
        template = self._templates.get(key)
        if template is None:
            common = (_UUID, *_NO_TIME, self._hostname, *self._process)
            event = _TaskSucceeded(*common, result=_shown_version(version), runtime=-1.0)
            template = self._templates[key] = self._template(event)
        behind = b'%b,"runtime":%r}' % (template.behind.removesuffix(_ENCODED_NO_RUNTIME), runtime_s)
        yield _repeated(template._replace(behind=behind), [shown_id(job) for job in jobs], at, clock)

    def _retries(self, failed: Sequence[Failed], at: float, clock: int) -> Iterator[_Events]:
        common = (at, clock, self._hostname, os.getpid(), utcoffset())
        for each in failed:
            exception, traceback = shown_failure(each.error), shown_traceback(each.error)
            event = _TaskRetried(shown_id(each.header), *common, exception=exception, traceback=traceback)
            yield _Events(1, self._encode(event))

    def _ends(self, ended: Sequence[Ended], at: float, clock: int) -> Iterator[_Events]:
        common = (at, clock, self._hostname, os.getpid(), utcoffset())
        return (_Events(1, self._encode(_end(each, shown_id(each.header), *common))) for each in ended)

    def _reception(self, job: JobHeader) -> _Template:
        """The event of a job that was received, and of all that are described by the same words."""
        last = self._last_received
        if last is not None and _are_alike(job, last[0]):
            return last[1]
        key = (_TaskReceived, job.model, job.tenant, job.priority, job.content)
        template = self._templates.get(key)
        if template is None:
            common = (_UUID, *_NO_TIME, self._hostname, *self._process)
            event = _TaskReceived(*common, name=shown_name(job.model), args="()", kwargs=shown_arguments(job))
            template = self._templates[key] = self._template(event)
        self._last_received = job, template
        return template

    def _template(self, event: _TaskEvent) -> _Template:
        """event: with _UUID and _NO_TIME in their places."""
        front, behind = self._encode(event).split(_ENCODED_UUID, 1)
        return _Template(front, behind.removeprefix(_ENCODED_NO_TIME))


def _repeated(template: _Template, uuids: Sequence[str], at: float, clock: int) -> _Events:
    """One event for each uuid, all of one time. To encode them one by one takes four times as long, and holds the
    interpreter's lock, for which the drain waits."""
    behind = b',"timestamp":%r,"clock":%d%b' % (at, clock, template.behind)
    between = b'"%b,%b"' % (behind, template.front)
    return _Events(len(uuids), b'%b"%b"%b' % (template.front, between.join([uuid.encode() for uuid in uuids]), behind))


def _end(ended: Ended, uuid: str, timestamp: float, clock: int, hostname: str, pid: int, offset: int) -> _TaskEvent:
    common = (uuid, timestamp, clock, hostname, pid, offset)
    if ended.state is State.COMPLETED:
        return _TaskSucceeded(*common, result=_shown_version(ended.version), runtime=ended.runtime_s)
    if ended.state in (State.CANCELLED, State.EXPIRED):
        return _TaskRevoked(*common, expired=ended.state is State.EXPIRED)
    if ended.error is None:
        return _TaskFailed(*common, exception=ended.state.name, runtime=ended.runtime_s)
    exception, traceback = shown_failure(ended.error), shown_traceback(ended.error)
    return _TaskFailed(*common, exception=exception, runtime=ended.runtime_s, traceback=traceback)


def _alike(jobs: Sequence[JobHeader]) -> Iterable[Sequence[JobHeader]]:
    """The jobs by what their events say of them, but for their ids: each description is encoded once."""
    if len(jobs) < 2:
        return (jobs,) if jobs else ()
    groups: dict[object, list[JobHeader]] = {}
    first: JobHeader | None = None
    group: list[JobHeader] = []
    for job in jobs:
        # Most jobs are as the one before: they need no hash.
        if first is None or not _are_alike(job, first):
            first, group = job, groups.setdefault((job.model, job.tenant, job.priority, job.content), [])
        group.append(job)
    return groups.values()


def _are_alike(job: JobHeader, other: JobHeader) -> bool:
    """Whether both surely have the same description."""
    return (
        job.content is other.content
        and job.tenant == other.tenant
        and job.priority == other.priority
        and job.model == other.model
    )


def _without_haste(buffer: Sequence[T]) -> Iterator[T]:
    """All of these, with pauses. Meanwhile this thread holds the interpreter's lock, and a lone job would wait for all
    events of those before it: for longer than for its own answer."""
    for number, each in enumerate(buffer, 1):
        yield each
        if not number % _CALLS_AT_ONCE:
            time.sleep(_PAUSE_S)


def _first(events: Iterator[_Events], most: int) -> list[_Events]:
    """The next events, until they are `most` or more."""
    taken: list[_Events] = []
    count = 0
    while count < most and (each := next(events, None)) is not None:
        taken.append(each)
        count += each.number
    return taken


def _shown_version(version: str) -> str:
    return f"version {version}"


class TaskEventsFlag:
    """Whether task events are on; Celery's commands `enable_events` and `disable_events` switch them."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._is_on = bool(worker.task_events)

    def __call__(self) -> bool:
        """The present state, or the last known one while Celery reconnects."""
        dispatcher = self._worker.consumer.event_dispatcher
        if dispatcher is not None:
            if dispatcher.enabled and not dispatcher.groups:
                # An empty set means all groups, and Celery's `disable_events` could not take one out of it.
                dispatcher.groups = {"worker", "task"}
            # `enabled` alone stays true while task events are off.
            self._is_on = bool(dispatcher.enabled) and "task" in dispatcher.groups
        return self._is_on
