"""Equal jobs that are here at the same time share one forward: the first is the leader, the others follow it.

join_all --> each job leads, or follows an equal job;  end --> the followers of a job that leads no longer
lead_all --> jobs that are equal to no other lead, and nobody asks for their digests until `join_all` is called
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from penstock.workers.backlog import Waiting
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.version import ServedVersion

__all__ = ["SingleFlight"]


class SingleFlight:
    """The leaders of one worker and their followers, by the digest of their jobs. The I/O thread owns it."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, ClaimedJob] = {}
        self._followers: dict[bytes, list[Waiting]] = {}
        self._alone: dict[ClaimedJob, None] = {}
        """Leaders whose digests nobody has asked for, in order."""
        self._first_expires_ms = inf
        """No follower expires before it."""

    def lead_all(self, jobs: Iterable[ClaimedJob]) -> None:
        """Let these jobs lead: no other one that is here is equal to one of them."""
        self._alone.update(dict.fromkeys(jobs))

    def join_all(self, jobs: Iterable[ClaimedJob], version: ServedVersion) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
        """Let each job with a digest follow an equal one; returns those that lead or run by themselves, and the rest.

        Only jobs of one tenant share an answer. A failure is not shared.
        """
        self._name_leaders()
        leading: list[ClaimedJob] = []
        following: list[ClaimedJob] = []
        leader_of = self._leaders.setdefault
        for job in jobs:
            leader = leader_of(job.digest, job)
            if leader is job or not _may_share(leader, job):
                leading.append(job)
            else:
                self._followers.setdefault(job.digest, []).append(Waiting(job, version))
                self._first_expires_ms = min(self._first_expires_ms, job.expires_ms)
                following.append(job)
        return leading, following

    def followers_of(self, jobs: Iterable[ClaimedJob]) -> dict[ClaimedJob, Sequence[Waiting]]:
        """The followers of those of these jobs that have any."""
        if not self._followers:
            return {}
        return {
            job: followers
            for job in jobs
            if (followers := self._followers.get(job.digest)) and self._leaders.get(job.digest) is job
        }

    def may_have_late(self, broker_now: float) -> bool:
        """Whether the time of a follower may have passed, by the broker's clock. It is asked in every turn."""
        return broker_now > self._first_expires_ms

    def take_followers(
        self, is_meant: Callable[[ClaimedJob, ClaimedJob], bool], *, looked_at_ms: float = -inf
    ) -> list[Waiting]:
        """Take out the followers for which `is_meant(leader, follower)` is true. Their leaders go on.

        looked_at_ms: those whose time had passed by then count no more for `may_have_late`.
        """
        taken: list[Waiting] = []
        for digest, followers in [*self._followers.items()]:
            leader = self._leaders[digest]
            meant = [waiting for waiting in followers if is_meant(leader, waiting.job)]
            if not meant:
                continue
            taken += meant
            gone = {id(waiting) for waiting in meant}
            if left := [waiting for waiting in followers if id(waiting) not in gone]:
                self._followers[digest] = left
            else:
                del self._followers[digest]
        left_ms = (waiting.job.expires_ms for followers in self._followers.values() for waiting in followers)
        self._first_expires_ms = min((each for each in left_ms if each >= looked_at_ms), default=inf)
        return taken

    def end(self, job: ClaimedJob) -> list[Waiting]:
        """The job leads no longer; returns its followers."""
        if job in self._alone:
            del self._alone[job]
            return []
        if not job.digest or self._leaders.get(job.digest) is not job:
            return []
        del self._leaders[job.digest]
        return self._followers.pop(job.digest, [])

    def end_all(self, jobs: Iterable[ClaimedJob]) -> list[ClaimedJob]:
        """These jobs lead no longer; returns each of them, with its followers behind it."""
        leaders, followers, alone = self._leaders, self._followers, self._alone
        if not leaders:
            # Nobody follows either.
            together = [*jobs]
            for job in together:
                alone.pop(job, None)
            return together
        together = []
        for job in jobs:
            together.append(job)
            if job in alone:
                del alone[job]
            elif leaders.get(job.digest) is job:
                del leaders[job.digest]
                if followers:
                    together += [follower for follower, _ in followers.pop(job.digest, ())]
        return together

    def _name_leaders(self) -> None:
        """Each leader has its digest from here on."""
        for job in self._alone:
            self._leaders.setdefault(job.digest, job)
        self._alone.clear()


def _may_share(leader: ClaimedJob, job: ClaimedJob) -> bool:
    if leader.shared is job.shared is not None:
        return True
    return leader.header.tenant == job.header.tenant
