"""`as_completed` and `gather` without I/O: which jobs are awaited, and which of them have ended.

    handles -> Awaited -> [client waits for replies and reads records] -> handles in the order of their ends

No job has a thread or a poll of its own: the reply reader tells the ends. After a second of silence the client reads
the records of some of the jobs, as for a single result.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf
from typing import Final, Generic, TypeAlias, TypeVar

from penstock.producers.events import is_end
from penstock.producers.job_state import HandleCore, JobState, checked_timeout
from penstock.registry.broker.base import JobRecord, State, StreamEntry
from penstock.registry.errors import (
    Corrupt,
    InvalidInput,
    JobFailed,
    JobLost,
    ResultGone,
    ResultTimeout,
    UnknownJob,
    described,
)
from penstock.registry.queues import events_key
from penstock.registry.tensors import Array

__all__ = ["ENDS", "FOLLOW_TTL_MS", "MOST_FOLLOWED", "Awaited", "EndedJobs", "Follower", "Gathered", "listed"]

_RENEW_S: Final = 20.0
FOLLOW_TTL_MS: Final = 60_000
"""Three renewals: the longest silence of a subscriber lies between two of them."""
MOST_FOLLOWED: Final = 256
"""Jobs of other clients whose event streams one `as_completed` reads at a time."""
ENDS: Final = (JobFailed, JobLost, ResultGone, UnknownJob, Corrupt)
"""The errors that belong to one job: another call would give the same."""
Gathered: TypeAlias = dict[str, Array] | JobFailed | JobLost | ResultGone | UnknownJob | Corrupt
"""The outputs of a job, or the error in their place."""
Handle = TypeVar("Handle", bound=HandleCore)


class Awaited(Generic[Handle]):
    """The jobs of one call that have not ended, each with its handles.

    client: the client of all handles. timeout: seconds from the first wait. None means no limit.
    """

    def __init__(self, client: object, jobs: Iterable[Handle], timeout: float | None) -> None:
        self._timeout_s = checked_timeout(timeout)
        self._until: float | None = None
        self._handles: dict[str, list[Handle]] = {}
        self._look_at: float | None = None
        self._count = 0
        for job in listed(jobs):
            if not isinstance(job, HandleCore):
                raise InvalidInput(f"Job {self._count} is a {type(job).__name__}. Expected a handle of this client")
            if job._client is not client:
                raise InvalidInput(
                    f"Job {self._count} is a handle of another client. Expected one of this client: client.job(handle)"
                )
            self._handles.setdefault(job.id, []).append(job)
            self._count += 1

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._handles

    @property
    def ids(self) -> list[str]:
        """The jobs that have not ended."""
        return list(self._handles)

    def handles(self) -> list[Handle]:
        """One handle of each job that has not ended."""
        return [handles[0] for handles in self._handles.values()]

    def take(self, job_id: str) -> list[Handle]:
        """The handles of a job that ended; none for a job that is not awaited any more."""
        return self._handles.pop(job_id, [])

    def take_known(self) -> list[Handle]:
        """The handles of the jobs whose end is known already."""
        known = [
            job_id
            for job_id, handles in self._handles.items()
            if any(handle._state.record is not None for handle in handles)
        ]
        return [handle for job_id in known for handle in self.take(job_id)]

    def settle(self, records: Iterable[tuple[str, JobRecord | None]]) -> list[Handle]:
        """The handles of the jobs that have ended by their records. A missing record is an end, too."""
        return [handle for job_id, record in records if self._has_ended(job_id, record) for handle in self.take(job_id)]

    def _has_ended(self, job_id: str, record: JobRecord | None) -> bool:
        if record is None:
            return True
        states = [handle._state for handle in self._handles.get(job_id, ())]
        try:
            has_ended = all([state.accept(record).state is not State.QUEUED for state in states])
        except ENDS:
            # `result` of the handle raises it again.
            return True
        if self._look_at is not None:
            self._look_at = min([self._look_at, *(state.look_at for state in states)])
        return has_ended

    def seconds_left(self, now: float) -> float:
        """The time from `now` until the deadline or the lifetime of the first job passes. `now` is monotonic."""
        if self._look_at is None:
            self._look_at = min((handles[0]._state.look_at for handles in self._handles.values()), default=inf)
        return max(0.0, self._look_at - now)

    def overdue(self, now: float) -> list[Handle]:
        """A handle of each job whose time has passed: its record must be read now."""
        self._look_at = None
        return [handles[0] for handles in self._handles.values() if handles[0]._state.look_at <= now]

    def sample(self, count: int) -> list[str]:
        """Up to `count` of the jobs, others at each call."""
        sampled = list(islice(self._handles, count))
        for job_id in sampled:
            self._handles[job_id] = self._handles.pop(job_id)
        return sampled

    def until(self, now: float) -> float:
        """When the time is up. The first call begins it."""
        if self._until is None:
            self._until = inf if self._timeout_s is None else now + self._timeout_s
        return self._until

    def late(self) -> ResultTimeout:
        """The error for the jobs that have not ended in time."""
        return ResultTimeout(
            f"{len(self)} of {self._count} jobs have not ended within {self._timeout_s or 0:g} s; they go on"
        )


def listed(jobs: Iterable[Handle]) -> list[Handle]:
    """The handles of a call. Raises InvalidInput for a value that is no iterable."""
    try:
        handles = iter(jobs)
    except TypeError:
        raise InvalidInput(f"The jobs are {described(jobs)}. Expected handles of this client, such as [job]") from None
    return list(handles)


class Follower:
    """The wait of one call for jobs that other processes have submitted, as the broker is told of it again and again.

    The submitter of a followed job does not cancel it when its own client has gone. now: on the clock of
    time.monotonic().
    """

    __slots__ = ("_renew_at", "id")

    def __init__(self, job_ids: Iterable[str] = ()) -> None:
        self.id = secrets.token_hex(6)
        """Names the wait. Another wait of the same client has another name."""
        self._renew_at = dict.fromkeys(job_ids, 0.0)

    def add(self, job_id: str) -> None:
        """Waits for this job, too."""
        self._renew_at[job_id] = 0.0

    def drop(self, job_id: str) -> None:
        """The job has ended, or its wait has."""
        self._renew_at.pop(job_id, None)

    def is_due(self, now: float) -> bool:
        """Whether the broker is to be told of any job now."""
        return any(renew_at <= now for renew_at in self._renew_at.values())

    def due(self, now: float) -> list[str]:
        """The jobs that the broker is to be told of now."""
        return [job_id for job_id, renew_at in self._renew_at.items() if renew_at <= now]

    def told(self, job_ids: Iterable[str], now: float) -> None:
        """The broker knows of the wait for these jobs."""
        for job_id in job_ids:
            self._renew_at[job_id] = now + _RENEW_S

    def take_told(self) -> list[str]:
        """The jobs that the broker knows of, for the end of the wait. It is over."""
        told = [job_id for job_id, renew_at in self._renew_at.items() if renew_at]
        self._renew_at.clear()
        return told


class EndedJobs:
    """The ids of jobs that ended, as replies and events tell them. Replies of all jobs of a client come here."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque()
        self._followed: dict[str, str] = {}
        self.follower = Follower()
        """The jobs of `followed`, as the broker is told of them."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def followed(self) -> list[str]:
        """The jobs whose event streams are read."""
        return list(self._followed.values())

    def follow(self, job_id: str) -> None:
        """Notes that the job's event stream is read."""
        self._followed[events_key(job_id)] = job_id
        self.follower.add(job_id)

    def unfollow(self, job_id: str) -> bool:
        """Notes that the job's event stream is read no longer. Whether it was read."""
        self.follower.drop(job_id)
        return self._followed.pop(events_key(job_id), None) is not None

    def append(self, entry: StreamEntry) -> None:
        """Takes an entry of an event stream."""
        if is_end(entry) and (job_id := self._followed.get(entry.key)):
            self._ids.append(job_id)

    def receive(self, job: JobState) -> None:
        """Takes a job whose reply has come."""
        self.note(job.id)

    def note(self, job_id: str) -> None:
        """Takes a job that has ended."""
        self._ids.append(job_id)

    def take(self) -> Iterator[str]:
        """The jobs that have ended since the last call."""
        while self._ids:
            yield self._ids.popleft()
