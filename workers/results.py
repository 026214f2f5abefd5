"""Answers -> sealed results. The last step before the commit; no broker, no clock."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.registry.broker.base import Commit, State
from penstock.registry.envelope import Failure, Keyring, ResultHeader, Timings, seal
from penstock.registry.errors import InvalidInput
from penstock.registry.package.generation import USAGE
from penstock.registry.tensors import MAX_RESULT_BYTES, Tensor, decode, encode, encoded_size
from penstock.workers.batch_run import BatchRun, Outputs
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.version import ServedVersion

__all__ = [
    "REVOKED",
    "UNTELLABLE",
    "CachedAnswers",
    "EncodedOutputs",
    "JobOutcome",
    "commit_of",
    "result_header",
    "timings_of",
]

REVOKED: Final = Failure("Cancelled", "The job was revoked before it ran")
UNTELLABLE: Final = Failure("ModelError", "The outcome of the job cannot be sent: an output or the text of an error")
_STATES: Final = {"Cancelled": State.CANCELLED, "Expired": State.EXPIRED, "DeadLettered": State.DEAD}

How: TypeAlias = Literal["ran", "followed", "cached", "refused"]
"""A forward ran the job; an equal job's forward answered it; the cache answered it; the job did not run."""


class EncodedOutputs(msgspec.Struct, frozen=True, gc=False):
    """The outputs of one job as they travel (see registry.tensors.encode), and the model that gave them."""

    content: tuple[Tensor, ...]
    body: bytes | memoryview
    """A view of the model's own output where that is large."""
    content_hash: str
    """SHA-256 of the version's files."""
    generation: int
    """Of the form; see Forms.generation."""


class JobOutcome(msgspec.Struct, frozen=True, gc=False):
    """How one job ended in this worker."""

    job: ClaimedJob
    answer: Outputs | EncodedOutputs | Failure
    how: How
    version: ServedVersion | None
    """The version of the job; None while it is open."""
    run: BatchRun | None = None
    """The batch that answered, for a job that ran or followed."""

    @property
    def label(self) -> str:
        """The label of the version; empty while it is open."""
        return self.version.label if self.version is not None else ""

    @property
    def failure(self) -> Failure | None:
        """Why there are no outputs."""
        return self.answer if isinstance(self.answer, Failure) else None

    @property
    def nbytes(self) -> int:
        """The bytes of its outputs."""
        if isinstance(self.answer, Failure):
            return 0
        return len(self.answer.body) if isinstance(self.answer, EncodedOutputs) else encoded_size(self.answer)

    @property
    def state(self) -> State:
        """The state of the job's record after the commit."""
        failure = self.failure
        return State.COMPLETED if failure is None else _STATES.get(failure.code, State.FAILED)

    @property
    def level(self) -> str:
        """The level of the fallback chain that answered, where an earlier one had failed; empty: the first one."""
        if self.run is None or isinstance(self.answer, Failure):
            return ""
        return "fallback" if self.job.fell_back is not None else self.run.level

    def of_follower(self, follower: ClaimedJob, version: ServedVersion | None) -> JobOutcome:
        """The outcome of an equal job that waited for this one. version: the one that it waited for."""
        how: How = "followed" if self.how == "ran" else self.how
        return JobOutcome(follower, self.answer, how, version, self.run)


class CachedAnswers(NamedTuple):
    """Jobs of one version and one claim that the cache answered, and the answer of each."""

    version: ServedVersion
    jobs: list[ClaimedJob]
    answers: list[EncodedOutputs]

    def outcomes(self) -> list[JobOutcome]:
        """The outcome of each job."""
        return [
            JobOutcome(job, answer, "cached", self.version) for job, answer in zip(self.jobs, self.answers, strict=True)
        ]


