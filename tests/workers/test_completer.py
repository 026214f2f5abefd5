"""The completer: ended jobs become commits, other tries or nothing, and leave the worker's memory in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.registry.broker.base import CommitStatus, State
from penstock.registry.envelope import Failure, Keyring, Options, Retry, open_result
from penstock.registry.settings import CacheConfig
from penstock.registry.tensors import decode
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.backlog import Waiting
from penstock.workers.batch_run import BatchRun, Outputs
from penstock.workers.batching.forward_size import ForwardSize
from penstock.workers.cache import AnswerCache, SingleFlight
from penstock.workers.completer import Completer, NextTry, Rejoin
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.listener import Failed, NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import JobOutcome
from penstock.workers.versions.tuner import BatchObservation
from penstock.workers.versions.version import ServedModel
from tests.workers.doubles import counted, job_of, ready_version, run_of

UNSIGNED = Keyring.parse(None)
BROKEN = Failure("ModelError", "ValueError: not now")
TWICE = Options(retry=Retry(attempts=2, backoff_s=4, longest_s=60))


class Retries(NullListener):
    """Remembers which jobs are tried again."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def retried(self, failed: Sequence[Failed], at: float) -> None:
        self.ids += [each.header.id for each in failed]


class Observer:
    """Remembers the rows of each batch that it saw."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def observe(self, batch: BatchObservation) -> None:
        self.rows.append(batch.rows)


class Harness:
    """A completer for one ready version, at 100 s by its clock and at 0 ms by the broker's."""

    def __init__(self) -> None:
        self.version = ready_version()
        self.leased, self.flights = LeasedJobs(), SingleFlight()
        self.listener, self.metrics = Retries(), InferenceMetrics((1.0,))
        self.answers = AnswerCache(CacheConfig(), lambda: 100.0)
        models = {"double": ServedModel("double", self.version)}
        self.completer = Completer(
            "worker-1",
            UNSIGNED,
            models,
            self.leased,
            self.flights,
            self.answers,
            self.listener,
            self.metrics,
            client_tracebacks=False,
            now_ms=lambda: 0.0,
            clock=lambda: 100.0,
            jitter=lambda: 1.0,
        )

    def run(self, *jobs: ClaimedJob, answer: Failure | None = None) -> BatchRun:
        """A batch of these jobs that has ended: with this failure, or with twice their inputs."""
        self.leased.take(jobs)
        run = run_of(self.version, *jobs)
        run.answers = [answer or {"y": job.inputs["x"] * 2} for job in jobs]
        run.started, run.ended = 98.0, 99.0
        return run

    def lead(self, leader: ClaimedJob, *followers: ClaimedJob) -> None:
        """These jobs are equal."""
        for job in (leader, *followers):
            job.digest = b"equal"
            self.flights.join(job, self.version)
        self.leased.take(followers)

    def answer(self, index: int) -> float | str:
        """The answer in the commit at `index`: the first number of `y`, or the code of the failure."""
        header, body = open_result(self.completer.commits[index].sealed, UNSIGNED)
        return header.error.code if header.error else float(decode(header.content, body)["y"][0, 0])


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_each_job_of_an_ended_run_gets_its_own_commit(harness: Harness):
    """In the order of the batch; the version has one batch fewer in flight, and is used as of its end."""
    jobs = [job_of(number) for number in (1, 2, 3)]
    run = harness.run(*jobs)
    run.answers[1] = BROKEN
    harness.completer.collect([run])
    assert (harness.version.queue.in_flight, harness.version.used_at) == (0, 99.0)
    assert harness.completer.seal() == []
    assert [commit.job_id for commit in harness.completer.commits] == [job.header.id for job in jobs]
    assert [harness.answer(index) for index in range(3)] == [2, "ModelError", 6]
    assert [commit.state for commit in harness.completer.commits] == [State.COMPLETED, State.FAILED, State.COMPLETED]


