"""What became of a job: replies and events, read once per client and handed to whoever waits.

    worker's commit -> reply stream of the client ----\\
    worker's emit ---> event stream of a job ----------+--> Inbox (one reader at a time) --> waiting threads
    broker's record <- re-read after a second of silence: the streams are hints, the record is the truth

A blocking client has no reader thread: of the threads that wait, one reads for all of them and passes the role on
when it has what it came for.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from penstock.registry.broker.base import JobRecord, ProducerEnd, State, StreamEntry
from penstock.registry.broker.record import parse_record
from penstock.registry.envelope import Keyring, ResultHeader, open_event, open_result
from penstock.registry.errors import BadSignature, ResultGone, UnknownJob, job_failure
from penstock.registry.queues import events_key, job_time_ms, reply_key, slot_of
from penstock.registry.tensors import Array, decode

__all__ = [
    "RECORDS_AT_ONCE",
    "SILENCE_S",
    "EventMerger",
    "Inbox",
    "JobEvent",
    "JobInfo",
    "Outcome",
    "Postbox",
    "is_end",
    "missing",
    "open_outcome",
]

SILENCE_S: Final = 1.0
"""After so long without a word the record is asked."""
RECORDS_AT_ONCE: Final = 256
_TRIM_EVERY: Final = 64
_SWEEP_FROM: Final = 1024
"""Recipients from which on those that nobody keeps are looked for; then again at twice what was left."""
_ALL: Final = 1_000_000
_LONE_END: Final = 3
"""The end's sequence number in a job that emitted nothing."""
_TERMINAL_NAMES: Final = {
    State.COMPLETED: "completed",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.EXPIRED: "expired",
    State.DEAD: "dead",
}
_BY_LETTER: Final = {state.value.encode(): state for state in State}


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One step of a job's life.

    type: queued, started, chunk, progress, reset, completed, failed, cancelled, expired or dead.
    data: the outputs for `chunk` and `completed` (name -> array), a fraction for `progress`, the JobFailed for the
    four failures, for `reset` the reason: what was seen of this job so far is void ("redelivered"), or events
    before this one were no longer kept ("trimmed"). `seq` only ever rises: pass the last one seen as `after`.
    """

    seq: int
    type: str
    data: Any = None

    @property
    def is_terminal(self) -> bool:
        """Whether nothing follows."""
        return self.type in _TERMINAL_NAMES.values()


@dataclass(frozen=True, slots=True)
class JobInfo:
    """How a job ended, without its outputs; `version` and what follows are empty for a job that no model saw.

    version, content_hash: what answered, by its label and by the SHA-256 of its content. attempt: the how-many-eth
    delivery that was. batch_size: rows of its micro-batch. queue_ms: accepted until claimed; batch_ms: until its
    forward began; compute_ms: the forward. is_cached: the answer to an equal job was kept and is this one's: there was
    no forward, and no batch.
    """

    status: str
    version: str
    content_hash: str
    worker: str
    attempt: int
    batch_size: int
    queue_ms: float
    batch_ms: float
    compute_ms: float
    is_cached: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished job, opened and verified."""

    state: State
    header: ResultHeader
    body: memoryview | bytes

    def outputs(self) -> dict[str, Array]:
        """The outputs by name. Raises the JobFailed that the job ended with."""
        if self.header.error is not None:
            raise job_failure(self.header.error.code, self.header.error.message)
        return decode(self.header.content, self.body)

    def info(self) -> JobInfo:
        """How it ended and who answered."""
        header, timings = self.header, self.header.timings
        return JobInfo(
            status=self.state.name.lower(),
            version=header.version,
            content_hash=header.content_hash,
            worker=header.worker,
            attempt=header.attempt,
            batch_size=header.batch_size,
            queue_ms=timings.queue_ms,
            batch_ms=timings.batch_ms,
            compute_ms=timings.compute_ms,
            is_cached=header.is_cached,
        )

    @property
    def has_run(self) -> bool:
        """Whether a forward was ever begun for it."""
        if self.header.is_cached:
            return False
        return self.state not in (State.CANCELLED, State.EXPIRED) or self.header.batch_size > 0


def open_outcome(job_id: str, job_record: JobRecord, keyring: Keyring) -> Outcome:
    """Opens a terminal record. Raises Corrupt for bytes that do not hold."""
    header, body = open_result(job_record.result, keyring)
    if header.id != job_id:
        raise BadSignature("the result belongs to another job")
    return Outcome(job_record.state, header, body)


