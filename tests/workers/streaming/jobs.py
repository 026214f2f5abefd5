"""A broker in memory that counts its calls and can be held or broken, and running jobs with their outboxes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from penstock.registry.broker.base import Emission, Position
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import JobHeader, Keyring, open_event
from penstock.registry.event_body import EventPart, decode_parts
from penstock.registry.queues import events_key
from penstock.registry.tensors import Tensor
from penstock.workers.job import ClaimedJob
from penstock.workers.streaming.event_writer import EventWriter
from penstock.workers.streaming.outbox import Outbox
from tests.conformance.jobs import claim, publish

SLOT = "counter"
UNSIGNED = Keyring.parse(None)
MAX_BYTES = 1 << 20
BYTES = (Tensor("t", "uint8", (1,)),)


class Broker(MemoryBroker):
    """Notes the jobs of each call. `errors` are raised by the next calls; a call waits while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        self.threads: list[str] = []
        self.errors: list[Exception] = []
        self.poisoned = ""
        """A job whose events are refused."""
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = threading.Event()
        """Set while a call waits at the gate."""

    def emit(self, consumer: str, emissions: Sequence[Emission], ttl_ms: int, *, max_bytes: int) -> list[Position]:
        self.calls.append([emission.held.job_id for emission in emissions])
        self.threads.append(threading.current_thread().name)
        if not self.gate.is_set():
            self.is_held.set()
            assert self.gate.wait(180)
        if self.errors:
            raise self.errors.pop()
        if self.poisoned in self.calls[-1]:
            raise ValueError("another type")
        return super().emit(consumer, emissions, ttl_ms, max_bytes=max_bytes)

    def running(self, count: int = 1) -> list[ClaimedJob]:
        """So many jobs that `w` holds."""
        publish(self, SLOT, count)
        return [
            ClaimedJob(delivery, JobHeader(delivery.sealed.decode(), "acme", SLOT, "normal", ()), b"", 1, 0.0, 0.0, 0)
            for delivery in claim(self, "w", SLOT, credit=count)
        ]

    def entries(self, job: ClaimedJob) -> list[list[int]]:
        """The chunks of each entry of the job's event stream, as numbers."""
        return [
            [part.data[0] for part, _ in decode_parts(open_event(entry.fields[3], UNSIGNED)[1])]
            for entry in self.read({events_key(job.header.id): "0"}, 0, 10_000)
            if entry.fields[1] == b"events"
        ]

    def chunks(self, job: ClaimedJob) -> list[int]:
        """The chunks of the job, in order."""
        return [number for entry in self.entries(job) for number in entry]


def writer_of(broker: Broker, clock: Callable[[], float], may_wait: Callable[[], bool] = lambda: True) -> EventWriter:
    """The writer of the consumer that `Broker.running` claims for."""
    return EventWriter(broker, "w", ttl_ms=60_000, max_bytes=MAX_BYTES, may_wait=may_wait, clock=clock)


def outbox_of(job: ClaimedJob) -> Outbox:
    """The outbox of a run of the job."""
    return Outbox(job, "run", UNSIGNED, MAX_BYTES)


def chunk(number: int, size: int = 1) -> EventPart:
    """A chunk of one number, repeated `size` times."""
    return EventPart(bytes([number]) * size, BYTES if size == 1 else (Tensor("t", "uint8", (size,)),))
