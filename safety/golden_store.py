"""Reference samples: a bounded sample of served jobs, with which candidates are compared.

    every committed job -> wants(job id)? -> offer(inputs, outputs) -> goldens()

The sample keeps the jobs whose ids have the lowest hashes. It is even over time, and needs no random numbers on the
job path. Producers choose the ids of jobs; the seed keeps them from choosing the sample. The sample is held in memory
only, with a fixed limit of jobs and bytes.
"""

from __future__ import annotations

import threading
import zlib
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.registry.tensors import Array

__all__ = ["Golden", "GoldenStore"]

_LARGEST_SHARE: Final = 8
"""One job may take at most this part of the bytes: a few huge jobs are no sample."""
_ALL: Final = 1 << 32
"""Greater than every hash."""


@dataclass(frozen=True, slots=True)
class Golden:
    """One job's inputs and outputs."""

    job_id: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    nbytes: int

    @property
    def rows(self) -> int:
        """The rows of its first output."""
        return len(next(iter(self.outputs.values()), ()))


class GoldenStore:
    """A bounded sample of served jobs. One thread offers, any thread reads.

    seed: 32 bits that producers do not know. Stores with the same seed keep the same jobs.
    """

    def __init__(self, max_jobs: int = 64, max_bytes: int = 8 << 20, seed: int = 0) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._seed = seed
        self._lock = threading.Lock()
        self._kept: list[tuple[int, str, Golden]] = []
        """Ordered by hash."""
        self._nbytes = 0
        self._rows = 0
        self._below = _ALL
        """The sample takes only jobs whose hash is below this."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def rows(self) -> int:
        """The rows of the sample."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """The bytes of the sample."""
        return self._nbytes

    def wants(self, job_id: str) -> bool:
        """Whether the job's id is in the sample. Costs a fraction of a microsecond."""
        return self._rank(job_id) < self._below

    def offer(self, job_id: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> bool:
        """Keeps copies of a job, in place of others if necessary. Returns False if it is too large or already kept."""
        nbytes = sum(map(_size, (*inputs.values(), *outputs.values())))
        if nbytes * _LARGEST_SHARE > self._max_bytes:
            return False
        rank = self._rank(job_id)
        with self._lock:
            if rank >= self._below or any(known == job_id for _, known, _ in self._kept):
                return False
            golden = Golden(job_id, _copied(inputs), _copied(outputs), nbytes)
            insort(self._kept, (rank, job_id, golden))
            self._nbytes += nbytes
            self._rows += golden.rows
            self._evict()
        return True

    def goldens(self) -> list[Golden]:
        """The sample, in the order of the hashes."""
        with self._lock:
            return [golden for _, _, golden in self._kept]

    def clear(self) -> None:
        """Empties the sample."""
        with self._lock:
            self._kept.clear()
            self._nbytes = self._rows = 0
            self._below = _ALL

    def _rank(self, job_id: str) -> int:
        return zlib.crc32(job_id.encode(), self._seed)

    def _evict(self) -> None:
        while len(self._kept) > self._max_jobs or self._nbytes > self._max_bytes:
            rank, _, golden = self._kept.pop()
            self._nbytes -= golden.nbytes
            self._rows -= golden.rows
            # A hash that was pushed out must not return later: the sample would prefer late jobs.
            self._below = rank
        if len(self._kept) == self._max_jobs:
            self._below = min(self._below, self._kept[-1][0])


def _size(values: Array) -> int:
    if values.dtype != object:
        return values.nbytes
    return sum(len(text.encode()) for text in values.ravel().tolist())


def _copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    # A view would keep the whole message or the outputs of the whole batch in memory.
    copies = {name: values.copy() for name, values in arrays.items()}
    for values in copies.values():
        values.flags.writeable = False
    return copies
