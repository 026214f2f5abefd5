"""Equal jobs that are here at the same time share one forward: the first is the leader, the others follow it.

join --> the job leads, or follows an equal job;  end --> the followers of a job that leads no longer
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.workers.job import ClaimedJob

__all__ = ["SingleFlight"]


class SingleFlight:
    """The leaders of one worker, by the digest of their jobs. The I/O thread owns it."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, ClaimedJob] = {}

    def join(self, job: ClaimedJob) -> bool:
        """Let a job with a digest follow an equal one; False: it leads, or runs by itself.

        The shared answer may be a failure, so only jobs of one tenant with one retry policy share it.
        """
        leader = self._leaders.setdefault(job.digest, job)
        first, header = leader.header, job.header
        if leader is job or (first.tenant, first.options.retry) != (header.tenant, header.options.retry):
            return False
        leader.followers = [*(leader.followers or ()), job]
        return True

    def end(self, job: ClaimedJob) -> list[ClaimedJob]:
        """The job leads no longer; returns its followers."""
        if job.digest and self._leaders.get(job.digest) is job:
            del self._leaders[job.digest]
        followers, job.followers = job.followers or [], None
        return followers

    def end_all(self, jobs: Iterable[ClaimedJob]) -> list[ClaimedJob]:
        """These jobs lead no longer; returns each of them, with its followers behind it."""
        return [each for job in jobs for each in (job, *self.end(job))]
