"""Every error of the public interface, and what happens to its job.

    PenstockError
      Rejected                 refused before anything is written
        InvalidInput             names, dtype, shape, range or size against the model's signature
          BadModelName             no model can have the name (also an UnknownModel)
        UnknownModel             no spec in the broker and no package under the models root
        UnknownJob               no such job, or another tenant's
        DeadlineExceeded         the deadline had passed when the job was offered
        IdempotencyConflict      the key is taken by a job with other inputs
        Unauthorized
          BadApiKey                a caller of the gateway has no valid API key
        Forbidden
          NotPermitted             the caller's API key lacks the right
        RateLimited              the caller has spent a limit; carries retry_after_s
        ClientUnusable           the client is closed, or serves another event loop; a handle has no client
        QueueFull                carries retry_after_s
        TransitionRefused        a stage change that the rules, an approver or the gate forbid
          TransitionConflict       another change of the same model came first
        ContentChanged           a version's files are not those that were registered
      Retryable                the job goes back to the queue
        BrokerUnavailable
          BrokerRefused            the broker answers, and refuses this process: password, rights or TLS
          BrokerDamaged            another program wrote to a key of Penstock, and this process may not mend that
        RegistryUnavailable  ModelNotReady  OutOfMemory
      Corrupt                  the bytes go to the dead letters
        UndecodableEnvelope  BadSignature  BadSeal
      JobFailed                what result() raises
        ModelError  NonFiniteOutput  DeadLettered  Cancelled  Expired
        InputRefused             the worker refused the inputs, which fitted the signature (also a ValueError)
        ForwardTimeout           the forward exceeded its limit (also a TimeoutError)
      JobLost                  the broker accepted the job and no longer has it (also a LookupError)
      ResultGone               the result has expired
      ResultTimeout            there is no result yet (also a TimeoutError)
      ConfigurationError       an unusable setting, model package or machine; processes exit on it
        MissingRequirement       a Python package or a device that a model needs is not here; its package may be right

The class has the disposition, the instance has the facts. Clients see the messages: each names the value that was
found and the value expected, and never contains payloads, paths or secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

Disposition = Literal["reject", "retry", "dead-letter", "fail", "stop"]

__all__ = [
    "BadApiKey",
    "BadModelName",
    "BadSeal",
    "BadSignature",
    "BrokerDamaged",
    "BrokerRefused",
    "BrokerUnavailable",
    "Cancelled",
    "ClientUnusable",
    "ConfigurationError",
    "ContentChanged",
    "Corrupt",
    "DeadLettered",
    "DeadlineExceeded",
    "Disposition",
    "Expired",
    "Forbidden",
    "ForwardTimeout",
    "IdempotencyConflict",
    "InputRefused",
    "InvalidInput",
    "JobFailed",
    "JobLost",
    "MissingRequirement",
    "ModelError",
    "ModelNotReady",
    "NonFiniteOutput",
    "NotPermitted",
    "OutOfMemory",
    "PenstockError",
    "QueueFull",
    "RateLimited",
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
    """The root of all errors. `disposition`: what happens to the job."""

    disposition: ClassVar[Disposition] = "fail"


class Rejected(PenstockError):
    """Refused before anything was written."""

    disposition = "reject"


class InvalidInput(Rejected, ValueError):
    """The inputs do not fit the model's signature, or an argument is not an expected one."""


class UnknownModel(Rejected, LookupError):
    """No spec in the broker and no package under the models root."""


class BadModelName(InvalidInput, UnknownModel):
    """No model, or no version of one, can have this name."""


class UnknownJob(Rejected, LookupError):
    """There is no such job. The error is the same for a job of another tenant."""


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
    """There is no credential, or an unknown one: for example no live worker has the signing keys of this process."""


class Forbidden(Rejected):
    """The credential is known but lacks the necessary scope."""


class BadApiKey(Unauthorized):
    """A caller of the gateway shows no API key, or one that is unknown, revoked or expired."""


class NotPermitted(Forbidden):
    """The API key of the caller is valid, and its role or its models do not allow this."""


