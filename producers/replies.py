"""Replies and events: one reader per client, which hands each entry to the threads that wait for it.

    worker's commit -> reply stream of the client ----\\
    worker's emit ---> event stream of a job ----------+--> ReplyReader (one thread reads) --> waiting threads
    broker's record <- re-read after a second of silence: the streams are hints, the record decides

A blocking client has no thread of its own for reading. One of the waiting threads reads for all of them, and the next
one takes over when it leaves.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

from penstock.producers.job_state import JobState
from penstock.producers.unusable import CLOSED
from penstock.registry.broker.base import JobRecord, ProducerEnd, State, StreamEntry
from penstock.registry.broker.record import parse_record
from penstock.registry.queues import events_key, reply_key, slot_of

__all__ = [
    "ALL_ENTRIES",
    "RECORDS_AT_ONCE",
    "SILENCE_S",
    "PendingReply",
    "ReplyReader",
    "ReplyRouter",
    "ReplySink",
    "Sink",
    "new_client_id",
]

SILENCE_S: Final = 1.0
"""After a silence of this length, the client reads the record."""
RECORDS_AT_ONCE: Final = 256
ALL_ENTRIES: Final = 1_000_000
"""A count that no event stream reaches."""
_TRIM_EVERY: Final = 128
"""A trim is a round trip of its own, for which a lone job waits."""
_SWEEP_FROM: Final = 1024
"""From this number of pending replies on, the router removes those without a handle; then again at twice the rest."""


def new_client_id() -> str:
    """Names the reply streams of one client in one process."""
    return secrets.token_hex(6)


class Sink(Protocol):
    """Takes the entries of one subscription: a deque, or a queue that wakes an event loop."""

    def append(self, entry: StreamEntry, /) -> object:
        """Adds an entry."""


class ReplySink(Protocol):
    """Hears of each reply that comes to a client."""

    def receive(self, job: JobState, /) -> object:
        """Takes a job whose reply has come."""


class PendingReply(Protocol):
    """A job whose reply is expected."""

    id: str
    """The job's id."""

    def receive(self, record: JobRecord | None) -> None:
        """Takes the terminal record, or None when it must be read by id. It must not block: a lock may be held."""


Pending = TypeVar("Pending", bound=PendingReply)


class ReplyRouter(Generic[Pending]):
    """Routes each entry of a reply or event stream to the jobs that expect it. No I/O: both clients read for it.

    on_replies: called with the pending replies of each entry that have received their records.
    """

    def __init__(self, client_id: str, on_replies: Callable[[Sequence[Pending]], None] | None = None) -> None:
        self._client_id = client_id
        self.on_replies = on_replies
        self._cursors: dict[str, str] = {}
        # Plain weak references, swept now and then: a WeakValueDictionary costs three times as much per job.
        self._pending: dict[str, weakref.ref[Pending]] = {}
        self._subscriptions: dict[str, list[Sink]] = {}
        self._untrimmed: dict[str, int] = {}
        self._sweep_at = _SWEEP_FROM

    @property
    def is_awaited(self) -> bool:
        """Whether a reply or an event is expected. The last sweep decides which handles still exist."""
        return bool(self._pending or self._subscriptions)

    def sweep(self) -> None:
        """Removes pending replies whose handle no longer exists."""
        self._pending = {key: ref for key, ref in self._pending.items() if ref() is not None}
        self._sweep_at = max(_SWEEP_FROM, 2 * len(self._pending))

    def address(self, slot: str) -> str:
        """The reply stream for jobs of a slot. From now on it is among the cursors."""
        key = reply_key(slot, self._client_id)
        self._cursors.setdefault(key, "0")
        return key

    def expect(self, pending: Pending) -> None:
        """Routes the reply about a job to `pending`, while the caller keeps a reference to it."""
        self.expect_all((pending,))

    def expect_all(self, jobs: Iterable[Pending]) -> None:
        """The same for several jobs."""
        known, ref = self._pending, weakref.ref
        for pending in jobs:
            known[pending.id.rpartition(".")[2]] = ref(pending)
        if len(known) >= self._sweep_at:
            self.sweep()

    def expects(self, job_id: str) -> bool:
        """Whether the reply about the job is expected and has not come."""
        return job_id.rpartition(".")[2] in self._pending

    def expected(self) -> list[Pending]:
        """All pending replies."""
        return [pending for ref in self._pending.values() if (pending := ref()) is not None]

    def settle(self, pending: Pending, record: JobRecord | None) -> None:
        """Gives a pending reply the record that the client read, in place of the reply."""
        self._pending.pop(pending.id.rpartition(".")[2], None)
        pending.receive(record)
        if self.on_replies is not None:
            self.on_replies((pending,))

    def subscribe(self, job_id: str, after: int, sink: Sink) -> None:
        """Routes the job's events to `sink`, from `after` + 1 on, or from the entry that is read next anyway."""
        self.address(slot_of(job_id))
        key = events_key(job_id)
        self._cursors.setdefault(key, f"{after}-0")
        self._subscriptions.setdefault(key, []).append(sink)

    def unsubscribe(self, job_id: str, sink: Sink) -> None:
        """Ends a subscription."""
        key = events_key(job_id)
        remaining = [other for other in self._subscriptions.get(key, ()) if other is not sink]
        if remaining:
            self._subscriptions[key] = remaining
        else:
            self._subscriptions.pop(key, None)
            self._cursors.pop(key, None)

    def cursors(self) -> dict[str, str]:
        """What to read, and after which entry."""
        return dict(self._cursors)

    def wake_key(self, reading: Mapping[str, str]) -> str | None:
        """A reply stream that wakes a reader of `reading`, when that reader misses a stream. Otherwise None."""
        if self._cursors.keys() <= reading.keys():
            return None
        return next((key for key in reading if key not in self._subscriptions), None)

    def deliver(self, entries: Iterable[StreamEntry]) -> list[tuple[str, str]]:
        """Hands entries out; returns the (stream, last entry) pairs that may now be trimmed."""
        trims: list[tuple[str, str]] = []
        for entry in entries:
            key, entry_id, fields = entry
            if key not in self._cursors:
                continue
            self._cursors[key] = entry_id
            if (sinks := self._subscriptions.get(key)) is not None:
                for sink in sinks:
                    sink.append(entry)
                continue
            self._hand_out(fields)
            self._untrimmed[key] = self._untrimmed.get(key, 0) + 1
            if self._untrimmed[key] >= _TRIM_EVERY:
                self._untrimmed[key] = 0
                trims.append((key, entry_id))
        return trims

    def _hand_out(self, fields: Sequence[bytes]) -> None:
        waiting, answered = self._pending, []
        for index in range(0, len(fields), 2):
            ref = waiting.pop(fields[index].decode("ascii", "replace"), None)
            if ref is not None and (pending := ref()) is not None:
                record = fields[index + 1]
                pending.receive(parse_record(record) if record else None)
                answered.append(pending)
        if self.on_replies is not None:
            self.on_replies(answered)


