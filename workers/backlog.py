"""Every job in memory that has not begun, with the reason why it waits.

    pending    before the batcher of its version; a batch that waits for a model thread returns here when it is recalled
    suspect    a process died while the job ran: it waits until it can run alone
    delayed    between two tries of its retry policy
    unplaced   names a version that is not here: it waits until a worker with that version is found
    sought     its answer is looked up in the tiers of the cache behind the memory

A follower waits behind its leader (SingleFlight), so it stands in none of these.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from penstock.workers.job import ClaimedJob
from penstock.workers.versions.version import ServedVersion, VersionState

__all__ = ["Assigned", "Backlog", "Waiting"]


class Waiting(NamedTuple):
    """A job that has not begun, and the version that will run it; None for an unplaced job."""

    job: ClaimedJob
    version: ServedVersion | None


class Assigned(NamedTuple):
    """A suspect or a delayed job, and the version that will run it."""

    job: ClaimedJob
    version: ServedVersion


class Backlog:
    """The I/O thread owns it; other threads may iterate over it.

    versions: all versions of this worker, whose batchers hold the pending jobs.
    """

    def __init__(self, versions: deque[ServedVersion]) -> None:
        self._versions = versions
        self._suspects: deque[tuple[ServedVersion, ClaimedJob]] = deque()
        self._delayed: list[tuple[float, int, ServedVersion, ClaimedJob]] = []
        """A heap by the time at which each job is due."""
        self._unplaced: list[ClaimedJob] = []
        """Those for which no search was made yet."""
        self._searched: list[ClaimedJob] = []
        """Unplaced jobs for which a search found no worker so far."""
        self._sought: dict[ClaimedJob, ServedVersion] = {}
        self._delays = 0

    def __iter__(self) -> Iterator[ClaimedJob]:
        """A snapshot of the jobs that could run now: all but the delayed ones."""
        pending = [item.job for version in tuple(self._versions) for item in version.queue.batcher.pending()]
        suspects = [job for _, job in tuple(self._suspects)]
        return iter([*pending, *suspects, *tuple(self._unplaced), *tuple(self._searched), *tuple(self._sought)])

    # In

    def add(self, version: ServedVersion, jobs: Sequence[ClaimedJob]) -> None:
        """These jobs are pending, in their order of arrival."""
        version.queue.add(version.pending(jobs))

    def add_suspect(self, version: ServedVersion, job: ClaimedJob) -> None:
        """The job must run alone."""
        version.queue.reserve(job)
        self._suspects.append((version, job))

    def delay(self, version: ServedVersion, job: ClaimedJob, due: float) -> None:
        """The job waits until `due`, in monotonic seconds. Meanwhile it takes no room."""
        version.queue.release(job)
        self._delays += 1
        heapq.heappush(self._delayed, (due, self._delays, version, job))

    def add_unplaced(self, jobs: Iterable[ClaimedJob], *, is_searched: bool = False) -> None:
        """The version that these jobs name is not here. is_searched: no worker is known to have it."""
        if is_searched:
            self._searched += jobs
        else:
            self._unplaced += jobs

    def add_sought(self, version: ServedVersion, jobs: Iterable[ClaimedJob]) -> None:
        """The answers to these jobs are looked up. If there is none, this version will run them."""
        for job in jobs:
            version.queue.reserve(job)
            self._sought[job] = version

    # Out

    def take(self, is_meant: Callable[[ClaimedJob], bool] = lambda _: True) -> list[Waiting]:
        """Take out every job for which `is_meant` is true, whatever it waits for. Their room is free afterwards."""
        taken: list[Waiting] = []
        for version in self._versions:
            taken += [
                Waiting(item.job, version) for item in version.queue.batcher.discard(lambda item: is_meant(item.job))
            ]
        taken += [Waiting(*suspect) for suspect in self._take_suspects(lambda _version, job: is_meant(job))]
        taken += [Waiting(job, version) for _, _, version, job in self._delayed if is_meant(job)]
        taken += [Waiting(job, None) for job in (*self._unplaced, *self._searched) if is_meant(job)]
        taken += [Waiting(*sought) for sought in self._take_sought(lambda _version, job: is_meant(job))]
        gone = frozenset(id(waiting.job) for waiting in taken)
        self._delayed = [entry for entry in self._delayed if id(entry[3]) not in gone]
        heapq.heapify(self._delayed)
        self._unplaced = [job for job in self._unplaced if id(job) not in gone]
        self._searched = [job for job in self._searched if id(job) not in gone]
        for job, holder in taken:
            if holder is not None:
                holder.queue.release(job)
        return taken

    def take_models(self, models: frozenset[str]) -> list[Waiting]:
        """Take out the jobs of these models, except the delayed ones. Their room is free afterwards."""
        taken: list[Waiting] = []
        for version in [version for version in self._versions if version.name in models]:
            taken += self.take_version(version)
        taken += [Waiting(job, None) for job in (*self._unplaced, *self._searched) if job.delivery.slot in models]
        self._unplaced = [job for job in self._unplaced if job.delivery.slot not in models]
        self._searched = [job for job in self._searched if job.delivery.slot not in models]
        return taken

    def take_stranded(self) -> list[Assigned]:
        """Take out the suspects whose version was unloaded, or failed to load, while they waited.

        Their room is free afterwards. A version with suspects counts as idle, so it may be unloaded.
        """
        if not self._suspects:
            return []
        stranded = (VersionState.COLD, VersionState.FAILED)
        taken = self._take_suspects(lambda version, _job: version.state in stranded)
        for job, version in taken:
            version.queue.release(job)
        return taken

    def take_version(
        self, version: ServedVersion, is_meant: Callable[[ClaimedJob], bool] = lambda _: True
    ) -> list[Waiting]:
        """Take out the pending jobs, the suspects and the sought jobs of one version for which `is_meant` is true.

        Their room is free afterwards.
        """
        taken = [Waiting(item.job, version) for item in version.queue.batcher.discard(lambda item: is_meant(item.job))]
        taken += [
            Waiting(*each) for each in self._take_suspects(lambda holder, job: holder is version and is_meant(job))
        ]
        taken += [Waiting(*each) for each in self._take_sought(lambda holder, job: holder is version and is_meant(job))]
        for job, _ in taken:
            version.queue.release(job)
        return taken

    def take_expired(self, version: ServedVersion, broker_now: float) -> list[Waiting]:
        """Take out the pending jobs, the suspects and the sought jobs of one version whose time has passed. They keep
        their room until they end.
        """

        def is_late(holder: ServedVersion, job: ClaimedJob) -> bool:
            return holder is version and broker_now > job.expires_ms

        late = version.queue.batcher.discard(lambda item: broker_now > item.job.expires_ms)
        others = (*self._take_suspects(is_late), *self._take_sought(is_late))
        return [*(Waiting(item.job, version) for item in late), *(Waiting(*each) for each in others)]

    def take_sought(self, jobs: Iterable[ClaimedJob]) -> list[ClaimedJob]:
        """Take out those of these jobs that are still sought. They keep their room."""
        return [job for job in jobs if self._sought.pop(job, None) is not None]

    def _take_sought(self, is_meant: Callable[[ServedVersion, ClaimedJob], bool]) -> list[Assigned]:
        if not self._sought:
            return []
        taken = [Assigned(job, version) for job, version in self._sought.items() if is_meant(version, job)]
        for job, _ in taken:
            del self._sought[job]
        return taken

    def _take_suspects(self, is_meant: Callable[[ServedVersion, ClaimedJob], bool]) -> list[Assigned]:
        if not self._suspects:
            return []
        taken = [Assigned(job, version) for version, job in self._suspects if is_meant(version, job)]
        self._suspects = deque(entry for entry in self._suspects if not is_meant(*entry))
        return taken

    def take_due(self, now: float) -> list[Assigned]:
        """Take out the delayed jobs whose pause is over."""
        taken = []
        while self._delayed and self._delayed[0][0] <= now:
            _, _, version, job = heapq.heappop(self._delayed)
            taken.append(Assigned(job, version))
        return taken

    def take_unplaced(self, *, with_searched: bool) -> list[ClaimedJob]:
        """Take out the unplaced jobs: the new ones, or all."""
        jobs, self._unplaced = self._unplaced, []
        if with_searched:
            jobs += self._searched
            self._searched = []
        return jobs

    def pop_suspect(self) -> tuple[ServedVersion, ClaimedJob]:
        """Take out the suspect that has waited longest. Raises IndexError without one."""
        return self._suspects.popleft()

    # Counts

    @property
    def suspects(self) -> int:
        """Suspects that wait."""
        return len(self._suspects)

    @property
    def has_ready_suspects(self) -> bool:
        """Whether the version of a suspect is loaded, so that it can run."""
        return any(version.is_ready for version, _ in self._suspects)

    @property
    def delayed(self) -> int:
        """Delayed jobs."""
        return len(self._delayed)

    @property
    def delayed_bytes(self) -> int:
        """Bytes of the sealed delayed jobs."""
        return sum(len(job.delivery.sealed) for _, _, _, job in self._delayed)

    @property
    def has_unplaced(self) -> bool:
        """Whether there are unplaced jobs."""
        return bool(self._unplaced or self._searched)

    @property
    def searched(self) -> int:
        """Unplaced jobs whose version no worker is known to have."""
        return len(self._searched)

    @property
    def next_due(self) -> float:
        """When the next delayed job is due, in monotonic seconds; infinite without one."""
        return self._delayed[0][0] if self._delayed else inf
