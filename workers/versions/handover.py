"""Where a job goes that names a version which is not to be had here.

find --> a version    it is, after all, or can be loaded beside the others
     |-> a label      another worker has it, under this one; or this worker, which has no room
     |-> a failure    no live worker has it
     '-> None         nobody is known to have it, and not for long enough to be sure: the job waits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from penstock.registry.envelope import Failure
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.version import ServedVersion, VersionState

__all__ = ["Placing"]

_LOOK_AGAIN_S: Final = 0.25
"""Between two looks for jobs whose version nobody is known to have."""


class Placing:
    """The jobs that have no place yet. The I/O thread's; any thread may go through them.

    most_waiting: if more wait for somebody to be heard of, the others fail. clock: monotonic seconds.
    """

    def __init__(
        self, lifecycle: ModelLifecycle, peers: Peers, clock: Callable[[], float], *, most_waiting: int
    ) -> None:
        self._lifecycle = lifecycle
        self._peers = peers
        self._clock = clock
        self._most_waiting = most_waiting
        self._fresh: list[ClaimedJob] = []
        self._waiting: list[ClaimedJob] = []
        """Those whose version nobody is known to have."""
        self._look_again_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._fresh or self._waiting)

    def __iter__(self) -> Iterator[ClaimedJob]:
        return iter((*tuple(self._fresh), *tuple(self._waiting)))

    def add(self, jobs: Iterable[ClaimedJob]) -> None:
        """They are to have a place."""
        self._fresh += jobs

    def wait(self, job: ClaimedJob) -> None:
        """It has none now: see `due`."""
        self._waiting.append(job)

    def due(self) -> list[ClaimedJob]:
        """Takes out the jobs that a place is to be found for now: those that are new here, and at times those that
        wait."""
        self._peers.look()
        jobs, self._fresh = self._fresh, []
        if (now := self._clock()) >= self._look_again_at:
            jobs += self._waiting
            self._waiting = []
            self._look_again_at = now + _LOOK_AGAIN_S
        return jobs

    def take_out(self, is_meant: Callable[[ClaimedJob], bool] = lambda _: True) -> list[ClaimedJob]:
        """Those that are meant are no longer among them."""
        found = [job for job in self if is_meant(job)]
        for jobs in (self._fresh, self._waiting):
            jobs[:] = [job for job in jobs if not is_meant(job)]
        return found

    def drop(self, jobs: Iterable[ClaimedJob]) -> None:
        """These are no longer among them."""
        gone = frozenset(map(id, jobs))
        self.take_out(lambda job: id(job) in gone)

    def find(self, job: ClaimedJob) -> ServedVersion | str | Failure | None:
        """See the module."""
        name, named = job.header.model, job.header.version
        version = self._lifecycle.named(name, named)
        is_offered = version is not None and self._lifecycle.is_offered(version)
        if version is not None and is_offered:
            return version if version.room > 0 else version.label
        if label := self._peers.label_of(name, named):
            return label
        if version is not None and version.state is VersionState.COLD and self._lifecycle.may_be_loaded(version):
            # Only memory speaks against it, and whatever was not used for longest can make room.
            return version
        if self._peers.is_nowhere(name, named) or len(self._waiting) > self._most_waiting:
            return self.not_served(job)
        return None

    def not_served(self, job: ClaimedJob) -> Failure:
        """What a job is told whose version no live worker has."""
        name, named = job.header.model, job.header.version
        version = self._lifecycle.named(name, named)
        if version is not None and version.state is VersionState.FAILED:
            return Failure("ModelError", f"Version {named:.80} cannot be loaded. {version.problem}")
        why = ", and no operator has registered, promoted or asked for this content" if version is not None else ""
        served = ", ".join(sorted({*self._lifecycle.offered(name), *self._peers.labels(name)}))
        message = f"Version {named:.80} is not served by any live worker{why}. Expected one of: {served or 'none'}"
        return Failure("ModelError", message)
