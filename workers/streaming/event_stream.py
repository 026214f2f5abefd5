"""The context of one streaming job: checks its chunks and its progress, and has them written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import cast

from penstock.registry.broker.base import StreamEntry
from penstock.registry.envelope import Keyring
from penstock.registry.errors import InvalidInput, ModelError
from penstock.registry.event_body import MAX_CHUNK_BYTES, EventPart, chunk_part
from penstock.registry.queues import PriorityName
from penstock.registry.tensors import Array, Tensor
from penstock.workers.job import ClaimedJob
from penstock.workers.streaming.delivered import delivered_chunks
from penstock.workers.streaming.event_writer import EventWriter
from penstock.workers.streaming.outbox import Outbox

__all__ = ["EventStream"]


class EventStream:
    """Sends the events of a running job while its lease is held. An entry point uses it as a StreamContext.

    While the broker is away, the entry point waits. After the lease was lost, no event is sent and `is_cancelled` is
    true: the job runs elsewhere. touch: called with each event, and while one waits. max_bytes: of the events of one
    job that the broker keeps; no chunk may be larger.
    """

    def __init__(
        self,
        job: ClaimedJob,
        touch: Callable[[], None],
        writer: EventWriter,
        keyring: Keyring,
        max_bytes: int,
        read: Callable[[str], list[StreamEntry]] = lambda _: [],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """read: the entries of the event stream of a job, by its id. Raises BrokerUnavailable.

        clock: monotonic seconds, those of `ClaimedJob.claimed`.
        """
        self._job = job
        self._touch = touch
        self._writer = writer
        self._outbox = Outbox(job, writer.name_run(), keyring, max_bytes)
        self._keyring = keyring
        self._read = read
        self._clock = clock
        self._max_chunk_bytes = min(max_bytes, MAX_CHUNK_BYTES)
        self._content: tuple[Tensor, ...] | None = None
        self._is_over = False

    @property
    def job_id(self) -> str:
        """`<model>.<uuid7>`."""
        return self._job.header.id

    @property
    def tenant(self) -> str:
        """The tenant of the job."""
        return self._job.header.tenant

    @property
    def priority(self) -> PriorityName:
        """The priority of the job."""
        return cast(PriorityName, self._job.delivery.priority.label)

    @property
    def now_ms(self) -> int:
        """Milliseconds by the broker's clock: those at the claim, and what has passed here since."""
        job = self._job
        return int(job.delivery.accepted_ms + job.queue_ms + (self._clock() - job.claimed) * 1000)

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline of the job, by the broker's clock; None: it has none."""
        return (self._job.expires_ms - self.now_ms) / 1000 if self._job.header.deadline_ms else None

    def alive(self) -> None:
        """Show progress without an event."""
        self._touch()

    def earlier_chunks(self) -> list[dict[str, Array]] | None:
        """The chunks that earlier runs of the job have delivered; None: none, or not all of them are known.

        While the broker is away, the job waits. Its number of deliveries tells nothing: a release does not count.
        """
        entries = self._writer.ask(lambda: self._read(self.job_id), self._job, self._touch)
        return delivered_chunks(entries, self._job, self._keyring)

    def resume(self) -> None:
        """The events to come continue those of the run before: subscribers see no reset."""
        self._outbox.resumes = True

    @property
    def is_cancelled(self) -> bool:
        """Whether to return early: the job was cancelled, or another worker has it."""
        return self._job.is_cancelled or self._job.is_lost

    def progress(self, fraction: float) -> None:
        """Send the progress to subscribers. Raises InvalidInput outside 0 to 1."""
        if not 0 <= fraction <= 1:
            raise InvalidInput(f"progress is {fraction!r:.40}. Expected a number from 0 to 1")
        self._send(EventPart(fraction=float(fraction)))

    def chunk(self, values: Mapping[str, Array]) -> None:
        """Send values that the entry point yielded. Raises ModelError for values that no subscriber could read."""
        try:
            part = chunk_part(values, self._content, self._max_chunk_bytes)
        except InvalidInput as error:
            raise ModelError(f"A chunk cannot be sent. {error}") from None
        self._content = part.content
        self._send(part)

    def together(self) -> AbstractContextManager[None]:
        """Inside of it, the events of this worker's streams wait for one write at its end."""
        return self._writer.together()

    def finish(self) -> None:
        """Wait until the broker has all events. Later ones are ignored."""
        self._is_over = True
        self._writer.flush(self._outbox, self._touch)

    def discard(self) -> None:
        """Drop the events that wait. Later ones are ignored."""
        self._is_over = True
        self._writer.discard(self._outbox)

    def _send(self, part: EventPart) -> None:
        # The time limit of the forward counts from the last event, and does not count a wait for the broker.
        self._touch()
        if not (self._is_over or self._job.is_lost):
            self._writer.add(self._outbox, part, self._touch)
