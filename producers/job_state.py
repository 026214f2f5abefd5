"""The state of a job as its handle knows it, and the decisions on it. No I/O: the clients read, this module decides.

    reply ------------> receive --+
    record (re-read) -> accept ---+--> record of the end -> opened -> Outcome: outputs, info

A reply only saves the client a read. The broker's record decides what became of a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Real
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec

from penstock.producers.unusable import Unusable
from penstock.registry.broker.base import CancelOutcome, JobRecord, Rating, State
from penstock.registry.envelope import Keyring, ResultHeader, open_result
from penstock.registry.errors import (
    BadSignature,
    InvalidInput,
    JobLost,
    ResultGone,
    ResultTimeout,
    UnknownJob,
    described,
)
from penstock.registry.queues import job_time_ms, slot_of
from penstock.registry.result_match import ResultMatcher
from penstock.registry.tensors import Array, decode

__all__ = [
    "END_NAMES",
    "CancelStatus",
    "HandleCore",
    "JobEnd",
    "JobInfo",
    "JobState",
    "JobStatus",
    "Outcome",
    "ResultPolicy",
    "checked_timeout",
    "positive_timeout",
    "open_outcome",
    "result_timeout",
]

_CLOCK_STEP_S: Final = 0.002
"""The broker's clock has steps of a millisecond."""
_LOOK_AGAIN_S: Final = 1.0
"""Less than the default lease: only for a client that asks again, the job of a dead worker ends. See `expire`."""
JobEnd: TypeAlias = Literal["completed", "failed", "cancelled", "expired", "dead"]
"""How a job ended."""
_LONGEST_TIMEOUT_S: Final = 1e9
"""About 30 years. A larger int may not fit a float."""
_UNBOUND: Final[Any] = Unusable("This handle comes from a pickle and has no client. Expected client.job(handle)")
JobStatus: TypeAlias = Literal["queued", "running", "completed", "failed", "cancelled", "expired", "dead"]
"""The state of a job, as users read it."""
CancelStatus: TypeAlias = Literal["cancelled", "requested", "too_late"]
"""What `cancel` did. "cancelled": the job will never run. "requested": it runs, and its worker is told to stop.
"too_late": it had ended."""
END_NAMES: Final[dict[State, JobEnd]] = {
    State.COMPLETED: "completed",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.EXPIRED: "expired",
    State.DEAD: "dead",
}


@dataclass(frozen=True, slots=True)
class JobInfo:
    """How a job ended, without its outputs. The fields from `version` on are empty for a job that no model ran.

    version, content_hash: the label of the version that answered, and the SHA-256 of its content. attempt: the number
    of the delivery, from 1; 0 for a job that the shared cache answered before it was queued. batch_size: the rows of
    its micro-batch. queue_ms: from acceptance to claim. batch_ms: from claim to the start of the forward. compute_ms:
    the forward. is_cached: the result came from the response cache or from an equal job, without a forward and without
    a batch of its own. level: the level of the fallback chain that answered after an earlier one had failed or was
    stopped by its circuit breaker: `micro-batched`, `plain` or `fallback`; empty: the first level answered.
    """

    status: JobEnd
    version: str
    content_hash: str
    worker: str
    attempt: int
    batch_size: int
    queue_ms: float
    batch_ms: float
    compute_ms: float
    is_cached: bool
    level: str = ""
    experiment: str = ""
    """The experiment whose arm `version` was; empty: none divided the job."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished job, opened and verified."""

    state: State
    header: ResultHeader
    body: memoryview | bytes

    def outputs(self) -> dict[str, Array]:
        """The outputs by name. Raises the JobFailed that ended the job."""
        if self.header.error is not None:
            raise self.header.error.exception()
        return decode(self.header.content, self.body)

    def info(self) -> JobInfo:
        """How it ended, and which version and worker answered."""
        header, timings = self.header, self.header.timings
        return JobInfo(
            status=END_NAMES[self.state],
            version=header.version,
            content_hash=header.content_hash,
            worker=header.worker,
            attempt=header.attempt,
            batch_size=header.batch_size,
            queue_ms=timings.queue_ms,
            batch_ms=timings.batch_ms,
            compute_ms=timings.compute_ms,
            is_cached=header.is_cached,
            level=header.level,
            experiment=header.experiment,
        )

    @property
    def has_run(self) -> bool:
        """Whether a forward began for this job."""
        if self.header.is_cached:
            return False
        return self.state not in (State.CANCELLED, State.EXPIRED) or self.header.batch_size > 0


def open_outcome(job_id: str, record: JobRecord, keyring: Keyring) -> Outcome:
    """Opens a terminal record. Raises Corrupt when its bytes cannot be verified or read."""
    header, body = open_result(record.result, keyring)
    if header.id != job_id:
        raise BadSignature("the result belongs to another job")
    return Outcome(record.state, header, body)


