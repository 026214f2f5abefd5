"""JobListener: the interface between the drain and Celery. The drain reports the steps of its jobs to it.

The drain calls a listener on its I/O thread, once per batch. A listener must neither block nor raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure, JobHeader

__all__ = ["Ended", "Failed", "JobListener", "NullListener"]


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The end of one job. `runtime_s`: seconds from the start of its batch to its result. `version`: the model version
    that answered. `exception`: the class of what a model raised; empty: its failure has no other name than its code."""

    header: JobHeader
    state: State
    runtime_s: float
    error: Failure | None
    version: str
    exception: str = ""


class Failed(msgspec.Struct, frozen=True, gc=False):
    """A failed forward of a job that will run again."""

    header: JobHeader
    error: Failure


class JobListener(Protocol):
    """Is called at each step of a job in a worker. `at` is unix time in seconds."""

    def received(self, jobs: Sequence[JobHeader], at: float) -> None:
        """These jobs were claimed."""

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        """These jobs are about to run, or were answered without a forward."""

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        """These jobs are committed, however they ended."""

    def completed(self, jobs: Sequence[JobHeader], runtime_s: float, version: str, at: float) -> None:
        """These jobs of one batch are committed, each with outputs; see Ended. For them `finished` is not called."""

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        """These jobs failed, and will run again after a pause."""

    @property
    def has_revoked(self) -> bool:
        """Whether any job was revoked through the listener."""

    def is_revoked(self, job_id: str) -> bool:
        """Whether the job was revoked through the listener. Called once per claimed job, if any was revoked."""


class NullListener:
    """Ignores every step, and revokes no job."""

    def received(self, jobs: Sequence[JobHeader], at: float) -> None:
        """See JobListener. Does nothing."""

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        """See JobListener. Does nothing."""

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        """See JobListener. Does nothing."""

    def completed(self, jobs: Sequence[JobHeader], runtime_s: float, version: str, at: float) -> None:
        """See JobListener. As `finished` for each of them."""
        self.finished([Ended(job, State.COMPLETED, runtime_s, None, version) for job in jobs], at)

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        """See JobListener. Does nothing."""

    @property
    def has_revoked(self) -> bool:
        """See JobListener. False."""
        return False

    def is_revoked(self, job_id: str) -> bool:
        """See JobListener. Returns False."""
        return False
