"""JobState: what a handle concludes from replies, records and the broker's answers, without a broker."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.producers.job_state import END_NAMES, JobState, ResultPolicy, checked_timeout, result_timeout
from penstock.registry.broker.base import CancelOutcome, JobRecord, State
from penstock.registry.envelope import Failure, Keyring, RequestContext, ResultHeader, seal
from penstock.registry.errors import BadSignature, Cancelled, InvalidInput, JobLost, ResultGone, UnknownJob, described
from penstock.registry.queues import new_job_id
from penstock.registry.tensors import encode

UNSIGNED = Keyring.parse(None)
POLICY = ResultPolicy(UNSIGNED, ttl_s=60)
WAITING = JobRecord(State.QUEUED, "acme")


def _ended(job_id: str, state: State = State.COMPLETED, tenant: str = "acme") -> JobRecord:
    content, body = encode({"y": np.ones((1, 4), np.float32)})
    error = None if state is State.COMPLETED else Failure("Cancelled", "The job was cancelled before it ran")
    header = ResultHeader(job_id, RequestContext(tenant), content=() if error else content, error=error)
    return JobRecord(state, "", seal("result", header, b"" if error else body, UNSIGNED))


@pytest.fixture
def own() -> JobState:
    """A job that this client has just submitted."""
    return JobState(new_job_id("m"), "acme", POLICY, awaits_reply=True, seen_at=time.monotonic())


@pytest.fixture
def found() -> JobState:
    """A job that the caller named by its id."""
    return JobState(new_job_id("m"), "acme", POLICY, awaits_reply=False)


def test_a_reply_brings_the_outcome(own: JobState):
    """The record in a reply is the end: no reply is awaited any more, and the outputs can be read twice."""
    own.receive(_ended(own.id))
    assert not own.awaits_reply
    assert own.opened() is own.opened()
    assert own.opened().outputs()["y"].shape == (1, 4)
    assert own.opened().info().status == "completed"


def test_an_empty_reply_asks_for_the_record(own: JobState):
    """A reply without a record ends the waiting, and the record that the client reads then gives the outcome."""
    own.receive(None)
    assert not own.awaits_reply
    assert own.record is None
    own.accept(_ended(own.id))
    assert own.opened().outputs()["y"].shape == (1, 4)


def test_a_waiting_record_is_not_kept(own: JobState):
    """Only a terminal record is kept. The status of another one says whether a worker holds the job."""
    assert own.status(own.accept(WAITING)) == "queued"
    assert own.status(own.accept(JobRecord(State.QUEUED, "acme", is_claimed=True))) == "running"
    assert own.record is None
    with pytest.raises(JobLost):
        own.opened()


@pytest.mark.parametrize("state", END_NAMES)
def test_the_status_of_an_ended_job_names_its_end(state: State, own: JobState):
    """Each terminal state has one name, which `status` and `info` share."""
    record = own.accept(_ended(own.id, state))
    assert own.status(record) == own.opened().info().status == END_NAMES[state]


def test_a_missing_record_is_lost_or_unknown(own: JobState, found: JobState):
    """The broker had an own job less than 60 s ago, so that it is lost. A named job may never have existed."""
    with pytest.raises(JobLost, match=r"it had the job 0 s ago, results are kept for 60 s, and there is no record"):
        own.accept(None)
    with pytest.raises(UnknownJob):
        found.accept(None)
    found.accept(WAITING)
    with pytest.raises(JobLost):
        found.accept(None)


def test_a_record_that_is_missing_for_longer_than_results_are_kept_is_gone():
    """The result may have expired, or the broker has lost the job: the text says both."""
    job = JobState(new_job_id("m"), "acme", POLICY, awaits_reply=True, seen_at=time.monotonic() - 60)
    with pytest.raises(ResultGone, match=r"results are kept \(60 s\), or the broker lost it$"):
        job.accept(None)


def test_an_ended_job_that_was_looked_at_late_is_gone():
    """Its result had lived for most of its time then: that it was there says nothing of the time that is left."""
    job = JobState(new_job_id("m"), "acme", POLICY, awaits_reply=False, seen_at=time.monotonic() - 60)
    job.accept(_ended(job.id))
    with pytest.raises(ResultGone):
        job.accept(None)


def test_a_job_whose_acceptance_is_in_doubt_is_unknown(own: JobState):
    """The broker did not answer when it was published: it may never have had the job. A record settles that."""
    own.doubt()
    with pytest.raises(UnknownJob):
        own.accept(None)
    own.accept(WAITING)
    with pytest.raises(JobLost):
        own.accept(None)


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_record_of_another_tenant_looks_missing(has_ended: bool, found: JobState):
    """A waiting record names its tenant, and a terminal one has it in the sealed result. Both give UnknownJob."""
    other = _ended(found.id, tenant="globex") if has_ended else JobRecord(State.QUEUED, "globex")
    with pytest.raises(UnknownJob):
        found.accept(other)
    assert found.record is None


def test_the_result_of_another_job_is_refused(own: JobState):
    """A sealed result names its job. In another job's record it is corrupt."""
    with pytest.raises(BadSignature, match="belongs to another job"):
        own.accept(_ended(new_job_id("m")))


