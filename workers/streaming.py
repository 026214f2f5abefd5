"""The context of one streaming job: publishes its chunks and its progress as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from penstock.registry.broker.base import Event, WorkerEnd
from penstock.registry.envelope import EventHeader, Keyring, seal
from penstock.registry.errors import BrokerUnavailable, InvalidInput
from penstock.registry.tensors import Array, encode
from penstock.workers.job import ClaimedJob

__all__ = ["EventStream"]

_RETRY_S = 0.2


class EventStream:
    """Sends the events of a running job while its lease is held. An entry point uses it as a StreamContext.

    While the broker is away, the entry point waits. After the lease was lost, no event is sent and `is_cancelled` is
    true: the job runs elsewhere. touch: called while an event waits. may_wait: whether it may go on waiting.
    """

    def __init__(
        self,
        job: ClaimedJob,
        touch: Callable[[], None],
        broker: WorkerEnd,
        consumer: str,
        keyring: Keyring,
        ttl_ms: int,
        may_wait: Callable[[], bool],
    ) -> None:
        self._job = job
        self._touch = touch
        self._broker = broker
        self._consumer = consumer
        self._keyring = keyring
        self._ttl_ms = ttl_ms
        self._may_wait = may_wait
        self._last = 0

    @property
    def job_id(self) -> str:
        """`<model>.<uuid7>`."""
        return self._job.header.id

    @property
    def tenant(self) -> str:
        """The tenant of the job."""
        return self._job.header.tenant

    @property
    def is_cancelled(self) -> bool:
        """Whether to return early: the job was cancelled, or another worker has it."""
        return self._job.is_cancelled or self._job.is_lost

    def progress(self, fraction: float) -> None:
        """Send the progress to subscribers. Raises InvalidInput outside 0 to 1."""
        if not 0 <= fraction <= 1:
            raise InvalidInput(f"progress is {fraction!r:.40}. Expected a number from 0 to 1")
        self._emit("progress", fraction=float(fraction))

    def chunk(self, values: Mapping[str, Array]) -> None:
        """Send values that the entry point yielded."""
        self._emit("chunk", values=values)

    def _emit(self, kind: str, *, values: Mapping[str, Array] | None = None, fraction: float | None = None) -> None:
        content, body = encode(values) if values else ((), b"")
        header = EventHeader(
            self.job_id, kind, content, fraction, self._job.delivery.attempt, key=self._keyring.signing_id
        )
        event = Event(kind, seal("event", header, body, self._keyring))
        while not self._job.is_lost:
            # The time limit of the forward does not count this wait.
            self._touch()
            try:
                last = self._broker.emit(self._consumer, self._job.held, [event], self._ttl_ms, after=self._last)
            except BrokerUnavailable:
                if not self._may_wait():
                    self._job.is_lost = True
                    return
                time.sleep(_RETRY_S)
                continue
            self._last = last
            self._job.is_lost = last == 0
            return
