"""The seam between the drain and a model.

    I/O thread   length(job)  -> what it costs, for sorting and token budgets
    any thread   prepare(jobs) -> Prepared: rows concatenated in order, text tokenised and padded
    model thread run(prepared) -> outputs, with the rows of all jobs in order
    model thread stream(job, context) -> chunks, then the result

The model object is what the package's author built or the framework loaded: it is called, never changed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.registry.package import ModelSpec
from penstock.registry.tensors import Array

__all__ = ["Counted", "DeviceLost", "Prepared", "Runtime", "StreamContext", "concatenate"]


class DeviceLost(Exception):
    """The device works for no forward of this process any more: another process must take its place."""


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
        """Whose job it is."""

    @property
    def is_cancelled(self) -> bool:
        """Whether the entry point should return early; what it returns then is not delivered."""

    def progress(self, fraction: float) -> None:
        """Tells subscribers how far the job is, from 0 to 1."""


class Runtime(Protocol):
    """One loaded model version. Made by `open_runtime`; `load` comes first, `close` last."""

    @property
    def spec(self) -> ModelSpec:
        """What the package declares."""

    @property
    def version(self) -> str:
        """The label of the version that answers."""

    @property
    def content_hash(self) -> str:
        """The SHA-256 of the files that were loaded, 64 hex digits; empty until then."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that the loaded model takes on the host or the device, as far as they can be counted; else 0."""

    def load(self, device: str, threads: int) -> None:
        """Loads the model onto `device` (`cpu` or `cuda[:n]`) from the files that are hashed here, and warms it up.

        `threads`: CPU threads of one forward. For any thread, once. Raises ConfigurationError when the package cannot
        work here, its files change meanwhile or its outputs are not those it declares; ModelNotReady when `close` came
        before the end. Whatever it raises, nothing of the model is left.
        """

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raises InvalidInput for a job that fits the signature and is still too long, in tokens, for the model.

        For any thread.
        """

    def length(self, inputs: Mapping[str, Array]) -> int:
        """What one row of the job costs relative to others: tokens, characters or extent; 1 where all cost alike."""

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Joins jobs that passed the signature and share its batch key, in order. For any thread.

        Raises ModelNotReady when nothing is loaded, as do `run` and `stream`.
        """

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward; outputs on the host, rows in the order of the jobs, in memory that no later forward writes to.

        Raises OutOfMemory when the batch does not fit the device, DeviceLost when nothing will any more, and
        ModelError when the outputs are not those declared, as a missing row would give a job its neighbour's answer.
        What the model raises passes through.
        """

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """Runs one job: yields its chunks and returns its outputs. A model that does not stream yields nothing.

        Whatever the model raises passes through; ModelError when it returns other outputs than it declares.
        """

    def close(self) -> None:
        """Lets go of the model and its device memory; a load that is under way lets go of it when it ends."""


@runtime_checkable
class Counted(Protocol):
    """What counts what it does."""

    def counts(self) -> Mapping[str, int]:
        """The numbers since it was made or loaded, by name. For any thread."""


def concatenate(jobs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The rows of all jobs, in order, in arrays that may be written to."""
    if len(jobs) == 1:
        # Decoded jobs are read-only views of the received bytes, which a dead letter may still need unchanged.
        return {name: values.copy() for name, values in jobs[0].items()}
    return {name: np.concatenate([job[name] for job in jobs]) for name in jobs[0]}