class ReplyReader:
    """Reads replies and events for a blocking client. Thread-safe."""

    def __init__(self, broker: ProducerEnd) -> None:
        self._broker = broker
        self._router: ReplyRouter[JobState] = ReplyRouter(new_client_id())
        self._changed = threading.Condition()
        self._reading: dict[str, str] | None = None
        self._addresses: dict[str, str] = {}
        self._trims: list[tuple[str, str]] = []
        self._watchers: list[ReplySink] = []

    def address(self, slot: str) -> str:
        """The reply stream for jobs of a slot."""
        key = self._addresses.get(slot)
        if key is None:
            with self._changed:
                key = self._addresses[slot] = self._router.address(slot)
                wake = self._wake_key()
            self._wake(wake)
        return key

    def expect_all(self, jobs: Iterable[JobState]) -> None:
        """Routes the reply about each job to it, while the caller keeps a reference to it."""
        with self._changed:
            self._router.expect_all(jobs)

    def expects(self, job_id: str) -> bool:
        """Whether the reply about the job will come to this reader."""
        with self._changed:
            return self._router.expects(job_id)

    def subscribe(self, job_id: str, after: int) -> deque[StreamEntry]:
        """The queue to which the job's events after `after` will be added."""
        entries: deque[StreamEntry] = deque()
        self.attach(job_id, after, entries)
        return entries

    def attach(self, job_id: str, after: int, sink: Sink) -> None:
        """Adds the job's events after `after` to `sink`, which must not block: the lock is held."""
        with self._changed:
            self._router.subscribe(job_id, after, sink)
            wake = self._wake_key()
        self._wake(wake)

    def unsubscribe(self, job_id: str, sink: Sink) -> None:
        """Ends a subscription."""
        with self._changed:
            self._router.unsubscribe(job_id, sink)

    def watch(self, sink: ReplySink) -> None:
        """Tells `sink` of every reply that comes. It must not block: the lock is held."""
        with self._changed:
            self._watchers.append(sink)
            self._router.on_replies = self._tell

    def unwatch(self, sink: ReplySink) -> None:
        """Ends `watch`. Without a watcher a reply costs nothing more."""
        with self._changed:
            self._watchers.remove(sink)
            if not self._watchers:
                self._router.on_replies = None

    def close(self) -> None:
        """Wakes the waiting threads. They get ClientUnusable, and so does each later wait."""
        with self._changed:
            self._broker = CLOSED
            self._changed.notify_all()

    def catch_up(self) -> None:
        """Reads the records of all pending jobs. After one lost reply, others may be lost, too."""
        with self._changed:
            waiting = self._router.expected()
        for start in range(0, len(waiting), RECORDS_AT_ONCE):
            part = waiting[start : start + RECORDS_AT_ONCE]
            records = self._broker.job_records([job.id for job in part])
            with self._changed:
                for job, record in zip(part, records, strict=True):
                    has_ended = record is None or record.state is not State.QUEUED
                    if has_ended and self._router.expects(job.id):
                        self._router.settle(job, record)
                self._changed.notify_all()

    def read_now(self, job_id: str, after: int) -> list[StreamEntry]:
        """The entries of the job's event stream after a sequence number, without waiting."""
        return self._broker.read({events_key(job_id): f"{after}-0"}, 0, ALL_ENTRIES)

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Reads, or waits while another thread reads, until `is_done` or the time is up. Returns `is_done`.

        The thread that reads gets BrokerUnavailable when the broker does not answer.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not is_done():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self._reading is None:
                    self._read_once(min(left, SILENCE_S))
                else:
                    self._changed.wait(left)
        return True

    def _read_once(self, seconds: float) -> None:
        """Reads once, without the lock. The caller holds the lock before and after."""
        cursors = self._reading = self._router.cursors()
        trims, self._trims = self._trims, []
        entries: list[StreamEntry] = []
        self._changed.release()
        try:
            for key, last in trims:
                self._broker.trim(key, last)
            entries = self._broker.read(cursors, max(1, int(seconds * 1000)))
        finally:
            self._changed.acquire()
            self._reading = None
            self._trims = self._router.deliver(entries)
            self._changed.notify_all()

    def _tell(self, jobs: Sequence[JobState]) -> None:
        for sink in self._watchers:
            for job in jobs:
                sink.receive(job)

    def _wake_key(self) -> str | None:
        return None if self._reading is None else self._router.wake_key(self._reading)

    def _wake(self, key: str | None) -> None:
        if key is not None:
            self._broker.nudge(key)
