"""What the clients do around a publication: parcels of jobs for one call, and the broker's answer as an outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from penstock.registry.broker.base import Publication, Receipt
from penstock.registry.envelope import Failure, Keyring, RequestContext, ResultHeader, seal
from penstock.registry.errors import IdempotencyConflict, QueueFull

__all__ = ["accepted", "cancellation", "parcels"]

_PARCEL_JOBS: Final = 256
_PARCEL_BYTES: Final = 1024 * 1024


def cancellation(job_id: str, tenant: str, keyring: Keyring) -> bytes:
    """The sealed result of a job that its producer withdrew."""
    header = ResultHeader(
        id=job_id,
        context=RequestContext(tenant),
        error=Failure("Cancelled", "The job was cancelled before it ran"),
        key=keyring.signing_id,
    )
    return seal("result", header, b"", keyring)


_NO_ROOM: Final = {
    "full": "The queue is full",
    "tenant-full": "The tenant has as many jobs in flight as it may",
    "memory": "The broker is short of memory",
}


def accepted(receipt: Receipt, model: str) -> str:
    """The id of the job that answers for a publication. Raises QueueFull or IdempotencyConflict."""
    if receipt.outcome in ("accepted", "known"):
        return receipt.job_id
    if receipt.outcome == "conflict":
        raise IdempotencyConflict(
            "The idempotency key belongs to a job with another version or other inputs. "
            "Expected the same inputs, or a new key"
        )
    why = _NO_ROOM.get(receipt.outcome, "The queue is full")
    raise QueueFull(
        f"{why} (model {model}). Expected a retry after {receipt.retry_after_s:.2f} s", receipt.retry_after_s
    )


def parcels(jobs: Sequence[Publication]) -> Iterator[Sequence[Publication]]:
    """Cuts jobs of one slot into script calls that hold the server for a moment only."""
    start = size = 0
    for index, job in enumerate(jobs):
        size += len(job.sealed)
        if index > start and (size > _PARCEL_BYTES or index - start == _PARCEL_JOBS):
            yield jobs[start:index]
            start, size = index, len(job.sealed)
    if start < len(jobs):
        yield jobs[start:]
