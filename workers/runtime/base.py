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
from typing import Any, Protocol

import numpy as np

from registry.errors import ConfigurationError, ModelError
from registry.package import ModelSpec
from registry.tensors import Array

__all__ = ["DeviceLost", "Prepared", "Runtime", "StreamContext", "concatenate", "stream_whole", "warm_up"]


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
        """The model version that answers."""

    def load(self, device: str, threads: int) -> None:
        """Loads the model onto `device` (`cpu` or `cuda[:n]`) and runs it once.

        `threads`: CPU threads of one forward. Raises ConfigurationError when the package cannot work here or its
        outputs are not those it declares.
        """

    def length(self, inputs: Mapping[str, Array]) -> int:
        """What one row of the job costs relative to others: tokens, characters or extent; 1 where all cost alike."""

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Joins jobs that passed the signature and share its batch key, in order. For any thread."""

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward; outputs on the host, rows in the order of the jobs.

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
        """Lets go of the model and its device memory."""


def concatenate(jobs: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The rows of all jobs, in order, in arrays that may be written to."""
    if len(jobs) == 1:
        # Decoded jobs are read-only views of the received bytes, which a dead letter may still need unchanged.
        return {name: values.copy() for name, values in jobs[0].items()}
    return {name: np.concatenate([job[name] for job in jobs]) for name in jobs[0]}


def stream_whole(runtime: Runtime, inputs: Mapping[str, Array]) -> Generator[dict[str, Array], None, dict[str, Array]]:
    """The stream of a model that does not stream: no chunks, then its outputs."""
    yield from ()
    return runtime.run(runtime.prepare([inputs]))


def warm_up(runtime: Runtime, rows: int = 2) -> None:
    """Runs the model on a small example, which also compares its outputs with those declared.

    Raises ConfigurationError that says what was wrong.
    """
    spec = runtime.spec
    try:
        outputs = runtime.run(runtime.prepare([spec.signature.example(rows)]))
        spec.signature.check_outputs(outputs, rows)
    except ModelError as error:
        raise ConfigurationError(f"{spec.reference}: {error}") from None
    except Exception as error:
        raise ConfigurationError(
            f"{spec.reference}: the first forward failed ({type(error).__name__}: {error!s:.200})"
        ) from error