def missing(job_id: str, *, is_known: bool, result_ttl_s: float) -> UnknownJob | ResultGone:
    """The error for a job without a record, and for another tenant's: nobody can tell the two apart.

    Gone, when this tenant's job is known to have existed, or its id is older than results are kept.
    """
    made_ms = job_time_ms(job_id)
    if is_known or (made_ms is not None and made_ms < (time.time() - result_ttl_s) * 1000):
        return ResultGone(f"The result of job {job_id} is gone. Results are kept for {result_ttl_s:g} s")
    return UnknownJob(f"Unknown job {job_id!r:.120}. Expected the id of a job of this tenant")


def is_end(entry: StreamEntry) -> bool:
    """Whether an entry of an event stream says that the job has ended."""
    return entry.fields[1] in _BY_LETTER


class Sink(Protocol):
    """Where the entries of one subscription go: a deque, or what an event loop wants to be woken by."""

    def append(self, entry: StreamEntry, /) -> object:
        """Takes in an entry."""


class Recipient(Protocol):
    """Whoever waits for a reply: gets the record's standing, or None when it is to be fetched by id."""

    id: str
    """The job's."""

    def receive(self, job_record: JobRecord | None) -> None:
        """Called with the inbox's lock held: must not block."""


Waiter = TypeVar("Waiter", bound=Recipient)


class Postbox(Generic[Waiter]):
    """Sorts entries of reply and event streams to those who wait. No I/O: both clients read for it."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._cursors: dict[str, str] = {}
        # Plain references, swept now and then: a WeakValueDictionary costs three times as much per job.
        self._recipients: dict[str, weakref.ref[Waiter]] = {}
        self._subscriptions: dict[str, list[Sink]] = {}
        self._untrimmed: dict[str, int] = {}
        self._sweep_at = _SWEEP_FROM

    @property
    def is_awaited(self) -> bool:
        """Whether anybody could still be interested in what comes, as of the last sweep."""
        return bool(self._recipients or self._subscriptions)

    def sweep(self) -> None:
        """Forgets recipients that nobody keeps any more."""
        self._recipients = {key: ref for key, ref in self._recipients.items() if ref() is not None}
        self._sweep_at = max(_SWEEP_FROM, 2 * len(self._recipients))

    def address(self, slot: str) -> str:
        """The reply stream for jobs of a slot; read from now on."""
        key = reply_key(slot, self._client_id)
        self._cursors.setdefault(key, "0")
        return key

    def expect(self, job_id: str, recipient: Waiter) -> None:
        """Replies about the job go to `recipient`, for as long as somebody else keeps that alive."""
        self._recipients[job_id.rpartition(".")[2]] = weakref.ref(recipient)
        if len(self._recipients) >= self._sweep_at:
            self.sweep()

    def expects(self, job_id: str) -> bool:
        """Whether somebody waits for the reply about the job."""
        return job_id.rpartition(".")[2] in self._recipients

    def expected(self) -> list[Waiter]:
        """Those who wait for a reply."""
        return [recipient for ref in self._recipients.values() if (recipient := ref()) is not None]

    def settle(self, recipient: Waiter, job_record: JobRecord | None) -> None:
        """Tells a recipient what its record says; no reply will."""
        self._recipients.pop(recipient.id.rpartition(".")[2], None)
        recipient.receive(job_record)

    def subscribe(self, job_id: str, after: int, sink: Sink) -> None:
        """The job's events go to `sink`, from `after` + 1 on, or from where they are read already."""
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
        """A reply stream through which a reader of `reading` is woken, when that misses a stream by now."""
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
        recipients = self._recipients
        for index in range(0, len(fields), 2):
            ref = recipients.pop(fields[index].decode("ascii", "replace"), None)
            if ref is not None and (recipient := ref()) is not None:
                record = fields[index + 1]
                recipient.receive(parse_record(record) if record else None)