class RateLimited(Rejected):
    """The caller has spent a limit. Try again after `retry_after_s` seconds.

    readings: what is left of each limit of the request; see registry/broker/meters.py.
    """

    def __init__(self, message: str, retry_after_s: float, readings: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.readings = readings


class ClientUnusable(Rejected, RuntimeError):
    """The client was closed, serves another event loop or cannot be pickled, or a handle has no client.

    The broker was not asked.
    """


class QueueFull(Rejected):
    """The queue or the tenant's share of it is full. Try again after `retry_after_s` seconds.

    accepted: the handles of the jobs that `submit_many` had published before its time-out.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.accepted: Sequence[object] = ()


class TransitionRefused(Rejected):
    """The rules, an approver or the gate forbid this change of a version's stage. Nothing was changed."""


class TransitionConflict(TransitionRefused):
    """Another change of this model was committed first. Read the present state, and try again."""


class ContentChanged(Rejected):
    """The files of a version are not those that were registered."""


class Retryable(PenstockError):
    """The error is not the job's: it goes back to the queue."""

    disposition = "retry"


class BrokerUnavailable(Retryable, ConnectionError):
    """The broker did not answer within the time-out.

    accepted: the handles of the jobs that `submit_many` had published before. in_doubt: the handles of jobs whose
    acceptance is unknown. When the broker is back, `status()` of a handle tells; UnknownJob: it was not accepted.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.accepted: Sequence[object] = ()
        self.in_doubt: Sequence[object] = ()


class BrokerRefused(BrokerUnavailable):
    """The broker answers and refuses this process: a wrong user or password, a missing right, or TLS on one side only.

    It is raised at once, because no repetition helps. The message names the address and the side to change.
    """


class BrokerDamaged(BrokerUnavailable):
    """Another program has written to a key of Penstock: the key holds another type, and this process may not quarantine
    it. A worker does that for the keys of its models within seconds. The message names the groups of keys.
    """


class RegistryUnavailable(Retryable, ConnectionError):
    """The registry's database did not answer, or refused."""


class ModelNotReady(Retryable):
    """The model is being loaded or was unloaded."""


class OutOfMemory(Retryable, MemoryError):
    """The batch did not fit the device; the caller splits it."""


class Corrupt(PenstockError):
    """The bytes cannot be a job. They are kept in the dead letters.

    claimed: (job id, tenant) that the bytes claim, not verified; None if they claim none.
    """

    disposition = "dead-letter"

    def __init__(self, message: str, claimed: tuple[str, str] | None = None) -> None:
        super().__init__(message)
        self.claimed = claimed


class UndecodableEnvelope(Corrupt):
    """The bytes are no envelope, have another protocol version, or contradict themselves."""


class BadSignature(Corrupt):
    """The bytes lack a required signature, have an unknown key, or were changed."""


class BadSeal(Corrupt):
    """The body is not sealed where it must be, is sealed with an unknown key, or was changed or moved."""


class JobFailed(PenstockError):
    """The job ended without a result; `result()` raises it.

    where: the last frame of the model's own code, `model.py, line 7, in predict`; empty if the model did not raise it.
    traceback: the traceback in the worker as text; empty unless the worker has `queue.client_tracebacks`.
    """

    where: str = ""
    traceback: str = ""


class ModelError(JobFailed):
    """The model raised an exception. The message has its class, its text and where it was raised."""


class InputRefused(JobFailed, ValueError):
    """The worker refused the inputs before a forward: too many tokens, or another signature than the client knew.

    The message says what was expected.
    """


class NonFiniteOutput(JobFailed):
    """The model's outputs have NaN or infinity."""


class ForwardTimeout(JobFailed, TimeoutError):
    """The forward took longer than its limit, and the job had no further try. Time in the queue does not count."""


class DeadLettered(JobFailed):
    """The job is a dead letter: no process survived its forward, or it is no valid job. The message has the reason."""


class Cancelled(JobFailed):
    """The job was cancelled or revoked before it ran."""


class Expired(JobFailed):
    """The deadline or the job's lifetime passed before it ran, or the deadline before its text had ended."""


class JobLost(PenstockError, LookupError):
    """The broker accepted the job, and no longer has a record of it: its data were cleared or restored from an older
    copy. The job may have run. Submit it again."""


class ResultGone(PenstockError):
    """The result existed and has expired. After its retention a lost job looks the same."""


class ResultTimeout(PenstockError, TimeoutError):
    """There is no result yet. The job continues."""


class ConfigurationError(PenstockError):
    """A setting, a model package or a machine is unusable. The process writes one line and exits."""

    disposition = "stop"


class MissingRequirement(ConfigurationError):
    """This machine lacks a Python package or a device that a model needs. The model's package may be right."""


def shown(name: object) -> str:
    """A received name for a message: shortened, without line breaks."""
    text = str(name)[:80]
    return text if text.isprintable() else repr(text)


def described(value: object) -> str:
    """A received value for a message, where a name was expected: shortened, and cheap for any value."""
    if isinstance(value, str):
        return repr(value[:80])
    is_plain = value is None or isinstance(value, bool | int | float)
    return repr(value)[:80] if is_plain else f"of type {type(value).__name__}"


_FAILURES: dict[str, type[JobFailed]] = {
    error.__name__: error
    for error in (ModelError, InputRefused, NonFiniteOutput, ForwardTimeout, DeadLettered, Cancelled, Expired)
}


def job_failure(code: str, message: str, *, where: str = "", traceback: str = "") -> JobFailed:
    """The exception for a failure in a result: `code` is the class name, and `where` ends the message.

    An unknown code, from a newer worker, becomes a JobFailed with the code in its message.
    """
    kind = _FAILURES.get(code)
    text = f"{message} ({where})" if where else message
    error = kind(text) if kind else JobFailed(f"{code}: {text}")
    error.where, error.traceback = where, traceback
    return error


def error_named(code: str, message: str) -> PenstockError:
    """The exception of another process: `code` is the class name.

    An unknown code, from a newer version, becomes a PenstockError with the code in its message.
    """
    kinds: list[type[PenstockError]] = [PenstockError]
    for kind in kinds:
        if kind.__name__ == code:
            return kind(message)
        kinds += kind.__subclasses__()
    return PenstockError(f"{code}: {message}")
