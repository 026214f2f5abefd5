"""The keys under which equal jobs share one answer, for the jobs of a claim; see safety/cache_entry.py.

what is asked: tenant, model, version, description of the inputs, outputs --> hashed once per SharedHeader
the inputs                                                                --> hashed for each job that needs it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.safety.cache_entry import begin_key
from penstock.workers.job import ClaimedJob, SharedHeader

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["JobKeys"]

_MOST: Final = 1024


class JobKeys:
    """Gives the jobs of one worker their digests. The I/O thread owns it.

    isolates_tenants: whether each tenant has answers of its own.
    """

    def __init__(self, *, isolates_tenants: bool) -> None:
        self._isolates_tenants = isolates_tenants
        self._begun: dict[tuple[SharedHeader, str], _Hash] = {}
        """Bounded in number; a header that is remembered is bounded in bytes."""

    def __len__(self) -> int:
        return len(self._begun)

    def begin_all(self, jobs: Sequence[ClaimedJob], label: str) -> None:
        """Let each job compute its digest for the version with this label: its key, see safety/cache_entry.py."""
        shared = begun = None
        for job in jobs:
            if begun is None or shared is None or job.shared is not shared:
                shared = job.shared
                begun = self._begun_for(job, label)
            job.begun_key = begun

    def _begun_for(self, job: ClaimedJob, label: str) -> _Hash:
        shared, tenant = job.shared, job.header.tenant if self._isolates_tenants else ""
        if shared is None:
            return begin_key(job.header, label, tenant=tenant)
        begun = self._begun.get((shared, label))
        if begun is None:
            if len(self._begun) >= _MOST:
                self._begun.clear()
            begun = self._begun[shared, label] = begin_key(job.header, label, tenant=tenant)
        return begun