class Inbox:
    """A blocking client's ear. Thread-safe."""

    def __init__(self, broker: ProducerEnd, client_id: str) -> None:
        self._broker = broker
        self._postbox: Postbox[Recipient] = Postbox(client_id)
        self._changed = threading.Condition()
        self._reading: dict[str, str] | None = None
        self._addresses: dict[str, str] = {}
        self._trims: list[tuple[str, str]] = []

    def address(self, slot: str) -> str:
        """The reply stream for jobs of a slot."""
        key = self._addresses.get(slot)
        if key is None:
            with self._changed:
                key = self._addresses[slot] = self._postbox.address(slot)
                wake = self._wake_key()
            self._wake(wake)
        return key

    def expect(self, job_id: str, recipient: Recipient) -> None:
        """See Postbox.expect."""
        with self._changed:
            self._postbox.expect(job_id, recipient)

    def expects(self, job_id: str) -> bool:
        """Whether the reply about the job will come here."""
        with self._changed:
            return self._postbox.expects(job_id)

    def subscribe(self, job_id: str, after: int) -> deque[StreamEntry]:
        """Where the job's events will appear, see Postbox.subscribe."""
        entries: deque[StreamEntry] = deque()
        with self._changed:
            self._postbox.subscribe(job_id, after, entries)
            wake = self._wake_key()
        self._wake(wake)
        return entries

    def unsubscribe(self, job_id: str, entries: deque[StreamEntry]) -> None:
        """Ends a subscription."""
        with self._changed:
            self._postbox.unsubscribe(job_id, entries)

    def make_up(self) -> None:
        """After a reply that never came, asks the records of all who wait: theirs may be gone with it."""
        with self._changed:
            waiting = self._postbox.expected()
        for start in range(0, len(waiting), RECORDS_AT_ONCE):
            part = waiting[start : start + RECORDS_AT_ONCE]
            job_records = self._broker.job_records([recipient.id for recipient in part])
            with self._changed:
                for recipient, job_record in zip(part, job_records, strict=True):
                    has_ended = job_record is None or job_record.state is not State.QUEUED
                    if has_ended and self._postbox.expects(recipient.id):
                        self._postbox.settle(recipient, job_record)
                self._changed.notify_all()

    def read_now(self, job_id: str, after: int) -> list[StreamEntry]:
        """The job's events after a sequence number, as they are now."""
        return self._broker.read({events_key(job_id): f"{after}-0"}, 0, _ALL)

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Reads, or lets another thread read, until `is_done` or the time is up; says whether it is done.

        Raises BrokerUnavailable to the thread that was reading.
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
        """One read without the lock; the caller holds it before and after."""
        cursors = self._reading = self._postbox.cursors()
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
            self._trims = self._postbox.deliver(entries)
            self._changed.notify_all()

    def _wake_key(self) -> str | None:
        return None if self._reading is None else self._postbox.wake_key(self._reading)

    def _wake(self, key: str | None) -> None:
        if key is not None:
            self._broker.nudge(key)


class EventMerger:
    """A job's record and its event stream -> one sequence. Pure: the clients read, this decides.

    Sequence numbers: 1 is `queued`, 2 `started` (skipped by a job that never was); what a worker emits has its
    stream's own numbers from 3 on; the end follows the last of them. States that left no entry are read off the
    record.
    """

    def __init__(self, job_id: str, keyring: Keyring, after: int) -> None:
        self.last = after
        self.is_over = False
        self._job_id = job_id
        self._keyring = keyring
        self._ends_at = 0

    @property
    def awaits_record(self) -> bool:
        """Whether the stream has announced the end: feed the record next."""
        return self._ends_at > 0 and not self.is_over

    def entries(self, entries: Iterable[StreamEntry]) -> Iterator[JobEvent]:
        """The events that stream entries bring."""
        for entry in entries:
            seq = int(entry.entry_id.partition("-")[0])
            if seq <= self.last or self.is_over:
                continue
            kind, sealed = entry.fields[1], entry.fields[3]
            if kind in _BY_LETTER:
                self._ends_at = seq
                continue
            yield from self._up_to(seq, has_started=True)
            self.last = seq
            yield self._event(seq, kind.decode(), sealed)

    def job_record(self, job_record: JobRecord) -> Iterator[JobEvent]:
        """The events that the record brings; call it after `entries` with what was read later than the record."""
        if self.is_over:
            return
        if job_record.state is State.QUEUED:
            yield from self._up_to(3 if job_record.is_claimed else 2, has_started=job_record.is_claimed)
            return
        outcome = open_outcome(self._job_id, job_record, self._keyring)
        end = self._ends_at or _LONE_END
        # A subscriber that has seen the end already asks for what follows it: nothing.
        if self.last < end:
            yield from self._up_to(end, has_started=outcome.has_run)
            self.last = end
            yield self._end(end, outcome)
        self.is_over = True

    def _up_to(self, seq: int, *, has_started: bool) -> Iterator[JobEvent]:
        if self.last < 1 < seq:
            self.last = 1
            yield JobEvent(1, "queued")
        if self.last < 2 < seq and has_started:
            self.last = 2
            yield JobEvent(2, "started")
        if self.last + 1 < seq and self.last >= 2:
            self.last = seq - 1
            yield JobEvent(seq - 1, "reset", "trimmed")

    def _event(self, seq: int, kind: str, sealed: bytes) -> JobEvent:
        if kind == "reset":
            return JobEvent(seq, kind, "redelivered")
        if kind == "started":
            return JobEvent(seq, kind)
        header, body = open_event(sealed, self._keyring)
        if header.id != self._job_id:
            raise BadSignature("the event belongs to another job")
        return JobEvent(seq, kind, header.fraction if kind == "progress" else decode(header.content, body))

    def _end(self, seq: int, outcome: Outcome) -> JobEvent:
        failure = outcome.header.error
        data = outcome.outputs() if failure is None else job_failure(failure.code, failure.message)
        return JobEvent(seq, _TERMINAL_NAMES[outcome.state], data)
