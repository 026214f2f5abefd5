"""A job's events: its record and its event stream, merged into one sequence. Pure: the clients read, this decides."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal, TypeAlias, cast

from penstock.producers.job_state import END_NAMES, Outcome, checked_timeout, open_outcome
from penstock.registry.broker.base import JobRecord, State, StreamEntry
from penstock.registry.envelope import Keyring, open_event
from penstock.registry.errors import (
    BadSeal,
    BadSignature,
    InvalidInput,
    ResultTimeout,
    UndecodableEnvelope,
    described,
)
from penstock.registry.event_body import decode_parts

__all__ = ["EventMerger", "EventType", "JobEvent", "Silence", "is_end", "unqueued_events"]

EventType: TypeAlias = Literal[
    "queued",
    "started",
    "chunk",
    "progress",
    "reset",
    "completed",
    "failed",
    "cancelled",
    "expired",
    "dead",
]
"""The kinds of events. The last five end the stream."""
_END_TYPES: Final = frozenset(END_NAMES.values())
_BY_LETTER: Final = {state.value.encode(): state for state in State}
_BEGINS: Final[dict[bytes, tuple[EventType, str | None]]] = {
    b"started": ("started", None),
    b"reset": ("reset", "redelivered"),
}
"""The entries with which a run of the job begins."""
_LONE_END: Final = 3
"""The sequence number of the end of a job that emitted nothing."""
_MOST_SEQ: Final = 2**63 - 1
"""No event has a higher number. A reader asks for the events of all its jobs in one command: a number that the broker
cannot read would fail it for all of them."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event in the life of a job.

    type: queued, started, chunk, progress, reset, completed, failed, cancelled, expired or dead.
    data: for `chunk` and `completed` the outputs (name -> array); for `progress` a fraction; for the other four ends
    the JobFailed; for `reset` the reason, which voids all events before it: "redelivered" means that another attempt
    began, "trimmed" that the broker no longer kept earlier events.
    seq: only rises. Pass the last one that you have seen as `after`.
    """

    seq: int
    type: EventType
    data: Any = None

    @property
    def is_terminal(self) -> bool:
        """Whether this is the last event."""
        return self.type in _END_TYPES


def _checked_after(after: object) -> int:
    """The sequence number of a `stream(after=)`. Raises InvalidInput for any other value."""
    try:
        seq = -1 if isinstance(after, bool) else operator.index(cast(int, after))
    except TypeError:
        seq = -1
    if not 0 <= seq <= _MOST_SEQ:
        raise InvalidInput(
            f"after is {described(after)}. Expected the sequence number of an event, or 0 for all events"
        )
    return seq


def is_end(entry: StreamEntry) -> bool:
    """Whether an entry of an event stream says that the job has ended."""
    return entry.fields[1] in _BY_LETTER


def unqueued_events(outcome: Outcome, after: int) -> Iterator[JobEvent]:
    """The events of a job that was answered before it was queued: its end, with the number of a job without events."""
    if _checked_after(after) < _LONE_END:
        yield JobEvent(_LONE_END, END_NAMES[outcome.state], outcome.outputs())


class Silence:
    """How long a stream may go without an event. The time that its caller takes for an event does not count.

    timeout_s: None means for ever.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = checked_timeout(timeout_s)
        self._until: float | None = None

    def left(self, now: float, last: int) -> float:
        """The seconds to wait now. Raises ResultTimeout when the time is up.

        last: the sequence number from which a later stream continues.
        """
        if self._timeout_s is None:
            return inf
        if self._until is None:
            self._until = now + self._timeout_s
        elif now >= self._until:
            raise ResultTimeout(
                f"No event within {self._timeout_s:g} s; the job goes on. stream(after={last}) continues"
            )
        return self._until - now

    def broken(self) -> None:
        """An event was handed out: the time begins again with the next wait."""
        self._until = None


class EventMerger:
    """A job's record and its event stream -> one sequence.

    Sequence numbers: 1 is `queued`, 2 is `started`, which is left out for a job that never started. The events of a
    worker have numbers from 3 on. Those that were written together share one entry of the stream, whose id has the
    number of the last one. The end follows the last of them. The record gives the states that left no entry in the
    stream.
    """

    def __init__(self, job_id: str, tenant: str, keyring: Keyring, after: int) -> None:
        self.last = _checked_after(after)
        self.is_over = False
        self._job_id = job_id
        self._tenant = tenant
        self._keyring = keyring
        self._ends_at = 0
        self._has_told = False
        """Whether an entry of the stream became an event."""

    @property
    def awaits_record(self) -> bool:
        """Whether the stream has announced the end. Then the record must be read next."""
        return self._ends_at > 0 and not self.is_over

    def entries(self, entries: Iterable[StreamEntry]) -> Iterator[JobEvent]:
        """The events that entries of the stream bring."""
        for entry in entries:
            seq = int(entry.entry_id.partition("-")[0])
            if seq <= self.last or self.is_over:
                continue
            kind, sealed = entry.fields[1], entry.fields[3]
            if kind in _BY_LETTER:
                self._ends_at = seq
            elif kind == b"events":
                yield from self._events(seq, sealed)
            elif kind == b"resumed":
                # Another worker goes on with the same events.
                yield from self._up_to(seq, has_started=True)
                self.last, self._has_told = seq, True
            elif kind in _BEGINS:
                yield from self._up_to(seq, has_started=True)
                self.last, self._has_told = seq, True
                yield JobEvent(seq, *_BEGINS[kind])
            else:
                raise UndecodableEnvelope(f"an event of the kind {kind!r:.40}. Expected a worker of this version")

    def record(self, job_record: JobRecord) -> Iterator[JobEvent]:
        """The events that the record brings. First pass the entries that were read after it to `entries`."""
        if self.is_over:
            return
        if job_record.state is State.QUEUED:
            yield from self._up_to(3 if job_record.is_claimed else 2, has_started=job_record.is_claimed)
            return
        outcome = open_outcome(self._job_id, job_record, self._keyring)
        end = self._ends_at or _LONE_END
        if self._has_told:
            # In an older copy of the broker's data, the stream has lower numbers than its subscriber has seen.
            end = max(end, self.last + 1)
        # Nothing follows for a subscriber that has seen the end.
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

    def _events(self, last: int, sealed: bytes) -> Iterator[JobEvent]:
        """The events of one entry that have not been seen. last: the number of its last one."""
        header, body = open_event(sealed, self._keyring)
        if header.id != self._job_id:
            raise BadSignature("the event belongs to another job")
        if header.is_sealed and header.tenant != self._tenant:
            raise BadSeal("the event belongs to another tenant")
        parts = decode_parts(body)
        for seq, (part, content) in enumerate(parts, last - len(parts) + 1):
            if seq <= self.last:
                continue
            yield from self._up_to(seq, has_started=True)
            self.last, self._has_told = seq, True
            if part.fraction is None:
                yield JobEvent(seq, "chunk", part.values(content))
            else:
                yield JobEvent(seq, "progress", part.fraction)

    def _end(self, seq: int, outcome: Outcome) -> JobEvent:
        failure = outcome.header.error
        data = outcome.outputs() if failure is None else failure.exception()
        return JobEvent(seq, END_NAMES[outcome.state], data)
