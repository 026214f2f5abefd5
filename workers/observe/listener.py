"""What the drain tells whoever watches it, and what it asks them: the seam between the drain and Celery.

The drain calls a watcher on its I/O thread, once per batch: a watcher neither blocks nor raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure, JobHeader

__all__ = ["Ended", "Failed", "NullListener", "JobListener"]


class Ended(msgspec.Struct, frozen=True, gc=False):
    """How one job ended: `runtime_s` is its share of the wall-clock, from the start of its batch to its result;
    `version` is the model version that answered."""

    header: JobHeader
    state: State
    runtime_s: float
    error: Failure | None
    version: str


class Failed(msgspec.Struct, frozen=True, gc=False):
    """A forward that failed, of a job that will have another one."""

    header: JobHeader
    error: Failure


class JobListener(Protocol):
    """Told of every job's way through a worker. `at` is unix time in seconds."""

    def received(self, jobs: Sequence[JobHeader], at: float) -> None:
        """These jobs were claimed."""

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        """These jobs are about to run, or were answered without running."""

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        """These jobs are committed."""

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        """These jobs failed, and will run again after a pause."""

    def is_revoked(self, job_id: str) -> bool:
        """Whether somebody withdrew the job through the watcher; asked once per claimed job."""


class NullListener:
    """The watcher of a drain that nobody watches."""

    def received(self, jobs: Sequence[JobHeader], at: float) -> None:
        """Nothing to tell anybody."""

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        """Nothing to tell anybody."""

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        """Nothing to tell anybody."""

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        """Nothing to tell anybody."""

    def is_revoked(self, job_id: str) -> bool:
        """Nobody withdraws anything here."""
        return False