def test_a_job_that_a_model_thread_sorted_out_did_not_run(harness: Harness):
    """It was cancelled or late right before the forward: its result tells of no batch."""
    harness.completer.collect([harness.run(job_of(), answer=CANCELLED), harness.run(job_of(), answer=EXPIRED)])
    harness.completer.seal()
    assert [commit.state for commit in harness.completer.commits] == [State.CANCELLED, State.EXPIRED]
    headers = [open_result(commit.sealed, UNSIGNED)[0] for commit in harness.completer.commits]
    assert [header.batch_size for header in headers] == [0, 0]


def test_commits_stay_until_the_broker_has_answered_them(harness: Harness):
    """Sealing again adds the jobs that ended meanwhile and repeats nothing."""
    first, second = job_of(), job_of()
    harness.completer.collect([harness.run(first)])
    harness.completer.seal()
    harness.completer.refuse([Waiting(second, None)], EXPIRED)
    harness.completer.seal()
    assert [commit.job_id for commit in harness.completer.commits] == [first.header.id, second.header.id]
    assert harness.completer.has_work
    harness.completer.settle([CommitStatus.COMMITTED] * 2, 100.0)
    assert (harness.completer.commits, harness.completer.has_work) == ([], False)


def test_every_answer_of_the_broker_frees_the_room_and_only_commits_count(harness: Harness):
    """A fenced and a gone job leave the memory too; they are in no settlement, and the fenced one is counted."""
    jobs = [job_of() for _ in range(3)]
    run = harness.run(*jobs)
    harness.completer.collect([run])
    harness.completer.seal()
    assert (len(harness.leased), harness.version.queue.in_memory) == (3, 3)
    settlement = harness.completer.settle([CommitStatus.COMMITTED, CommitStatus.FENCED, CommitStatus.GONE], 97.5)
    assert [(outcome.job, state) for outcome, state in settlement.outcomes] == [(jobs[0], State.COMPLETED)]
    assert [(each, len(outcomes)) for each, outcomes in settlement.by_run.items()] == [(run, 1)]
    assert (settlement.commit_s, settlement.at) == (2.5, 100.0)
    assert (len(harness.leased), harness.version.queue.in_memory) == (0, 0)
    assert counted(harness.metrics, "penstock_fenced", "1", "queue") == 1


def test_a_failed_try_goes_on_after_its_pause_while_its_policy_allows(harness: Harness):
    """The job stays leased and is reported; the last failure of its policy is its end."""
    job = job_of(options=TWICE, expires_ms=4000)
    harness.completer.collect([harness.run(job, answer=BROKEN)])
    assert harness.completer.seal() == [NextTry(job, harness.version, 4.0)]
    assert (harness.completer.commits, len(harness.leased), job.tries) == ([], 1, 2)
    assert harness.listener.ids == [job.header.id]
    assert counted(harness.metrics, "penstock_retried", "1", "queue") == 1
    harness.completer.collect([harness.run(job, answer=BROKEN)])
    assert harness.completer.seal() == []
    assert harness.answer(0) == "ModelError"


@pytest.mark.parametrize("why", ["succeeded", "refused", "cancelled", "lost", "no time"])
def test_there_is_no_other_try(why: str, harness: Harness):
    """Not for an answer, nor for a job that did not run, was withdrawn, or would begin after its time."""
    job = job_of(options=TWICE, expires_ms=3999 if why == "no time" else 4000)
    job.is_cancelled, job.is_lost = why == "cancelled", why == "lost"
    if why == "refused":
        harness.completer.refuse([Waiting(job, harness.version)], BROKEN)
    else:
        harness.completer.collect([harness.run(job, answer=None if why == "succeeded" else BROKEN)])
    assert harness.completer.seal() == []
    assert len(harness.completer.commits) == (why != "lost")


