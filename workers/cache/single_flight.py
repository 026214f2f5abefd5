"""Equal jobs that are here at the same time share one forward: the first is the leader, the others follow it.

join --> the job leads, or follows an equal job;  end --> the followers of a job that leads no longer
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.workers.backlog import Waiting
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.version import ServedVersion

__all__ = ["SingleFlight"]


class SingleFlight:
    """The leaders of one worker and their followers, by the digest of their jobs. The I/O thread owns it."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, ClaimedJob] = {}
        self._followers: dict[bytes, list[Waiting]] = {}

    def join(self, job: ClaimedJob, version: ServedVersion) -> bool:
        """Let a job with a digest follow an equal one; False: it leads, or runs by itself.

        The shared answer may be a failure, so only jobs of one tenant with one retry policy share it.
        """
        leader = self._leaders.setdefault(job.digest, job)
        first, header = leader.header, job.header
        if leader is job or (first.tenant, first.options.retry) != (header.tenant, header.options.retry):
            return False
        self._followers.setdefault(job.digest, []).append(Waiting(job, version))
        return True

    def end(self, job: ClaimedJob) -> list[Waiting]:
        """The job leads no longer; returns its followers."""
        if not job.digest or self._leaders.get(job.digest) is not job:
            return []
        del self._leaders[job.digest]
        return self._followers.pop(job.digest, [])

    def end_all(self, jobs: Iterable[ClaimedJob]) -> list[ClaimedJob]:
        """These jobs lead no longer; returns each of them, with its followers behind it."""
        return [each for job in jobs for each in (job, *(follower for follower, _ in self.end(job)))]
