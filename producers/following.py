"""The jobs that one call waits for and that another process has submitted, as the broker is told of them.

    a wait for a job of another process -> due -> `follow` in the broker, again and again -> `unfollow` at its end

The submitter of a followed job does not cancel it when its own client has gone. No I/O: both clients make the calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

__all__ = ["FOLLOW_TTL_MS", "Follower"]

_RENEW_S: Final = 20.0
FOLLOW_TTL_MS: Final = 60_000
"""Three renewals: the longest silence of a subscriber lies between two of them."""


class Follower:
    """The wait of one call. job_ids: jobs of other processes. now: on the clock of time.monotonic()."""

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
