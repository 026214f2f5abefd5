"""Answers -> sealed results. The last step before the commit; no broker, no clock."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.registry.broker.base import Commit, State
from penstock.registry.envelope import Failure, Keyring, RequestContext, ResultHeader, Timings, seal
from penstock.registry.errors import InvalidInput
from penstock.registry.tensors import MAX_RESULT_BYTES, Tensor, encode
from penstock.workers.executor import BatchRun, Outputs
from penstock.workers.job import ClaimedJob

__all__ = ["CANCELLED", "EXPIRED", "REVOKED", "JobOutcome", "EncodedOutputs", "commit_of", "unrun_result"]

EXPIRED: Final = Failure("Expired", "The job's deadline or lifetime had passed before it ran")
REVOKED: Final = Failure("Cancelled", "The job was revoked before it ran")
CANCELLED: Final = Failure("Cancelled", "The job was cancelled before it ran")
_STATES: Final = {"Cancelled": State.CANCELLED, "Expired": State.EXPIRED, "DeadLettered": State.DEAD}


class EncodedOutputs(msgspec.Struct, frozen=True, gc=False):
    """The outputs of one job as they travel, see registry.tensors.encode, and what answered."""

    content: tuple[Tensor, ...]
    body: bytes
    content_hash: str
    """SHA-256 of the version's content."""
    form: int
    """See Forms.generation."""


class JobOutcome(msgspec.Struct, frozen=True, gc=False):
    """How one job ended here; `work` is the batch that answered, None for a job that did not run."""

    job: ClaimedJob
    answer: Outputs | EncodedOutputs | Failure
    work: BatchRun | None = None

    @property
    def failure(self) -> Failure | None:
        """Why there are no outputs."""
        return self.answer if isinstance(self.answer, Failure) else None

    @property
    def state(self) -> State:
        """What the job's record will say."""
        failure = self.failure
        return State.COMPLETED if failure is None else _STATES.get(failure.code, State.FAILED)


def unrun_result(job_id: str, tenant: str, failure: Failure, *, worker: str, keyring: Keyring) -> bytes:
    """The sealed result of a job that was never opened."""
    context = RequestContext(tenant)
    header = ResultHeader(id=job_id, context=context, worker=worker, error=failure, key=keyring.signing_id)
    return seal("result", header, b"", keyring)


def _pack(end: JobOutcome) -> JobOutcome:
    """The same with its outputs packed; outputs that cannot travel are a failure."""
    answer, work = end.answer, end.work
    if isinstance(answer, (Failure, EncodedOutputs)):
        return end
    wanted = end.job.header.options.outputs
    try:
        content, body = encode({name: answer[name] for name in wanted} if wanted else answer)
    except InvalidInput as error:
        return JobOutcome(end.job, Failure("ModelError", f"An output cannot travel. {error}"), work)
    if len(body) > MAX_RESULT_BYTES:
        message = f"The outputs take {len(body)} bytes. Expected at most {MAX_RESULT_BYTES}"
        return JobOutcome(end.job, Failure("ModelError", message), work)
    return JobOutcome(
        end.job, EncodedOutputs(content, body, work.content_hash if work else "", work.form if work else 0), work
    )


def commit_of(end: JobOutcome, *, worker: str, keyring: Keyring) -> tuple[JobOutcome, Commit]:
    """The commit that turns the job's record into this result, and the conclusion that it says.

    That is `end`, but for outputs that cannot travel: those are a failure.
    """
    end = _pack(end)
    job, answer, work = end.job, end.answer, end.work
    header, delivery = job.header, job.delivery
    packed = answer if isinstance(answer, EncodedOutputs) else None
    result = ResultHeader(
        id=header.id,
        context=header.context,
        version=job.label,
        content_hash=packed.content_hash if packed else work.content_hash if work else "",
        worker=worker,
        content=packed.content if packed else (),
        error=end.failure,
        attempt=delivery.attempt,
        batch_size=work.batch.rows if work else 0,
        timings=_timings(job, work),
        key=keyring.signing_id,
        is_cached=packed is not None and work is None,
    )
    commit = Commit(
        delivery.slot,
        delivery.priority,
        delivery.entry_id,
        header.id,
        end.state,
        seal("result", result, packed.body if packed else b"", keyring),
        header.tenant,
        header.reply,
        header.idempotency_digest,
    )
    return end, commit


def _timings(job: ClaimedJob, work: BatchRun | None) -> Timings:
    if work is None:
        return Timings(job.queue_ms)
    # A job that joined an equal one after that had begun did not wait for a batch.
    batch_ms = max(0.0, work.started - job.claimed) * 1e3
    return Timings(job.queue_ms, batch_ms, (work.ended - work.started) * 1e3)
