"""A job's events: its record and its event stream, merged into one sequence. Pure: the clients read, this decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal, TypeAlias, cast

from penstock.producers.job_state import END_NAMES, Outcome, checked_timeout, open_outcome
from penstock.registry.broker.base import JobRecord, State, StreamEntry
from penstock.registry.envelope import Keyring, open_event
from penstock.registry.errors import BadSignature, ResultTimeout
from penstock.registry.tensors import decode

__all__ = ["EventMerger", "EventType", "JobEvent", "Silence", "is_end"]

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
_LONE_END: Final = 3
"""The sequence number of the end of a job that emitted nothing."""


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


def is_end(entry: StreamEntry) -> bool:
    """Whether an entry of an event stream says that the job has ended."""
    return entry.fields[1] in _BY_LETTER


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

    Sequence numbers: 1 is `queued`, 2 is `started`, which is left out for a job that never started. The entries of a
    worker have the numbers of the event stream, from 3 on. The end follows the last of them. The record gives the
    states that left no entry in the stream.
    """

    def __init__(self, job_id: str, keyring: Keyring, after: int) -> None:
        self.last = after
        self.is_over = False
        self._job_id = job_id
        self._keyring = keyring
        self._ends_at = 0

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
                continue
            yield from self._up_to(seq, has_started=True)
            self.last = seq
            yield self._event(seq, cast(EventType, kind.decode()), sealed)

    def record(self, job_record: JobRecord) -> Iterator[JobEvent]:
        """The events that the record brings. First pass the entries that were read after it to `entries`."""
        if self.is_over:
            return
        if job_record.state is State.QUEUED:
            yield from self._up_to(3 if job_record.is_claimed else 2, has_started=job_record.is_claimed)
            return
        outcome = open_outcome(self._job_id, job_record, self._keyring)
        end = self._ends_at or _LONE_END
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

    def _event(self, seq: int, kind: EventType, sealed: bytes) -> JobEvent:
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
        data = outcome.outputs() if failure is None else failure.exception()
        return JobEvent(seq, END_NAMES[outcome.state], data)
