"""Answers as they are committed: the fields of the result, and which answers become failures instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.registry.broker.base import Commit, State
from penstock.registry.envelope import Failure, Keyring, Options, ResultHeader, Timings, open_result
from penstock.registry.queues import Priority, reply_key
from penstock.registry.tensors import MAX_RESULT_BYTES, Array, decode
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.batch_run import BatchRun
from penstock.workers.job import ClaimedJob
from penstock.workers.results import REVOKED, EncodedOutputs, JobOutcome, commit_of
from tests.workers.doubles import Doubler, job_of, ready_version, run_of

KEYRING = Keyring.parse("ours:" + "B" * 44)
VERSION = ready_version()
OUTPUTS: dict[str, Array] = {"y": np.array([[2.0]], np.float32), "z": np.array([[3.0]], np.float32)}


def ran(job: ClaimedJob, answer: Any = None) -> JobOutcome:
    """The outcome of a job whose forward took from 12 s to 12.5 s, in a batch of two."""
    run: BatchRun = run_of(VERSION, job, job_of(1))
    run.started, run.ended = 12.0, 12.5
    return JobOutcome(job, OUTPUTS if answer is None else answer, "ran", VERSION, run)


def committed(
    outcome: JobOutcome, *, client_tracebacks: bool = False
) -> tuple[JobOutcome, Commit, ResultHeader, dict[str, Array]]:
    """The outcome that is committed, its commit, and the result in it."""
    outcome, commit = commit_of(outcome, worker="worker-1", keyring=KEYRING, client_tracebacks=client_tracebacks)
    header, body = open_result(commit.sealed, KEYRING)
    return outcome, commit, header, decode(header.content, body)


def test_a_result_tells_which_model_answered_in_which_batch_and_how_long_it_took():
    """The times are those of the queue, of the wait for the batch, and of the forward."""
    job = job_of(1, claimed=11.0, queue_ms=250.0, traceparent="00-trace")
    _, _, header, outputs = committed(ran(job))
    assert {name: values.tolist() for name, values in outputs.items()} == {"y": [[2.0]], "z": [[3.0]]}
    assert header == ResultHeader(
        id=job.header.id,
        context=job.header.context,
        version="1",
        worker="worker-1",
        content=header.content,
        batch_size=2,
        timings=Timings(250.0, 1000.0, 500.0),
        key="ours",
        content_digest=bytes.fromhex(Doubler.content_hash),
    )


def test_a_commit_names_the_entry_and_the_client_of_the_job():
    """The broker needs them to settle the job and to tell its client."""
    job = job_of(1, priority=Priority.HIGH, reply=reply_key("double", "client"), idempotency_digest="digest")
    _, commit, _, _ = committed(ran(job))
    entry = job.delivery.entry_id
    assert commit == Commit(
        "double",
        Priority.HIGH,
        entry,
        job.header.id,
        State.COMPLETED,
        commit.sealed,
        "acme",
        job.header.reply,
        "digest",
    )


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_traceback_stays_in_the_worker_unless_the_settings_send_it(is_sent: bool):
    """The result always names the line of the model. The outcome, for events and logs, has the traceback, too."""
    failure = Failure("ModelError", "KeyError: 'k'", "model.py, line 7, in predict", 'File "/srv/model.py", line 7')
    outcome, commit, header, _ = committed(ran(job_of(1), failure), client_tracebacks=is_sent)
    assert outcome.failure == failure
    assert header.error is not None
    assert header.error.where == failure.where
    assert (b"/srv" in commit.sealed, header.error.traceback) == (is_sent, failure.traceback if is_sent else "")


def test_only_the_requested_outputs_are_sent():
    """In the order of the request."""
    _, _, _, outputs = committed(ran(job_of(1, options=Options(outputs=("z",)))))
    assert list(outputs) == ["z"]


@pytest.mark.parametrize(
    ("failure", "state"),
    [
        (CANCELLED, State.CANCELLED),
        (REVOKED, State.CANCELLED),
        (EXPIRED, State.EXPIRED),
        (Failure("DeadLettered", "poison"), State.DEAD),
        (Failure("ModelError", "ValueError: no"), State.FAILED),
        (Failure("NonFiniteOutput", "NaN"), State.FAILED),
    ],
)
def test_the_code_of_a_failure_decides_the_state_of_the_record(failure: Failure, state: State):
    """A failure has no outputs; without a run there is no batch and no model to name."""
    outcome, commit, header, outputs = committed(JobOutcome(job_of(1, queue_ms=5.0), failure, "refused", None))
    assert (outcome.state, commit.state, header.error, outputs) == (state, state, failure, {})
    assert (header.version, header.content_hash, header.batch_size) == ("", "", 0)
    assert header.timings == Timings(5.0)


def test_a_failure_of_the_model_names_its_content():
    """The operator sees which files failed."""
    _, _, header, _ = committed(ran(job_of(1), Failure("ModelError", "ValueError: no")))
    assert (header.version, header.content_hash) == ("1", Doubler.content_hash)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"y": np.array([[1j]])}, "An output cannot be encoded. y: dtype complex128"),
        ({"y": np.zeros(MAX_RESULT_BYTES + 1, np.uint8)}, f"Expected at most {MAX_RESULT_BYTES}"),
    ],
    ids=["a dtype that cannot travel", "too many bytes"],
)
def test_outputs_that_cannot_be_sent_become_a_failure(answer: dict[str, Array], message: str):
    """The outcome that is returned is the committed one, so events and counters agree with the result."""
    outcome, commit, header, _ = committed(ran(job_of(1), answer))
    assert header.error is not None
    assert header.error.code == "ModelError"
    assert message in header.error.message
    assert (outcome.failure, outcome.state, commit.state) == (header.error, State.FAILED, State.FAILED)
    assert outcome.run is not None


def test_outputs_of_the_largest_size_are_sent():
    """The bound is the largest body that a client accepts."""
    outcome, _, _, outputs = committed(ran(job_of(1), {"y": np.zeros(MAX_RESULT_BYTES, np.uint8)}))
    assert outcome.state is State.COMPLETED
    assert outputs["y"].nbytes == MAX_RESULT_BYTES


def test_encoded_outputs_serve_followers_and_later_jobs_unchanged():
    """A follower tells of the batch that answered it, a cached answer of none; both name the content."""
    leader, _, _, _ = committed(ran(job_of(1)))
    assert isinstance(leader.answer, EncodedOutputs)
    follower = leader.of_follower(job_of(1, claimed=12.25), VERSION)
    assert (follower.how, follower.answer) == ("followed", leader.answer)
    _, _, header, outputs = committed(follower)
    assert outputs["y"].tolist() == [[2.0]]
    assert (header.is_cached, header.batch_size, header.content_hash) == (False, 2, Doubler.content_hash)
    assert header.timings.batch_ms == 0.0, "it came after the forward had begun"
    _, _, header, outputs = committed(JobOutcome(job_of(1), leader.answer, "cached", VERSION))
    assert outputs["y"].tolist() == [[2.0]]
    assert (header.is_cached, header.batch_size, header.content_hash) == (True, 0, Doubler.content_hash)


@pytest.mark.parametrize("how", ["cached", "refused"])
def test_a_follower_of_a_job_without_a_forward_ended_in_the_same_way(how: Any):
    """It followed no forward: `followed` would count one."""
    outcome = JobOutcome(job_of(1), EXPIRED, how, None)
    assert outcome.of_follower(job_of(1), None).how == how
