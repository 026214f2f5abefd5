"""Reference samples: a bounded sample of served jobs, with which candidates are compared.

    every committed job -> wants(job id)? -> offer(inputs, outputs) -> goldens() <-> golden_archive.py

Until the sample is full, each job is wanted that differs in its inputs from those kept. From then on one job of 256 is
looked at, by the hash of its id: no random numbers on the job path. Producers choose the ids of jobs; the seed keeps
them from choosing the sample. A full sample changes in two ways, both at a bounded rate:

    balance   a job of a rare stratum takes the place of the oldest one of the largest stratum
    refresh   of the other jobs that are looked at, every 32nd takes the place of the oldest one of its own stratum

A stratum is a size of inputs, in powers of two, with a label of the outputs. A job with a text that redaction would
change is not kept: with the changed text the model would give another answer. Pure: no clock, no file.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from penstock.registry.tensors import Array, encode
from penstock.safety.privacy import InputRedactor

__all__ = ["Golden", "GoldenStore", "input_digest"]

_LARGEST_SHARE: Final = 8
"""One job may take at most this part of the bytes: a few huge jobs are no sample."""
_MOST_MISSES: Final = 16
"""For each job of the sample so many may be refused before few jobs are looked at: where most jobs have personal data
or equal inputs, the sample stays small."""
_MOST_TEXT_BYTES: Final = 1 << 16
"""Jobs with more text are not searched for personal data, and not kept: the thread of the drain would wait."""
_ALL: Final = 1 << 32
"""Greater than every hash."""
_FEW: Final = _ALL >> 8
"""One job of 256."""
_REFRESH_EVERY: Final = 32
_MOST_CLASSES: Final = 64
_LONGEST_LABEL: Final = 32
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Golden:
    """One job's inputs and outputs. digest: of the inputs, 32 hex digits. stratum: `2^<size> <label>`."""

    job_id: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    nbytes: int
    digest: str
    stratum: str

    @property
    def rows(self) -> int:
        """The rows of its first output."""
        return len(next(iter(self.outputs.values()), ()))


class GoldenStore:
    """A bounded sample of served jobs. One thread offers, any thread reads.

    seed: 32 bits that producers do not know. redactor: keeps jobs out whose texts it would change.
    """

    def __init__(
        self, max_jobs: int = 64, max_bytes: int = 8 << 20, seed: int = 0, redactor: InputRedactor | None = None
    ) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._seed = seed
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Golden] = OrderedDict()
        """By digest, oldest first."""
        self._strata: dict[str, int] = {}
        """Stratum -> its jobs in the sample."""
        self._redactor = redactor
        self._nbytes = 0
        self._rows = 0
        self._misses = 0
        self._passed_over = 0
        """Jobs that were looked at and left out since the last refresh."""
        self._below = _ALL
        """Jobs are looked at whose hash is below this."""

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

    @property
    def strata(self) -> dict[str, int]:
        """Stratum -> its jobs in the sample."""
        with self._lock:
            return dict(self._strata)

    def wants(self, job_id: str) -> bool:
        """Whether the job is looked at. Costs a fraction of a microsecond."""
        return zlib.crc32(job_id.encode(), self._seed) < self._below

    def offer(self, job_id: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> bool:
        """Keeps copies of a job, in place of others if necessary.

        Returns False if it is not wanted, is too large, has personal data or inputs that are kept already, or if the
        sample has enough of its kind.
        """
        if not self.wants(job_id):
            return False
        values = (*inputs.values(), *outputs.values())
        nbytes = sum(map(_size, values))
        is_unfit = nbytes * _LARGEST_SHARE > self._max_bytes
        if is_unfit or (self._redactor is not None and _has_personal_data(self._redactor, values)):
            return self._miss()
        digest, stratum = input_digest(inputs), _stratum(inputs, outputs)
        with self._lock:
            is_known = digest in self._kept
            if is_known or not self._makes_room(nbytes, stratum):
                return self._miss()
            self._add(Golden(job_id, _copied(inputs), _copied(outputs), nbytes, digest, stratum))
        return True

    def goldens(self) -> list[Golden]:
        """The sample, oldest first."""
        with self._lock:
            return list(self._kept.values())

    def clear(self) -> None:
        """Empties the sample."""
        with self._lock:
            self._kept.clear()
            self._strata.clear()
            self._nbytes = self._rows = self._misses = self._passed_over = 0
            self._below = _ALL

    def _miss(self) -> bool:
        self._misses += 1
        if self._misses >= _MOST_MISSES * self._max_jobs:
            self._below = _FEW
        return False

    def _makes_room(self, nbytes: int, stratum: str) -> bool:
        """Whether a job of this stratum may come in; removes those whose place it takes."""
        if self._has_room(nbytes):
            return True
        self._below = _FEW
        largest = max(self._strata, key=self._strata.__getitem__)
        own = self._strata.get(stratum, 0)
        if own + 1 >= self._strata[largest]:
            self._passed_over += 1
            if self._passed_over < _REFRESH_EVERY:
                return False
            self._passed_over = 0
            largest = stratum if own else largest
        self._remove_oldest(largest)
        while not self._has_room(nbytes):
            self._remove_oldest(max(self._strata, key=self._strata.__getitem__))
        return True

    def _has_room(self, nbytes: int) -> bool:
        return len(self._kept) < self._max_jobs and self._nbytes + nbytes <= self._max_bytes

    def _add(self, golden: Golden) -> None:
        self._kept[golden.digest] = golden
        self._strata[golden.stratum] = self._strata.get(golden.stratum, 0) + 1
        self._nbytes += golden.nbytes
        self._rows += golden.rows
        if len(self._kept) >= self._max_jobs:
            self._below = _FEW

    def _remove_oldest(self, stratum: str) -> None:
        golden = next(golden for golden in self._kept.values() if golden.stratum == stratum)
        del self._kept[golden.digest]
        self._strata[stratum] -= 1
        if not self._strata[stratum]:
            del self._strata[stratum]
        self._nbytes -= golden.nbytes
        self._rows -= golden.rows


def input_digest(inputs: Mapping[str, Array]) -> str:
    """32 hex digits: equal for inputs with equal names, dtypes, shapes and elements."""
    described, body = encode(dict(sorted(inputs.items())))
    hashed = hashlib.blake2b(msgspec.msgpack.encode(described), digest_size=_DIGEST_BYTES)
    hashed.update(body)
    return hashed.hexdigest()


def _stratum(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> str:
    size = sum(map(_size, inputs.values()))
    label = next((found for values in outputs.values() if (found := _label(values))), "")
    return f"2^{size.bit_length()} {label}".rstrip()


def _label(values: Array) -> str:
    """The class of an output's first row: a short text, an integer, or the place of the largest of few numbers."""
    if not values.size or values.ndim > 2:
        return ""
    first = values.reshape(len(values) if values.ndim else 1, -1)[0]
    if values.ndim == 2 and values.dtype.kind == "f" and 1 < values.shape[1] <= _MOST_CLASSES:
        return f"#{int(np.argmax(first))}"
    if first.size != 1 or values.dtype.kind not in "biuO":
        return ""
    label = str(first[0])
    # A long text is no label, and a label must not repeat an input.
    return zlib.crc32(label.encode()).to_bytes(4, "big").hex() if len(label) <= _LONGEST_LABEL else ""


def _has_personal_data(redactor: InputRedactor, arrays: Iterable[Array]) -> bool:
    texts = [values for values in arrays if values.dtype == object]
    return sum(map(_size, texts)) > _MOST_TEXT_BYTES or redactor.changes(texts)


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