def result_timeout(timeout_s: float | None) -> ResultTimeout:
    """The error for a result that did not come in time."""
    return ResultTimeout(f"No result within {timeout_s:g} s; the job goes on")


def checked_timeout(timeout: object, name: str = "timeout") -> float | None:
    """The seconds of a `timeout` argument. Raises InvalidInput for a value that is no number of seconds."""
    if timeout is None:
        return None
    # The usual types first: a check of an abstract class takes as long as all the rest.
    kind = type(timeout)
    if kind is float or kind is int or (kind is not bool and isinstance(timeout, Real)):
        seconds: float = timeout  # type: ignore[assignment]  # a number of any kind
        if seconds <= _LONGEST_TIMEOUT_S:
            return seconds
        if seconds > _LONGEST_TIMEOUT_S:  # and no NaN
            return _LONGEST_TIMEOUT_S
    raise InvalidInput(f"{name} is {described(timeout)}. Expected a number of seconds, or None to wait without a limit")


def positive_timeout(timeout_s: object) -> float:
    """The seconds of a client's `timeout_s`. Raises InvalidInput for a value that is no positive number."""
    try:
        seconds = checked_timeout(timeout_s)
    except InvalidInput:
        seconds = None
    if seconds is None or seconds <= 0:
        raise InvalidInput(f"timeout_s is {described(timeout_s)}. Expected a positive number of seconds")
    return seconds


class ResultPolicy:
    """How a client verifies results, and how long the broker keeps them. `matcher` knows what its results look like."""

    __slots__ = ("keyring", "matcher", "ttl_s")

    def __init__(self, keyring: Keyring, ttl_s: float) -> None:
        self.keyring = keyring
        self.ttl_s = ttl_s
        self.matcher = ResultMatcher(keyring)