def test_cancelling_follows_the_answer_of_the_broker(own: JobState):
    """A job that had ended tells from its record, and an unknown one raises."""
    assert own.cancelled(CancelOutcome.CANCELLED) == "cancelled"
    assert own.cancelled(CancelOutcome.REQUESTED) == "requested"
    with pytest.raises(JobLost):
        own.cancelled(CancelOutcome.UNKNOWN)
    assert own.cancelled(_ended(own.id, State.CANCELLED)) == "cancelled"
    with pytest.raises(Cancelled):
        own.opened().outputs()


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.EXPIRED, State.DEAD])
def test_cancelling_an_ended_job_is_too_late(own: JobState, state: State):
    """The answer brings the record: the result needs no further call."""
    assert own.cancelled(_ended(own.id, state)) == "too_late"
    assert own.record is not None


def test_cancelling_does_not_show_the_end_of_another_tenants_job(own: JobState):
    """The broker compares no tenant for an ended job. The client does, and its error is that of a missing job."""
    with pytest.raises(UnknownJob):
        JobState(own.id, "rival", POLICY, awaits_reply=False).cancelled(_ended(own.id))


def test_the_timeout_says_that_the_job_goes_on():
    """The error names the seconds, and it is a TimeoutError."""
    error = result_timeout(0.5)
    assert str(error) == "No result within 0.5 s; the job goes on"
    assert isinstance(error, TimeoutError)


@pytest.mark.parametrize("timeout", ["1", math.nan, True, [1], b"1", np.float32("nan")])
def test_a_timeout_that_is_no_number_is_refused(timeout: Any):
    """By `result` and `info` of both clients, before they ask the broker, with what was given and what is expected."""
    job_id = new_job_id("m")
    expected = f"timeout is {described(timeout)}. Expected a number of seconds, or None to wait without a limit"

    async def read_async() -> None:
        async with AsyncClient("redis://127.0.0.1:1") as client:
            await client.job(job_id).result(timeout)

    with Client("redis://127.0.0.1:1") as client:
        job = client.job(job_id)
        for read in (lambda: job.result(timeout), lambda: job.info(timeout), lambda: asyncio.run(read_async())):
            with pytest.raises(InvalidInput) as refused:
                read()
            assert str(refused.value) == expected


@pytest.mark.parametrize("timeout", [None, 0, 1.5, math.inf, -1, np.float32(1), np.int64(1)])
def test_any_number_of_seconds_is_a_timeout(timeout: object):
    """NumPy's numbers are numbers, too."""
    checked_timeout(timeout)
