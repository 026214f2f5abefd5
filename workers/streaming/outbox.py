"""The events of one running job that the broker does not have yet. Pure: no lock, no I/O.

add --> waiting --> begin: those that travel together --> emission: sealed --> written
"""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.registry.broker.base import Emission, Position
from penstock.registry.envelope import EventHeader, Keyring, seal
from penstock.registry.event_body import MAX_PARTS, EventPart, encode_parts
from penstock.workers.job import ClaimedJob

__all__ = ["ENVELOPE_BYTES", "KeptEvents", "Outbox"]

ENVELOPE_BYTES: Final = 64 * 1024
"""Events travel together up to so many bytes. A larger one travels alone."""
_PART_BYTES: Final = 32
"""Counted for each event beside its data."""
_SEGMENTS: Final = 64


class KeptEvents:
    """Which events of one job the broker keeps: the last `max_bytes`. They are deleted in segments of a 64th of it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._marks: deque[Position] = deque()
        """The first number of each segment, and the bytes before it."""

    def begin(self, position: Position, count: int, size: int) -> None:
        """The first envelope of the run was appended, with `count` events and `size` bytes, and has this position."""
        before = position.size - size
        if before:
            # The events of earlier runs are one segment.
            self._marks.append(Position(1, 0))
        self._marks.append(Position(position.seq - count, before))

    def keep_from(self, after: Position, size: int) -> int:
        """The first number to keep when `size` bytes follow `after`; 0: as before."""
        marks, total = self._marks, after.size + size
        if after.size - marks[-1].size >= self._max_bytes // _SEGMENTS or total - marks[-1].size > self._max_bytes:
            marks.append(Position(after.seq + 1, after.size))
        first = marks[0].seq
        while len(marks) > 1 and total - marks[0].size > self._max_bytes:
            marks.popleft()
        return marks[0].seq if marks[0].seq != first else 0


class Outbox:
    """What waits to be written for one run of a job, and what is being written.

    run_name: unique for each run of each worker; see EventWriter.name_run. keyring: signs the envelopes, and seals
    their bodies. max_bytes: of the events that the broker keeps.
    """

    def __init__(self, job: ClaimedJob, run_name: str, keyring: Keyring, max_bytes: int) -> None:
        self.job: Final = job
        self.waiting_bytes = 0
        self.error: Exception | None = None
        """Why its events cannot be written."""
        self.resumes = False
        """Whether its first event continues those of an earlier run. Else it voids them."""
        self._keyring = keyring
        self._run = run_name
        self._waiting: deque[EventPart] = deque()
        self._travelling: list[EventPart] = []
        self._emission: Emission | None = None
        self._position = Position()
        self._kept = KeptEvents(max_bytes)

    @property
    def is_empty(self) -> bool:
        """Whether the broker has all events."""
        return not (self._waiting or self._travelling)

    @property
    def is_new(self) -> bool:
        """Whether the broker has no event yet."""
        return self._position.seq == 0

    def add(self, part: EventPart) -> None:
        """The event waits from now on."""
        self._waiting.append(part)
        self.waiting_bytes += _PART_BYTES + len(part.data)

    def begin(self) -> int:
        """The events that travel next leave those that wait; returns the bytes of the waiting ones, at most.

        Events whose write failed travel again, and no others with them.
        """
        if self._travelling:
            return 0
        size = 0
        while self._waiting and len(self._travelling) < MAX_PARTS:
            part_bytes = _PART_BYTES + len(self._waiting[0].data)
            if self._travelling and size + part_bytes > ENVELOPE_BYTES:
                break
            self._travelling.append(self._waiting.popleft())
            size += part_bytes
        self.waiting_bytes -= size
        return size

    def emission(self) -> Emission:
        """The events that travel, in one envelope; the same one until they were written."""
        if self._emission is None:
            job, count, seals = self.job, len(self._travelling), self._keyring.seals
            header = EventHeader(
                job.header.id,
                attempt=job.delivery.attempt,
                key=self._keyring.signing_id,
                is_sealed=seals,
                tenant=job.header.tenant if seals else "",
            )
            sealed = seal("event", header, encode_parts(self._travelling), self._keyring)
            keep_from = 0 if self.is_new else self._kept.keep_from(self._position, len(sealed))
            self._emission = Emission(job.held, self._run, sealed, count, self._position, keep_from, self.resumes)
        return self._emission

    def written(self, position: Position) -> None:
        """The broker has the events that travelled, up to this position. 0: the job was lost."""
        if position.seq == 0:
            self.lose()
        elif self._emission is not None:
            if self.is_new:
                self._kept.begin(position, self._emission.events, len(self._emission.sealed))
            self._position = position
            self._travelling, self._emission = [], None

    def lose(self) -> None:
        """Another worker has the job: its events are no longer ours."""
        self.job.is_lost = True
        self.drop()

    def drop(self) -> None:
        """Nothing more is written."""
        self._waiting.clear()
        self._travelling, self._emission, self.waiting_bytes = [], None, 0

    def fail(self, error: Exception) -> None:
        """The broker does not take these events."""
        self.error = error
        self.drop()