def test_followers_get_the_answer_of_their_leader(harness: Harness):
    """Each has a commit of its own, directly behind the leader's; a failure is shared too."""
    for answer, said in ((None, 14), (BROKEN, "ModelError")):
        leader, *followers = jobs = [job_of(7) for _ in range(3)]
        harness.lead(leader, *followers)
        harness.completer.collect([harness.run(leader, answer=answer)])
        assert harness.completer.seal() == []
        assert [commit.job_id for commit in harness.completer.commits] == [job.header.id for job in jobs]
        assert [harness.answer(index) for index in range(3)] == [said] * 3
        harness.completer.settle([CommitStatus.COMMITTED] * 3, 100.0)
        assert len(harness.leased) == 0


@pytest.mark.parametrize("end", ["cancelled", "expired", "lost", "tried again"])
def test_followers_go_their_own_way_when_their_leader_has_no_answer_for_them(end: str, harness: Harness):
    """Its cancellation, its deadline, its lease and its pause are its own."""
    leader, follower = job_of(7, options=TWICE), job_of(7, options=TWICE)
    harness.lead(leader, follower)
    leader.is_lost = end == "lost"
    answer = {"cancelled": CANCELLED, "expired": EXPIRED, "lost": None, "tried again": BROKEN}[end]
    harness.completer.collect([harness.run(leader, answer=answer)])
    going_on = harness.completer.seal()
    assert going_on[0] == Rejoin(follower, harness.version)
    assert going_on[1:] == ([NextTry(leader, harness.version, 4.0)] if end == "tried again" else [])
    assert len(harness.completer.commits) == (end in ("cancelled", "expired"))


def test_a_lost_job_leaves_without_a_commit(harness: Harness):
    """Another worker has it: nothing is sealed or cached, and its room is free."""
    job = job_of()
    job.digest, job.is_lost = b"d", True
    harness.completer.collect([harness.run(job)])
    harness.completer.seal()
    assert (harness.completer.commits, harness.completer.has_work) == ([], False)
    assert (len(harness.leased), harness.version.queue.in_memory, len(harness.answers.memory)) == (0, 0, 0)


def test_a_forward_that_did_not_fit_caps_the_next_batches_unless_one_job_was_at_fault(harness: Harness):
    """Eight of sixteen rows did not fit: batches have four; one row that did not fit caps nothing."""
    single, many = harness.run(job_of()), harness.run(job_of())
    single.misfits, many.misfits = [ForwardSize(0, 1)], [ForwardSize(0, 8)]
    harness.completer.collect([single])
    assert harness.version.queue.max_rows == 16
    harness.completer.collect([many])
    assert harness.version.queue.max_rows == 4
    assert counted(harness.metrics, "penstock_out_of_memory", "1", "") == 2


def test_an_observer_sees_each_committed_run_of_the_form_in_use_once(harness: Harness):
    """Neither a fenced run nor a run of the model as built is observed."""
    harness.version.observer = observer = Observer()
    committed, fenced, as_built = harness.run(job_of(1, 2)), harness.run(job_of(1, 2, 3)), harness.run(job_of())
    as_built.is_as_built = True
    harness.completer.collect([committed, fenced, as_built])
    harness.completer.seal()
    harness.completer.settle([CommitStatus.COMMITTED, CommitStatus.FENCED, CommitStatus.COMMITTED], 100.0)
    assert observer.rows == [], "observers wait until the next batches are on their way"
    harness.completer.steer()
    harness.completer.steer()
    assert observer.rows == [2]


def test_an_outcome_without_a_run_is_committed_too(harness: Harness):
    """A cached or refused job that the drain adds: its room is freed where it has a version."""
    outputs: Outputs = {"y": np.ones((1, 1), np.float32)}
    job = job_of()
    harness.version.queue.reserve(job)
    harness.completer.add(JobOutcome(job, outputs, "cached", harness.version))
    harness.completer.seal()
    settlement = harness.completer.settle([CommitStatus.COMMITTED], 100.0)
    assert [len(outcomes) for outcomes in settlement.by_run.values()] == [1]
    assert list(settlement.by_run) == [None]
    assert harness.version.queue.in_memory == 0
