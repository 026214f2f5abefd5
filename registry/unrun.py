"""Sealed results of jobs that no model ran: cancelled, expired, given up."""

from __future__ import annotations

from typing import Final

from penstock.registry.envelope import Failure, Keyring, RequestContext, ResultHeader, seal

__all__ = ["CANCELLED", "EXPIRED", "unrun_result"]

CANCELLED: Final = Failure("Cancelled", "The job was cancelled before it ran")
EXPIRED: Final = Failure("Expired", "The job's deadline or lifetime had passed before it ran")


def unrun_result(
    job_id: str,
    context: RequestContext,
    failure: Failure,
    keyring: Keyring,
    *,
    worker: str = "",
    key: str | None = None,
) -> bytes:
    """The sealed result. key: the id of the key that signs; None: the first one of the keyring.

    Raises KeyError for a key that the keyring does not have.
    """
    key = keyring.signing_id if key is None else key
    return seal("result", ResultHeader(id=job_id, context=context, worker=worker, error=failure, key=key), b"", keyring)
