"""Jobs whose headers are alike, as a worker opens them, and the same jobs as if nothing were known of their headers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import structs

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import JobHeader, Keyring, open_job, seal
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.tensors import encode
from penstock.workers.job import ClaimedJob
from penstock.workers.shared_headers import SharedHeaders

__all__ = ["OpenedJobs", "apart"]

_entries = itertools.count(1)
_TTL_MS = 10**12


class OpenedJobs:
    """Opens jobs of the model `double` at the broker's time of 2 s; those with equal headers share one SharedHeader."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._headers = SharedHeaders(keyring, _TTL_MS)

    def open(
        self, *numbers: float, claimed: float = 0.0, crashes: int = 0, attempt: int = 1, **header: Any
    ) -> ClaimedJob:
        """A job with one row for each number; `header` fills in the envelope."""
        entry = next(_entries)
        content, body = encode({"x": np.array([[number] for number in numbers], np.float32)})
        keys = {"key": self._keyring.signing_id, "is_sealed": self._keyring.seals}
        fields = {"tenant": "acme", "model": "double", "priority": "normal", **keys, **header}
        sealed = seal("job", JobHeader(id=new_job_id("double"), content=content, **fields), body, self._keyring)
        delivery = Delivery("double", Priority.NORMAL, f"{entry}-0".encode(), sealed, crashes=crashes, attempt=attempt)
        job = self._headers.open(delivery, claimed, 2000.0)
        if job is None:
            job = ClaimedJob(
                delivery, *open_job(sealed, self._keyring), 1, claimed, 2000.0 - entry, delivery.accepted_ms + _TTL_MS
            )
            self._headers.learn(job)
        job.rows = len(numbers)
        return job


def apart(jobs: Iterable[ClaimedJob]) -> list[ClaimedJob]:
    """Copies of these jobs which take the way of a job by itself."""
    return [structs.replace(job, shared=None) for job in jobs]
