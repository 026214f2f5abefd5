"""The record of a job in the broker in memory: where the job is, then its result."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from penstock.registry.broker.base import JobRecord, Publication, State
from penstock.registry.broker.memory_queue import NO_OWNER, Lease
from penstock.registry.broker.record import encode_result
from penstock.registry.queues import Priority

__all__ = ["StoredRecord", "record_of", "with_rating"]


@dataclass(slots=True)
class StoredRecord:
    """The record of a job. A terminal one is its result."""

    tenant: str
    priority: Priority
    entry_id: bytes
    reply: str
    idempotency_digest: str
    expires_ms: int
    """When its deadline or its lifetime passes."""
    state: State = State.QUEUED
    result: bytes = b""
    is_cancel_requested: bool = False
    is_followed: bool = False
    """A client subscribed or the job emitted events: its terminal state goes to its event stream."""
    webhook: str = ""
    """The target of its webhook; empty without one."""
    is_rated: bool = False
    """Whether a client has reported the quality of its result."""

    def is_entry(self, priority: Priority, entry_id: bytes) -> bool:
        """Whether this is the record of a live job with this entry."""
        return (self.state, self.priority, self.entry_id) == (State.QUEUED, priority, entry_id)

    def job_record(self, lease: Lease | None = None) -> JobRecord:
        """The record as `job_record` returns it. A terminal record has its tenant inside its sealed result."""
        if self.state is not State.QUEUED:
            return JobRecord(self.state, "", self.result)
        record = JobRecord(self.state, self.tenant, cancel_requested=self.is_cancel_requested)
        if lease is None:
            return record
        holder = "" if lease.owner == NO_OWNER else lease.owner
        return structs.replace(record, is_claimed=bool(holder), deliveries=lease.deliveries, holder=holder)

    def encoded(self) -> bytes:
        """A terminal record as a reply carries it."""
        return encode_result(self.state, self.result)


def with_rating(sums: bytes, quality: float) -> bytes:
    """The sums of a version with one more quality, as rate.lua keeps them."""
    count, mean, m2 = (float(part) for part in (sums or b"0 0 0").split())
    delta = quality - mean
    mean += delta / (count + 1)
    return b"%d %.17g %.17g" % (count + 1, mean, m2 + delta * (quality - mean))


def record_of(job: Publication, entry_id: bytes, expires_ms: int) -> StoredRecord:
    """The record of a job that has been accepted."""
    return StoredRecord(
        job.tenant, job.priority, entry_id, job.reply, job.idempotency_digest, expires_ms, webhook=job.webhook
    )
