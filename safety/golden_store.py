"""Served jobs with their answers, a few of many: what a candidate must answer alike.

    every job that was answered -> wants(job id)? -> offer(inputs, outputs) -> goldens()

Which jobs are kept depends on their ids and a seed alone: of all ids seen those with the lowest hashes, so that the
sample is even over time, and nobody draws lots on the job path. Whoever submits jobs chooses their ids, and must not
choose by that what candidates are judged on: hence the seed. Held in memory only, and never more than a fixed number of
jobs and bytes.
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
"""One job may take this part of the bytes: a few huge ones would be no sample."""
_ALL: Final = 1 << 32
"""Above every hash."""


@dataclass(frozen=True, slots=True)
class Golden:
    """One job's inputs, and the outputs it was given."""

    job_id: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    nbytes: int

    @property
    def rows(self) -> int:
        """Rows of its first output."""
        return len(next(iter(self.outputs.values()), ()))


class GoldenStore:
    """A bounded sample of served jobs. One thread offers, any thread reads.

    seed: 32 bits that those who submit jobs do not know; stores of one seed keep the same of the same jobs.
    """

    def __init__(self, max_jobs: int = 64, max_bytes: int = 8 << 20, seed: int = 0) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._seed = seed
        self._lock = threading.Lock()
        self._kept: list[tuple[int, str, Golden]] = []
        """By ascending hash."""
        self._nbytes = 0
        self._rows = 0
        self._below = _ALL
        """A hash must be below this to be of interest."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def rows(self) -> int:
        """Rows of the jobs that are kept."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return self._nbytes

    def wants(self, job_id: str) -> bool:
        """Whether the job belongs to the sample, as far as its id goes. Costs a fraction of a microsecond."""
        return self._rank(job_id) < self._below

    def offer(self, job_id: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> bool:
        """Keeps copies of a wanted job; False if it is too large or was seen before. May push others out."""
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
            self._push_out()
        return True

    def goldens(self) -> list[Golden]:
        """What is kept, in an order that only the ids decide."""
        with self._lock:
            return [golden for _, _, golden in self._kept]

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._kept.clear()
            self._nbytes = self._rows = 0
            self._below = _ALL

    def _rank(self, job_id: str) -> int:
        return zlib.crc32(job_id.encode(), self._seed)

    def _push_out(self) -> None:
        while len(self._kept) > self._max_jobs or self._nbytes > self._max_bytes:
            rank, _, golden = self._kept.pop()
            self._nbytes -= golden.nbytes
            self._rows -= golden.rows
            # What did not fit once must not come back later: the sample would lean towards the late.
            self._below = rank
        if len(self._kept) == self._max_jobs:
            self._below = min(self._below, self._kept[-1][0])


def _size(values: Array) -> int:
    if values.dtype != object:
        return values.nbytes
    return sum(len(text.encode()) for text in values.ravel().tolist())


def _copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    # Views of the received bytes and of a batch's outputs would keep all of these alive.
    copies = {name: values.copy() for name, values in arrays.items()}
    for values in copies.values():
        values.flags.writeable = False
    return copies
