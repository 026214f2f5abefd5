"""Every error that crosses a seam, and what becomes of the job that met it.

    PenstockError
      Rejected                 refused before anything is written
        InvalidInput             names, dtype, shape, range or size against the model's signature
        UnknownModel             no spec in the broker and no package under the models root
        UnknownJob               no such job, or another tenant's
        DeadlineExceeded         the deadline had passed when the job was offered
        IdempotencyConflict      the key is taken by a job with other inputs
        Unauthorized  Forbidden
        QueueFull                carries retry_after_s
        TransitionRefused        a stage change that the rules, an approver or the gate forbid
          TransitionConflict       another change of the same model came first
        ContentChanged           a version's files are not those that were registered
      Retryable                goes back to the queue
        BrokerUnavailable  RegistryUnavailable  ModelNotReady  OutOfMemory
      Corrupt                  goes to the dead letters, bytes kept
        UndecodableEnvelope  BadSignature
      JobFailed                what result() raises
        ModelError  NonFiniteOutput  DeadLettered  Cancelled  Expired
      ResultGone               read after its expiry
      ResultTimeout            not there yet (also a TimeoutError)
      ConfigurationError       a setting, a model package or a machine that cannot work; processes exit on it

The class carries the disposition, the instance the facts. Messages are seen by clients: they say what was
wrong and what was expected, and never contain payloads, paths or secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

Disposition = Literal["reject", "retry", "dead-letter", "fail", "stop"]

__all__ = [
    "BadSignature",
    "BrokerUnavailable",
    "Cancelled",
    "ConfigurationError",
    "ContentChanged",
    "Corrupt",
    "DeadLettered",
    "DeadlineExceeded",
    "Disposition",
    "Expired",
    "Forbidden",
    "IdempotencyConflict",
    "InvalidInput",
    "JobFailed",
    "ModelError",
    "ModelNotReady",
    "NonFiniteOutput",
    "OutOfMemory",
    "PenstockError",
    "QueueFull",
    "RegistryUnavailable",
    "Rejected",
    "ResultGone",
    "ResultTimeout",
    "Retryable",
    "TransitionConflict",
    "TransitionRefused",
    "Unauthorized",
    "UndecodableEnvelope",
    "UnknownJob",
    "UnknownModel",
    "described",
    "error_named",
    "job_failure",
    "shown",
]


class PenstockError(Exception):
    """The root; `disposition` says what becomes of the job."""

    disposition: ClassVar[Disposition] = "fail"


class Rejected(PenstockError):
    """Refused before anything was written."""

    disposition = "reject"


class InvalidInput(Rejected, ValueError):
    """The inputs do not fit the model's signature, or an argument is not one of those expected."""


class UnknownModel(Rejected, LookupError):
    """No spec in the broker and no package under the models root."""


class UnknownJob(Rejected, LookupError):
    """No such job; a job of another tenant looks exactly the same."""


class DeadlineExceeded(Rejected):
    """The deadline had passed when the job was offered."""


class IdempotencyConflict(Rejected):
    """The idempotency key belongs to a job with another model version or other inputs.

    accepted: the handles of the jobs that a `submit_many` had published before.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.accepted: Sequence[object] = ()


class Unauthorized(Rejected):
    """No credential, or one that is not known."""


class Forbidden(Rejected):
    """A known credential without the scope that this needs."""


class QueueFull(Rejected):
    """The queue or the tenant's share of it is full; try again after `retry_after_s` seconds.

    accepted: the handles of the jobs that a `submit_many` had published before its time ran out.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.accepted: Sequence[object] = ()


class TransitionRefused(Rejected):
    """A version may not change its stage so: the rules, an approver or the gate forbid it; nothing was changed."""


class TransitionConflict(TransitionRefused):
    """Another change of the same model came first; look at what it is now, and decide again."""


class ContentChanged(Rejected):
    """The files of a version are not those that were registered."""


class Retryable(PenstockError):
    """Nothing is wrong with the job: it goes back to the queue."""

    disposition = "retry"


class BrokerUnavailable(Retryable, ConnectionError):
    """The broker did not answer within the time-out.

    accepted: the handles of the jobs that a `submit_many` had published before. in_doubt: the handles of those whose
    answer did not come; their `status()` tells, once the broker is back, or UnknownJob for a job that never was.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.accepted: Sequence[object] = ()
        self.in_doubt: Sequence[object] = ()


class RegistryUnavailable(Retryable, ConnectionError):
    """The registry's database did not answer, or refused."""


class ModelNotReady(Retryable):
    """The model is being loaded or was unloaded."""


class OutOfMemory(Retryable, MemoryError):
    """The batch did not fit the device; the caller splits it."""


class Corrupt(PenstockError):
    """The bytes cannot be a job: they are kept in the dead letters.

    claimed: (job id, tenant) as the bytes claim them, believed by nobody; None where they say nothing.
    """

    disposition = "dead-letter"

    def __init__(self, message: str, claimed: tuple[str, str] | None = None) -> None:
        super().__init__(message)
        self.claimed = claimed


class UndecodableEnvelope(Corrupt):
    """Not an envelope, another protocol version, or one that contradicts itself."""


class BadSignature(Corrupt):
    """Unsigned where signatures are required, an unknown key, or bytes that were changed."""


class JobFailed(PenstockError):
    """The job ended without a result; `result()` raises it."""


class ModelError(JobFailed):
    """The model raised; the text carries the exception's class and message."""


class NonFiniteOutput(JobFailed):
    """The model answered with NaN or infinity."""


class DeadLettered(JobFailed):
    """The job went to the dead letters, as no process survived its forward or ended it in time; the text says why."""


class Cancelled(JobFailed):
    """The job was cancelled or revoked before it ran."""


class Expired(JobFailed):
    """The deadline or the job's lifetime passed before it ran."""


class ResultGone(PenstockError):
    """The result existed and its retention has ended."""


class ResultTimeout(PenstockError, TimeoutError):
    """The result is not there yet; the job goes on."""


class ConfigurationError(PenstockError):
    """A setting, a model package or a machine that cannot work; the process says so in one line and exits."""

    disposition = "stop"


def shown(name: object) -> str:
    """A name that somebody sent, as it may stand in an error: cut short, and without line breaks of its own."""
    text = str(name)[:80]
    return text if text.isprintable() else repr(text)


def described(value: object) -> str:
    """What somebody sent in the place of a name, as it may stand in an error; never more work than a short text."""
    if isinstance(value, str):
        return repr(value[:80])
    is_plain = value is None or isinstance(value, bool | int | float)
    return repr(value)[:80] if is_plain else f"of type {type(value).__name__}"


_FAILURES: dict[str, type[JobFailed]] = {
    error.__name__: error for error in (ModelError, NonFiniteOutput, DeadLettered, Cancelled, Expired)
}


def job_failure(code: str, message: str) -> JobFailed:
    """The exception for a failure that travelled as plain data: `code` is the class name.

    An unknown code (a newer worker's) becomes a plain JobFailed that keeps the code in its text.
    """
    error = _FAILURES.get(code)
    return error(message) if error else JobFailed(f"{code}: {message}")


def error_named(code: str, message: str) -> PenstockError:
    """The exception of another process that travelled as plain data: `code` is the class name.

    An unknown code (a newer version's) becomes a plain PenstockError that keeps the code in its text.
    """
    kinds: list[type[PenstockError]] = [PenstockError]
    for kind in kinds:
        if kind.__name__ == code:
            return kind(message)
        kinds += kind.__subclasses__()
    return PenstockError(f"{code}: {message}")
