"""Finds the worker for a job that names a version, if the version is not here.

find --> a version    it is here now, or can be loaded here
     |-> a label      another worker has it under this label; or this worker has it and its queue is full
     |-> a failure    no live worker has it
     '-> None         no worker has reported it so far; until the search has lasted long enough, the job waits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.registry.envelope import Failure
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.token_limits import receiver_of
from penstock.workers.versions.version import ServedVersion, VersionState

__all__ = ["Placement"]

_LOOK_AGAIN_S: Final = 0.25
"""Between two searches for the versions of waiting jobs."""


class Placement:
    """Decides where jobs go; it holds none. The I/O thread owns it.

    most_waiting: further jobs fail at once while more than these wait. clock: monotonic seconds.
    """

    def __init__(
        self, lifecycle: ModelLifecycle, peers: Peers, clock: Callable[[], float], *, most_waiting: int
    ) -> None:
        self._lifecycle = lifecycle
        self._peers = peers
        self._clock = clock
        self._most_waiting = most_waiting
        self._search_at = 0.0

    def look(self) -> bool:
        """Read the reports of other workers; returns whether to search again for the waiting jobs."""
        self._peers.look()
        if (now := self._clock()) < self._search_at:
            return False
        self._search_at = now + _LOOK_AGAIN_S
        return True

    def find(self, job: ClaimedJob, *, waiting: int, arm: str = "") -> ServedVersion | str | Failure | None:
        """See the module. waiting: unplaced jobs of this worker. arm: the content of the arm that answers a job that
        names no version.
        """
        name, named = job.header.model, arm or job.header.version
        version = self._lifecycle.named(name, named)
        is_offered = version is not None and self._lifecycle.offers.is_offered(version)
        if version is not None and is_offered:
            return version if version.room > 0 else version.label
        if label := self._peers.label_of(name, named):
            return label
        if version is not None and version.state is VersionState.COLD and self._lifecycle.offers.may_be_loaded(version):
            # Only memory is missing: the least recently used version can be unloaded.
            return version
        if self._peers.is_nowhere(name, named) or waiting > self._most_waiting:
            return self.not_served(job)
        return None

    def receiver_with_room(self, version: ServedVersion, num_tokens: int) -> str:
        """The receiver of a job of so many tokens, which is too long for this worker; empty: for the others, too."""
        self._peers.look()
        most = self._peers.most_tokens(version.name, version.label)
        return receiver_of(version.label, most) if most >= num_tokens else ""

    def not_served(self, job: ClaimedJob) -> Failure:
        """The failure of a job whose version no live worker has."""
        name, named = job.header.model, job.header.version
        version = self._lifecycle.named(name, named)
        if version is not None and version.state is VersionState.FAILED:
            return Failure("ModelError", f"Version {named:.80} cannot be loaded. {version.problem}")
        why = ", and no operator has registered, promoted or requested this content" if version is not None else ""
        served = ", ".join(sorted({*self._lifecycle.offers.offered(name), *self._peers.labels(name)}))
        message = f"Version {named:.80} is not served by any live worker{why}. Expected one of: {served or 'none'}"
        return Failure("ModelError", message)