class JobState(msgspec.Struct, eq=False, weakref=True):
    """One job as one handle knows it.

    awaits_reply: whether a reply will come on this client's reply stream and has not come yet.
    record: the terminal record once it is known.
    look_at: the monotonic time in seconds at which the client looks at the record, because the job's deadline or
    lifetime has passed; infinite while that is not known.
    seen_at: the monotonic time in seconds at which the job had surely not ended, as of the last look; minus infinity
    while that is not known.
    """

    id: str
    tenant: str
    policy: ResultPolicy
    awaits_reply: bool
    look_at: float = inf
    seen_at: float = -inf
    record: JobRecord | None = None
    outcome: Outcome | None = None
    """The record, opened. It may be known without that; see `outputs`."""
    was_queued: bool = True
    """False: the shared cache had the answer, so that the broker never got the job."""

    def receive(self, record: JobRecord | None) -> None:
        """Takes a reply: the terminal record, or None when the client must read it by id."""
        self.record = record
        self.awaits_reply = False

    def accept(self, record: JobRecord | None) -> JobRecord:
        """Takes the record as the broker has it now, and keeps a terminal one.

        Raises the error of `missing` for a missing record and for the record of another tenant.
        """
        if record is None:
            raise self.missing()
        if record.state is not State.QUEUED:
            # How long it is kept from now on is not known.
            self.outcome = self._open(record)
            self.record = record
            return record
        if record.tenant != self.tenant:
            raise self.missing()
        if record.left_ms is not None:
            # A job whose time has passed lives while a worker holds it.
            pause_s = _LOOK_AGAIN_S if record.left_ms < 0 else record.left_ms / 1000 + _CLOCK_STEP_S
            self.look_at = time.monotonic() + pause_s
        self.seen_at = time.monotonic()
        return record

    def doubt(self) -> None:
        """The broker did not answer when the job was published: whether it has accepted the job is not known."""
        self.seen_at = -inf

    def is_overdue(self, record: JobRecord) -> bool:
        """Whether the record is that of a job of this tenant whose time has passed: `expire` may end it."""
        return record.left_ms is not None and record.left_ms < 0 and record.tenant == self.tenant

    def seconds_left(self, at_most: float) -> float:
        """The time until the client must look at the job's record, if that is sooner than `at_most`."""
        return at_most if self.look_at == inf else min(at_most, max(0.0, self.look_at - time.monotonic()))

    def status(self, record: JobRecord) -> JobStatus:
        """The status that a record shows."""
        if record.state is State.QUEUED:
            return "running" if record.is_claimed else "queued"
        return END_NAMES[self.opened().state]

    def opened(self) -> Outcome:
        """How the job ended. Raises Corrupt, and the error of `missing` when no terminal record is known."""
        if self.outcome is None:
            if self.record is None:
                raise self.missing()
            self.outcome = self._open(self.record)
        return self.outcome

    def outputs(self) -> dict[str, Array]:
        """The outputs by name. Raises the JobFailed that ended the job, and as `opened` does."""
        return self.answer()[0]

    def answer(self) -> tuple[dict[str, Array], str]:
        """The outputs, and the version that answered. Raises as `outputs` does."""
        record, matcher = self.record, self.policy.matcher
        if self.outcome is None and record is not None:
            if (found := matcher.answer(self.id, self.tenant, record.result)) is not None:
                return found
            outcome = self.opened()
            outputs = outcome.outputs()
            matcher.learn(outcome.header, record.result)
            return outputs, outcome.header.version
        outcome = self.opened()
        return outcome.outputs(), outcome.header.version

    def arm(self, quality: float) -> ResultHeader | None:
        """The header of the result that this quality rates; None: no experiment divided the job.

        Raises InvalidInput for a quality that is no finite number, and for a job without an answer; and as `opened`.
        """
        # A boolean is an int to Python; a verdict is 1.0 or 0.0.
        if isinstance(quality, bool) or not isinstance(quality, int | float) or not isfinite(quality):
            raise InvalidInput(f"The quality is {described(quality)}. Expected a finite number")
        header = self.opened().header
        if header.error is not None:
            raise InvalidInput("The job failed, and has no answer to rate. Expected a completed job")
        return header if header.experiment else None

    def rated(self, answer: Rating) -> bool:
        """Whether the answer of the broker says that the quality was counted. Raises as `missing` says."""
        if answer is Rating.UNKNOWN:
            raise self.missing()
        return answer is Rating.COUNTED

    def cancelled(self, answer: CancelOutcome | JobRecord) -> CancelStatus:
        """The answer of the broker, as users read it. A job that ended as cancelled stays "cancelled"."""
        if isinstance(answer, JobRecord):
            return "cancelled" if self.accept(answer).state is State.CANCELLED else "too_late"
        if answer is CancelOutcome.UNKNOWN:
            raise self.missing()
        return "cancelled" if answer is CancelOutcome.CANCELLED else "requested"

    def missing(self) -> UnknownJob | ResultGone | JobLost:
        """The error for a job without a record. Another tenant's job gives the same error, so the two look equal.

        JobLost: the broker had this tenant's job, and since then less time has passed than results are kept.
        ResultGone: more time has passed, or the id is older than that. UnknownJob: neither is known.
        """
        made_ms, ttl_s = job_time_ms(self.id), self.policy.ttl_s
        unseen_s = time.monotonic() - self.seen_at
        if unseen_s < ttl_s:
            return JobLost(
                f"The broker lost job {self.id}: it had the job {unseen_s:.0f} s ago, results are kept for {ttl_s:g} "
                "s, and there is no record. Its data were cleared, or restored from an older copy. Submit the job again"
            )
        if unseen_s < inf or (made_ms is not None and made_ms < (time.time() - ttl_s) * 1000):
            return ResultGone(
                f"The result of job {self.id} is gone: the job ended longer ago than results are kept ({ttl_s:g} s), "
                "or the broker lost it"
            )
        return UnknownJob(
            f"Unknown job {self.id!r:.120}. Expected the id of a job of this tenant that the broker has not lost"
        )

    def _open(self, record: JobRecord) -> Outcome:
        outcome = open_outcome(self.id, record, self.policy.keyring)
        if outcome.header.context.tenant != self.tenant:
            raise self.missing()
        return outcome


class HandleCore:
    """One job: `id`, `tenant`, and how it ends. Two handles of one job are equal.

    A pickle keeps id and tenant only: a client has keys and a password, and belongs to its process. Pass the handle
    that comes from a pickle to `client.job`.
    """

    __slots__ = ("__weakref__", "_client", "_state")
    _client: object

    def __init__(self, client: object, state: JobState) -> None:
        self._client = client
        self._state = state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HandleCore):
            return NotImplemented
        return self._state.id == other._state.id

    def __hash__(self) -> int:
        return hash(self._state.id)

    def __reduce__(self) -> tuple[Callable[..., HandleCore], tuple[type[HandleCore], str, str]]:
        return _unbound, (type(self), self.id, self.tenant)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    @property
    def id(self) -> str:
        """The job's id. `client.job(id)` gives another handle of the job, in any process."""
        return self._state.id

    @property
    def model(self) -> str:
        """The name of the model."""
        return slot_of(self._state.id)

    @property
    def tenant(self) -> str:
        """The tenant that owns the job."""
        return self._state.tenant

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"


def _unbound(kind: type[HandleCore], job_id: str, tenant: str) -> HandleCore:
    """A handle as its pickle describes it."""
    return kind(_UNBOUND, JobState(job_id, tenant, _UNBOUND, awaits_reply=False))
