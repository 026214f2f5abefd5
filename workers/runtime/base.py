"""The interface between the drain and a model.

    I/O thread   length(job)  -> its cost, for sorting and token budgets
    any thread   prepare(jobs) -> Prepared: rows concatenated in order, text tokenised and padded
    model thread run(prepared) -> outputs, with the rows of all jobs in order
    model thread stream(job, context) -> chunks, then the result

The package's code built the model object, or the framework loaded it. Penstock calls it and never changes it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.registry.package import ModelSpec
from penstock.registry.tensors import Array

__all__ = [
    "Counted",
    "DeadlinePassed",
    "DeviceLost",
    "InstanceLost",
    "Prepared",
    "Runtime",
    "StreamContext",
    "TooLongHere",
    "concatenate",
]


class TooLongHere(Exception):
    """The model of this worker has no room for the job, and that of another one may have.

    num_tokens: how many tokens it needs, at least.
    """

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


class DeviceLost(Exception):
    """The device runs no more forwards of this process: another process must take its place."""


class DeadlinePassed(Exception):
    """The deadline of a job that it bounds to its end has passed: the job ends as expired.

    has_begun: whether the model has computed anything of it.
    """

    def __init__(self, *, has_begun: bool) -> None:
        super().__init__("The deadline of the job has passed")
        self.has_begun = has_begun


class InstanceLost(DeviceLost):
    """The process of one instance ended during a forward: another instance runs the jobs, one by one.

    incident: names that process when crashes are counted.
    """

    def __init__(self, message: str, incident: str) -> None:
        super().__init__(message)
        self.incident = incident


@dataclass(frozen=True, slots=True)
class Prepared:
    """A micro-batch ready for the model thread. Only the runtime that made it reads `payload`."""

    rows: int
    payload: Any
    tokens: int = 0
    """Tokens of the texts; 0 where the model has none."""
    padded_tokens: int = 0
    """Tokens that the forward computes, padding included."""


class StreamContext(Protocol):
    """The job as a streaming entry point sees it."""

    @property
    def job_id(self) -> str:
        """`<model>.<uuid7>`."""

    @property
    def tenant(self) -> str:
        """The tenant of the job."""

    @property
    def is_cancelled(self) -> bool:
        """Whether the entry point should return early. Its return value is then discarded."""

    def progress(self, fraction: float) -> None:
        """Reports the progress of the job to subscribers, from 0 to 1."""


class Runtime(Protocol):
    """One loaded model version. Made by `open_runtime`; `load` comes first, `close` last."""

    @property
    def spec(self) -> ModelSpec:
        """The declarations of the package."""

    @property
    def version(self) -> str:
        """The label of this version."""

    @property
    def content_hash(self) -> str:
        """The SHA-256 of the files that were loaded, 64 hex digits; empty until they are."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the loaded model on the host or the device; 0 where they cannot be counted."""

    @property
    def may_change_threads(self) -> bool:
        """Whether one forward may run on another thread than the one before."""

    def load(self, device: str, threads: int) -> None:
        """Loads the model onto `device` (`cpu` or `cuda[:n]`) from the files that are hashed here, and warms it up.

        `threads`: CPU threads of one forward. For any thread, once. Raises ConfigurationError when the package cannot
        work here, when its files change meanwhile or when its outputs differ from its declaration; ModelNotReady when
        `close` came first. After an error, nothing of the model stays in memory.
        """

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raises InvalidInput for a job that fits the signature but has too many tokens for the model.

        For any thread.
        """

    def length(self, inputs: Mapping[str, Array]) -> int:
        """The relative cost of one row of the job: tokens, characters or extent; 1 where all rows cost the same."""

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Joins jobs, in order, that fit the signature and share a batch key. For any thread.

        Raises ModelNotReady when nothing is loaded, as do `run` and `stream`.
        """

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward; outputs on the host, rows in the order of the jobs, in memory that no later forward writes to.

        Raises OutOfMemory when the batch does not fit the device, DeviceLost when the device runs no more forwards, and
        ModelError when the outputs differ from the declaration: with a row missing, jobs would get the outputs of other
        jobs. Exceptions of the model pass through.
        """

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """Runs one job: yields its chunks and returns its outputs. A model that does not stream yields nothing.

        Exceptions of the model pass through. Raises ModelError when the outputs differ from the declaration.
        """

    def close(self) -> None:
        """Releases the model and its device memory. A load under way releases them when it ends."""


@runtime_checkable
class Counted(Protocol):
    """A part with counters."""

    def counts(self) -> Mapping[str, int]:
        """Name -> count since it was made or loaded. For any thread."""


def concatenate(jobs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The rows of all jobs, in order, in writable arrays."""
    if len(jobs) == 1:
        # Decoded jobs are read-only views of the received bytes, which a dead letter may still need unchanged.
        return {name: values.copy() for name, values in jobs[0].items()}
    return {name: np.concatenate([job[name] for job in jobs]) for name in jobs[0]}
