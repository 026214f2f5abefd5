"""The keys under which equal jobs share one answer, for the jobs of a claim; see safety/cache_entry.py.

what is asked: tenant, model, version, description of the inputs, outputs --> hashed once per SharedHeader
the inputs --> fingerprint, for each job:            nearly all distinct jobs are told apart by it
           `-> digest, only where it is needed:      jobs are equal if it is, and it is the key of the answer

A fingerprint is Python's own hash of bytes, which a random number of the process keys. It takes a third of the time of
a digest. Two jobs that differ may have the same one, so nothing is shared because of it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.safety.cache_entry import KEY_BYTES, begin_key
from penstock.workers.job import ClaimedJob, SharedHeader

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["JobKeys", "confirm_all"]

_MOST: Final = 1024
_MOST_FINGERPRINTED: Final = 4096
"""Bytes in the middle of an input. Two inputs that are equal there are told apart by their digests."""


class _Begun(NamedTuple):
    """What keys of jobs with equal headers begin with. salt: the same for the fingerprints."""

    state: _Hash
    salt: int


class JobKeys:
    """Gives the jobs of one worker their fingerprints and digests. The I/O thread owns it.

    isolates_tenants: whether each tenant has answers of its own.
    """

    def __init__(self, *, isolates_tenants: bool) -> None:
        self._isolates_tenants = isolates_tenants
        self._begun: dict[tuple[SharedHeader, str], _Begun] = {}
        """Bounded in number; a header that is remembered is bounded in bytes."""

    def __len__(self) -> int:
        return len(self._begun)

    def fingerprint_all(self, jobs: Sequence[ClaimedJob], label: str) -> None:
        """Set the fingerprint of each job for the version with this label."""
        shared = begun = None
        salt = 0
        for job in jobs:
            if begun is None or shared is None or job.shared is not shared:
                shared = job.shared
                begun, salt = self._begun_for(job, label)
            body = job.body
            if len(body) > _MOST_FINGERPRINTED:
                middle = (len(body) - _MOST_FINGERPRINTED) // 2
                body = body[middle : middle + _MOST_FINGERPRINTED]
            job.key_begun, job.digest = begun, b""
            # The hash of a view also hashes all that the view is a part of: a copy takes half of the time.
            job.fingerprint = hash(bytes(body)) ^ salt or 1

    def digest_all(self, jobs: Sequence[ClaimedJob], label: str) -> None:
        """Set the fingerprint and the digest of each job for the version with this label."""
        self.fingerprint_all(jobs, label)
        confirm_all(jobs)

    def _begun_for(self, job: ClaimedJob, label: str) -> _Begun:
        shared = job.shared
        if shared is None:
            return self._new(job, label)
        begun = self._begun.get((shared, label))
        if begun is None:
            if len(self._begun) >= _MOST:
                self._begun.clear()
            begun = self._begun[shared, label] = self._new(job, label)
        return begun

    def _new(self, job: ClaimedJob, label: str) -> _Begun:
        state = begin_key(job.header, label, tenant=job.header.tenant if self._isolates_tenants else "")
        return _Begun(state, hash(state.digest()))


def confirm_all(jobs: Iterable[ClaimedJob]) -> None:
    """Set the digest of each job that has a fingerprint: its key, see safety/cache_entry.py."""
    for job in jobs:
        if not job.digest and job.key_begun is not None:
            state = job.key_begun.copy()
            state.update(job.body)
            job.digest = state.digest()[:KEY_BYTES]