def commit_of(
    outcome: JobOutcome, *, worker: str, keyring: Keyring, client_tracebacks: bool
) -> tuple[JobOutcome, Commit]:
    """The commit that turns the job's record into its result, and the outcome that this result states.

    The outcome is the given one with its outputs encoded. Outputs that cannot be encoded become a failure.
    client_tracebacks: whether the result has the traceback of a failure; the outcome always has it.
    """
    # Before they are encoded: a job may ask for other outputs.
    tokens = _tokens_of(outcome)
    outcome = _encoded(outcome)
    job, answer, run = outcome.job, outcome.answer, outcome.run
    header, delivery = job.header, job.delivery
    outputs = answer if isinstance(answer, EncodedOutputs) else None
    failure = outcome.failure
    result = result_header(
        job,
        run,
        version=outcome.label,
        experiment=experiment_of(job, outcome.version),
        content_hash=outputs.content_hash if outputs else run.model.content_hash if run else "",
        worker=worker,
        content=outputs.content if outputs else (),
        error=failure if client_tracebacks or failure is None else _without_traceback(failure),
        is_cached=outcome.how == "cached",
        level=outcome.level,
        key=keyring.signing_id,
        is_sealed=keyring.seals and failure is None,
    )
    commit = Commit(
        delivery.slot,
        delivery.priority,
        delivery.entry_id,
        header.id,
        outcome.state,
        seal("result", result, outputs.body if outputs else b"", keyring),
        header.tenant,
        header.reply,
        header.idempotency_digest,
        *tokens,
    )
    return outcome, commit


def _tokens_of(outcome: JobOutcome) -> tuple[str, int, int]:
    """(account, tokens of the prompt, generated tokens) of a text that an API key pays for."""
    account, answer = outcome.job.header.account, outcome.answer
    if not account or isinstance(answer, Failure):
        return "", 0, 0
    outputs = decode(answer.content, answer.body) if isinstance(answer, EncodedOutputs) else answer
    usage = outputs.get(USAGE)
    if usage is None:
        # A stored answer to a job that asked for other outputs.
        return "", 0, 0
    return account, int(usage[0]), int(usage[1])


def result_header(
    job: ClaimedJob,
    run: BatchRun | None,
    *,
    version: str,
    experiment: str,
    content_hash: str,
    worker: str,
    content: tuple[Tensor, ...],
    key: str,
    error: Failure | None = None,
    is_cached: bool = False,
    is_sealed: bool = False,
    level: str = "",
) -> ResultHeader:
    """The header of a job's result. run: the batch that answered it, if one did."""
    return ResultHeader(
        id=job.header.id,
        context=job.header.context,
        version=version,
        worker=worker,
        content=content,
        error=error,
        attempt=job.delivery.attempt,
        batch_size=run.batch.rows if run else 0,
        timings=timings_of(job, run),
        key=key,
        content_digest=bytes.fromhex(content_hash),
        is_cached=is_cached,
        experiment=experiment,
        is_sealed=is_sealed,
        level=level,
    )


def experiment_of(job: ClaimedJob, version: ServedVersion | None) -> str:
    """The experiment whose arm the job had; empty for none."""
    return "" if version is None or job.header.version else version.base.experiment


def timings_of(job: ClaimedJob, run: BatchRun | None) -> Timings:
    """The stages of a job that ended. run: the batch that answered it, if one did."""
    if run is None:
        return Timings(job.queue_ms)
    # A job that followed an equal one after its forward had begun did not wait for a batch.
    batch_ms = max(0.0, run.started - job.claimed) * 1e3
    return Timings(job.queue_ms, batch_ms, (run.ended - run.started) * 1e3)


def _encoded(outcome: JobOutcome) -> JobOutcome:
    answer, run = outcome.answer, outcome.run
    if isinstance(answer, (Failure, EncodedOutputs)):
        return outcome
    wanted = outcome.job.header.options.outputs
    try:
        content, body = encode({name: answer[name] for name in wanted} if wanted else answer, may_view=True)
    except InvalidInput as error:
        return _failed(outcome, f"An output cannot be encoded. {error}")
    if len(body) > MAX_RESULT_BYTES:
        return _failed(outcome, f"The outputs take {len(body)} bytes. Expected at most {MAX_RESULT_BYTES}")
    content_hash, generation = (run.model.content_hash, run.generation) if run else ("", 0)
    outputs = EncodedOutputs(content, body, content_hash, generation)
    return JobOutcome(outcome.job, outputs, outcome.how, outcome.version, run)


def _without_traceback(failure: Failure) -> Failure:
    return Failure(failure.code, failure.message, failure.where)


def _failed(outcome: JobOutcome, message: str) -> JobOutcome:
    return JobOutcome(outcome.job, Failure("ModelError", message), outcome.how, outcome.version, outcome.run)
