"""The seam to workers/levels/, which makes loaded models faster. Only plain values cross it.

a version is loaded -> Tuner.attach -> Observer
a batch has ended   -> Observer.observe(BatchObservation)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from penstock.registry.tensors import Array
from penstock.workers.runtime.base import Runtime

__all__ = ["AnsweredJob", "BatchObservation", "NullTuner", "Observer", "Tuner"]


class AnsweredJob(NamedTuple):
    """One answered job of a batch, with its outputs."""

    job_id: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


class BatchObservation(NamedTuple):
    """The size and the time of one batch. seconds: its forward with the preparation."""

    rows: int
    tokens: int
    seconds: float
    answered: Callable[[Callable[[str], bool]], Iterable[AnsweredJob]]
    """Gives its jobs whose ids are wanted, in order, without those that failed. Only these are decoded and cut out."""
    generation: int = 0
    """Of the model's form when the batch was made; see Forms.generation."""


class Observer(Protocol):
    """Learns from the batches of one loaded version."""

    @property
    def row_limit(self) -> int:
        """The most rows of the next batches; 0: as the policy says. Any thread may change it."""

    def observe(self, batch: BatchObservation) -> None:
        """Note one batch, within microseconds: the thread that claims and commits calls this."""


class Tuner(Protocol):
    """Observes loaded versions and changes the form in which they run."""

    def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Observer | None:
        """A version was loaded; its batches have at most `max_rows` rows. Returns the observer of its batches."""

    def detach(self, key: Hashable) -> None:
        """The version will be unloaded now."""

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Model -> an entry for each attached version, as plain data."""


class NullTuner:
    """Leaves every model in its eager form."""

    def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Observer | None:
        """Observes nothing."""
        return None

    def detach(self, key: Hashable) -> None:
        """Does nothing."""

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Has no entries."""
        return {}
