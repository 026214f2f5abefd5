"""The completer: ended jobs become commits, other tries or nothing, and leave the worker's memory in time."""

from __future__ import annotations

import base64
import operator
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.registry.broker.base import Commit, CommitStatus, State
from penstock.registry.envelope import Failure, Keyring, Options, Retry, open_result
from penstock.registry.settings_sections import CacheConfig
from penstock.registry.tensors import Tensor, decode
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.backlog import Waiting
from penstock.workers.batch_run import BatchRun, JointAnswers, Outputs
from penstock.workers.batching.forward_size import ForwardSize
from penstock.workers.cache import AnswerCache, JobKeys, SingleFlight
from penstock.workers.completer import Completer, NextTry, Rejoin, Settlement
from penstock.workers.credit import TURN_BYTES
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.listener import Failed, NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import CachedAnswers, EncodedOutputs, JobOutcome
from penstock.workers.versions.tuner import BatchObservation
from penstock.workers.versions.version import ServedModel
from tests.payload_keys import sealing
from tests.workers.cache.equal_jobs import OpenedJobs, apart
from tests.workers.doubles import cold_version, counted, job_of, ready_version, run_of, spec_of

UNSIGNED = Keyring.parse(None)
SIGNED = Keyring.parse(f"first:{base64.b64encode(b'1' * 32).decode()}")
SEALED = sealing(SIGNED)
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

    row_limit = 0

    def __init__(self) -> None:
        self.rows: list[int] = []

    def observe(self, batch: BatchObservation) -> None:
        self.rows.append(batch.rows)


class Harness:
    """A completer for one ready version, at 100 s by its clock and at 0 ms by the broker's."""

    def __init__(self, keyring: Keyring = UNSIGNED) -> None:
        self.version = ready_version()
        self.leased, self.flights = LeasedJobs(), SingleFlight()
        self.listener, self.metrics = Retries(), InferenceMetrics((1.0,))
        self.answers = AnswerCache(CacheConfig(), lambda: 100.0)
        self.models = {"double": ServedModel("double", self.version)}
        self.completer = Completer(
            "worker-1",
            keyring,
            self.models,
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

    def run_large(self, *jobs: ClaimedJob, nbytes: int = TURN_BYTES // 2) -> BatchRun:
        """A batch of these jobs that has ended, each with so many bytes of outputs; together they are many."""
        run = self.run(*jobs)
        run.answers = [{"y": np.full(nbytes, index, np.uint8)} for index in range(len(jobs))]
        run.output_bytes = nbytes * len(jobs)
        return run

    def turn(self) -> list[str]:
        """One round trip that commits what is sealed; returns the ids of the committed jobs."""
        assert self.completer.seal() == []
        ids = [commit.job_id for commit in self.completer.commits]
        self.completer.settle([CommitStatus.COMMITTED] * len(ids), 100.0)
        return ids

    def lead(self, leader: ClaimedJob, *followers: ClaimedJob) -> None:
        """These jobs are equal."""
        for job in (leader, *followers):
            job.digest = b"equal"
            self.flights.join_all([job], self.version)
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
    run.answers = [run.answers[0], BROKEN, run.answers[2]]
    harness.completer.collect([run])
    assert (harness.version.queue.in_flight, harness.version.used_at) == (0, 99.0)
    assert harness.completer.seal() == []
    assert [commit.job_id for commit in harness.completer.commits] == [job.header.id for job in jobs]
    assert [harness.answer(index) for index in range(3)] == [2, "ModelError", 6]
    assert [commit.state for commit in harness.completer.commits] == [State.COMPLETED, State.FAILED, State.COMPLETED]


class Uncooperative:
    """An element of an output of text, as a model may make it."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def encode(self) -> bytes:
        raise self._error


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_an_outcome_that_cannot_be_sent_fails_its_job_alone(error: BaseException, harness: Harness):
    """An output whose encoding raises, and a failure with text that is no UTF-8: each is a failure, and the others
    of the batch are committed."""
    jobs = [job_of(number) for number in (1, 2, 3)]
    run = harness.run(*jobs)
    unsendable = {"y": np.array([[Uncooperative(error)]], object)}
    run.answers = [unsendable, Failure("ModelError", "ValueError: \udcff"), run.answers[2]]
    harness.completer.collect([run])
    assert harness.completer.seal() == []
    assert [harness.answer(index) for index in range(3)] == ["ModelError", "ModelError", 6]
    assert [commit.state for commit in harness.completer.commits] == [State.FAILED, State.FAILED, State.COMPLETED]
    settled = harness.completer.settle([CommitStatus.COMMITTED] * 3, 100.0)
    assert [outcome.failure is None for outcome, _ in settled.outcomes] == [False, False, True]
    assert len(harness.leased) == 0


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
    """Each has a commit of its own, directly behind the leader's."""
    leader, *followers = jobs = [job_of(7) for _ in range(3)]
    harness.lead(leader, *followers)
    harness.completer.collect([harness.run(leader)])
    assert harness.completer.seal() == []
    assert [commit.job_id for commit in harness.completer.commits] == [job.header.id for job in jobs]
    assert [harness.answer(index) for index in range(3)] == [14] * 3
    harness.completer.settle([CommitStatus.COMMITTED] * 3, 100.0)
    assert len(harness.leased) == 0


def test_followers_of_a_failed_leader_have_forwards_of_their_own(harness: Harness):
    """None of them leads the others: they would fail one after the other."""
    leader, *followers = [job_of(7) for _ in range(3)]
    harness.lead(leader, *followers)
    harness.completer.collect([harness.run(leader, answer=BROKEN)])
    assert harness.completer.seal() == [Rejoin(job, harness.version) for job in followers]
    assert [commit.job_id for commit in harness.completer.commits] == [leader.header.id]
    assert [job.digest for job in followers] == [b"", b""]


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


def test_large_results_are_sealed_a_round_trip_at_a_time(harness: Harness):
    """In order; small results of other batches never wait for them."""
    large = [job_of() for _ in range(5)]
    harness.completer.collect([harness.run_large(*large)])
    assert harness.completer.has_unsent
    turns = []
    for _ in range(3):
        small = job_of()
        harness.completer.collect([harness.run(small)])
        turns.append(harness.turn())
        assert turns[-1].pop(0) == small.header.id
    assert turns == [[job.header.id for job in part] for part in (large[:2], large[2:4], large[4:])]
    assert (harness.completer.has_work, harness.version.queue.unsent_bytes, len(harness.leased)) == (False, 0, 0)


def test_large_results_are_sent_though_each_turn_has_small_joint_ones(harness: Harness):
    """The results of a whole batch are committed as one in each turn, and beside them a part of the large ones."""
    large = [job_of() for _ in range(3)]
    harness.completer.collect([harness.run_large(*large)])
    opened, keys = OpenedJobs(UNSIGNED), JobKeys(isolates_tenants=True)
    turns = []
    for number in range(2):
        small = [opened.open(2 * number + each) for each in range(2)]
        keys.begin_all(small, "1")
        run = harness.run(*small)
        run.answers = JointAnswers({"y": np.concatenate([job.inputs["x"] for job in small]) * 2}, small)
        harness.completer.collect([run])
        assert harness.completer.seal() == []
        turns.append([commit.job_id for commit in harness.completer.commits][2:])
        settlement = harness.completer.settle([CommitStatus.COMMITTED] * (2 + len(turns[-1])), 100.0)
        assert [completed.jobs for completed in settlement.completed] == [small], "they are joint ones"
    assert turns == [[job.header.id for job in part] for part in (large[:2], large[2:])]
    assert not harness.completer.has_work


def test_no_large_result_is_sealed_while_joint_ones_wait_for_the_broker(harness: Harness):
    """It is away: a large result beside them in each turn would be another copy in memory each time."""
    opened, keys = OpenedJobs(UNSIGNED), JobKeys(isolates_tenants=True)
    small = [opened.open(number) for number in range(2)]
    keys.begin_all(small, "1")
    run = harness.run(*small)
    run.answers = JointAnswers({"y": np.concatenate([job.inputs["x"] for job in small]) * 2}, small)
    harness.completer.collect([run])
    harness.completer.seal()
    harness.completer.collect([harness.run_large(job_of(), nbytes=TURN_BYTES + 1)])
    for _ in range(2):
        harness.completer.seal()
        assert [commit.job_id for commit in harness.completer.commits] == [job.header.id for job in small]


def test_a_result_larger_than_a_round_trip_goes_alone(harness: Harness):
    """Two of them take two turns."""
    jobs = [job_of() for _ in range(2)]
    harness.completer.collect([harness.run_large(*jobs, nbytes=TURN_BYTES + 1)])
    assert [harness.turn() for _ in range(3)] == [[jobs[0].header.id], [jobs[1].header.id], []]


def test_no_further_large_result_is_sealed_while_the_broker_is_away(harness: Harness):
    """The copies of one round trip are in memory, not those of the batch."""
    jobs = [job_of() for _ in range(6)]
    harness.completer.collect([harness.run_large(*jobs)])
    for _ in range(3):
        harness.completer.seal()
        assert [commit.job_id for commit in harness.completer.commits] == [job.header.id for job in jobs[:2]]


def test_a_batch_that_is_committed_in_parts_is_reported_and_observed_once(harness: Harness):
    """With its last part, and without its outputs; also when the last part is fenced."""
    harness.version.observer = observer = Observer()
    for last in (CommitStatus.COMMITTED, CommitStatus.FENCED):
        run = harness.run_large(*[job_of() for _ in range(3)])
        harness.completer.collect([run])
        harness.completer.seal()
        begun = harness.completer.settle([CommitStatus.COMMITTED] * 2, 100.0)
        harness.completer.steer()
        assert (len(begun.outcomes), begun.by_run) == (2, {})
        harness.completer.seal()
        ended = harness.completer.settle([last], 100.0)
        assert [(each, len(outcomes)) for each, outcomes in ended.by_run.items()] == [
            (run, 3 if last is CommitStatus.COMMITTED else 2)
        ]
        assert sum(outcome.nbytes for outcomes in ended.by_run.values() for outcome in outcomes[:2]) == 0
        harness.completer.steer()
    assert observer.rows == [3, 3]


def test_followers_of_a_large_result_wait_for_their_turns(harness: Harness):
    """Each has a copy of the result, so they are not sealed together."""
    leader, *followers = jobs = [job_of(7) for _ in range(4)]
    harness.lead(leader, *followers)
    harness.completer.collect([harness.run_large(leader, nbytes=TURN_BYTES + 1)])
    assert [harness.turn() for _ in range(4)] == [[job.header.id] for job in jobs]
    assert not harness.completer.has_work


def test_large_cached_answers_wait_for_their_turns(harness: Harness):
    """A thousand hits would be a thousand copies."""
    outputs = EncodedOutputs((), bytes(TURN_BYTES // 2), "", 0)
    jobs = [job_of() for _ in range(3)]
    harness.leased.take(jobs)
    for job in jobs:
        harness.completer.add(JobOutcome(job, outputs, "cached", harness.version))
    assert [harness.turn() for _ in range(2)] == [[job.header.id for job in part] for part in (jobs[:2], jobs[2:])]


def test_a_stopping_worker_gives_up_large_results_that_it_cannot_send(harness: Harness):
    """Their jobs go back to the broker."""
    jobs = [job_of() for _ in range(3)]
    harness.completer.collect([harness.run_large(*jobs)])
    harness.turn()
    assert harness.completer.give_up_unsent() == jobs[2:]
    assert not harness.completer.has_work


def test_later_batches_are_bounded_by_the_results_of_earlier_ones(harness: Harness):
    """The expectation is that of the batch with the largest rows, and fades."""
    harness.completer.collect([harness.run_large(job_of(1, 2), nbytes=8000)])
    assert harness.version.queue.row_bytes == 4000
    harness.completer.collect([harness.run(job_of())])
    assert harness.version.queue.row_bytes == 3500


def test_a_cached_answer_does_not_keep_the_outputs_of_its_batch(harness: Harness):
    """It is a copy where the result is a view of them."""
    job = job_of()
    job.digest = b"d"
    harness.version.policy = replace(harness.version.policy, cache_ttl_s=60.0)
    run = harness.run(job)
    whole = np.zeros((10, 100_000), np.uint8)
    run.answers = [{"y": whole[3:4]}]
    harness.completer.collect([run])
    harness.completer.seal()
    cached = harness.answers.memory.get(b"d")
    assert cached is not None
    assert type(cached.body) is bytes
    assert len(cached.body) == 100_000


# Whole runs and whole claims of cached answers


class Pair:
    """Two completers alike: one has runs and cached answers whose jobs share their headers, the other has the same jobs
    with nothing known of their headers. The jobs, the answers and the keys are equal."""

    def __init__(self, keyring: Keyring = UNSIGNED, *, ttl_s: float = 60.0) -> None:
        self.whole, self.single = Harness(keyring), Harness(keyring)
        for harness in (self.whole, self.single):
            harness.version.policy = replace(harness.version.policy, cache_ttl_s=ttl_s)
        self.opened = OpenedJobs(keyring)
        self.keys = JobKeys(isolates_tenants=True)

    def each(self, jobs: Sequence[ClaimedJob]) -> list[tuple[Harness, list[ClaimedJob]]]:
        """Either completer, with its copies of these jobs."""
        self.keys.begin_all(jobs, "1")
        return [(self.whole, list(jobs)), (self.single, apart(jobs))]

    def end(self, jobs: Sequence[ClaimedJob], batch: int) -> None:
        """The first `batch` jobs are a batch that has ended; the others joined before. Jobs with equal inputs lead and
        follow each other."""
        for harness, mine in self.each(jobs):
            harness.leased.take(mine)
            harness.flights.join_all(mine, harness.version)
            run = run_of(harness.version, *mine[:batch])
            rows = np.concatenate([job.inputs["x"] for job in mine[:batch]])
            run.answers = JointAnswers({"y": rows * 2, "z": (rows * 3).astype(np.int64)}, mine[:batch])
            run.started, run.ended = 98.0, 99.0
            harness.completer.collect([run])

    def find(self, jobs: Sequence[ClaimedJob], answers: Sequence[EncodedOutputs]) -> None:
        """The cache has answered these jobs of one claim."""
        for harness, mine in self.each(jobs):
            harness.leased.take(mine)
            harness.completer.add_cached(CachedAnswers(harness.version, mine, list(answers)))

    def sealed(self) -> list[Commit]:
        """What both commit, after a comparison."""
        assert self.whole.completer.seal() == self.single.completer.seal() == []
        assert self.whole.completer.commits == self.single.completer.commits
        return self.whole.completer.commits

    def settle(self, statuses: Sequence[CommitStatus]) -> Settlement:
        """The answer of the broker, for both; what is left of them is compared. Returns that of the whole."""
        for each in (self.whole, self.single):
            each.completer.keep_answers()
        whole, single = (each.completer.settle(statuses, 99.5) for each in (self.whole, self.single))
        ids = [job.header.id for completed in whole.completed for job in completed.jobs]
        ids += [job.header.id for found in whole.from_cache for job in found.jobs]
        ids += [outcome.job.header.id for outcome, _ in whole.outcomes]
        assert sorted(ids) == sorted(outcome.job.header.id for outcome, _ in single.outcomes)
        for harness in (self.whole, self.single):
            assert (harness.completer.commits, harness.completer.has_work) == ([], False)
            assert (len(harness.leased), harness.version.queue.in_memory) == (0, 0)
            assert (harness.flights._leaders, harness.flights._followers) == ({}, {})
        assert operator.eq(*(kept(each) for each in (self.whole, self.single)))
        assert operator.eq(
            *(counted(each.metrics, "penstock_fenced", "1", "queue") for each in (self.whole, self.single))
        )
        return whole


def kept(harness: Harness) -> dict[bytes, EncodedOutputs]:
    """The cached answers by their keys."""
    return {key: answer for key, (answer, *_) in harness.answers.memory._entries.items()}


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNED, SEALED], ids=["unsigned", "signed", "sealed"])
def test_a_run_with_followers_is_committed_kept_and_settled_as_a_whole(keyring: Keyring):
    """As its jobs one by one: the same bytes, each follower behind its leader, and the same cached answers."""
    pair = Pair(keyring)
    batch = [pair.opened.open(number, claimed=number, reply=reply) for number, reply in ((1, ""), (2, ""), (3, "r"))]
    followers = [pair.opened.open(2, claimed=98.5, reply=reply) for reply in ("", "s")]
    pair.end([*batch, *followers], 3)
    commits = pair.sealed()
    order = [batch[0], batch[1], *followers, batch[2]]
    assert [commit.job_id for commit in commits] == [job.header.id for job in order]
    settlement = pair.settle([CommitStatus.COMMITTED] * 5)
    assert [completed.jobs for completed in settlement.completed] == [order]
    assert (settlement.outcomes, settlement.by_run) == ([], {})
    assert settlement.completed[0].totals_s == [job.queue_ms / 1000 + 100.0 - job.claimed for job in order]
    assert set(kept(pair.whole)) == {job.digest for job in batch}
    assert [bytes(each.body)[:4] for each in kept(pair.whole).values()] == [np.float32(y).tobytes() for y in (2, 4, 6)]
    assert all(type(each.body) is bytes for each in kept(pair.whole).values())


def test_batches_learn_from_the_jobs_of_a_run_without_its_followers():
    """A follower did not wait for the batch."""
    pair = Pair()
    seen: list[int] = []
    queue = pair.whole.version.queue
    queue.observe = lambda batch, forward_s, totals_s, now: seen.append(len(totals_s))  # type: ignore[method-assign]
    pair.end([pair.opened.open(number) for number in (1, 2, 1, 1)], 2)
    pair.sealed()
    pair.settle([CommitStatus.COMMITTED] * 4)
    pair.whole.completer.steer()
    assert seen == [2]


@pytest.mark.parametrize("why", ["not active", "other form", "uncached", "without a digest"])
def test_a_run_that_may_not_be_kept_is_not_kept_as_a_whole_either(why: str):
    """Its jobs are committed all the same."""
    pair = Pair(ttl_s=0.0 if why == "uncached" else 60.0)
    jobs = [pair.opened.open(number) for number in (1, 2)]
    pair.end(jobs, 2)
    for harness in (pair.whole, pair.single):
        (run,) = harness.completer._joint
        if why == "not active":
            harness.models["double"].active = None
        elif why == "other form":
            run.generation += 1
        elif why == "without a digest":
            for job in run.jobs:
                harness.flights.end(job)
                job.digest = b""
    assert len(pair.sealed()) == 2
    assert len(pair.settle([CommitStatus.COMMITTED] * 2).completed) == 1
    assert kept(pair.whole) == {}


@pytest.mark.parametrize("status", [CommitStatus.FENCED, CommitStatus.GONE])
@pytest.mark.parametrize("place", range(4))
def test_one_discarded_commit_of_a_run_discards_no_other(place: int, status: CommitStatus):
    """Leader or follower: the others are settled one by one, by their batch."""
    pair = Pair()
    pair.end([pair.opened.open(number) for number in (1, 2, 2, 2)], 2)
    commits = pair.sealed()
    statuses = [status if index == place else CommitStatus.COMMITTED for index in range(4)]
    settlement = pair.settle(statuses)
    assert settlement.completed == []
    left = [commit.job_id for index, commit in enumerate(commits) if index != place]
    assert [outcome.job.header.id for outcome, _ in settlement.outcomes] == left
    assert [outcome.how for outcome, _ in settlement.outcomes] == [
        how for index, how in enumerate(("ran", "ran", "followed", "followed")) if index != place
    ]
    ((run, outcomes),) = settlement.by_run.items()
    assert (run is not None, len(outcomes)) == (True, 3)


@pytest.mark.parametrize("odd", ["lost leader", "second delivery", "task", "large copies", "lost follower"])
def test_a_run_with_an_odd_job_is_sealed_one_by_one(odd: str, monkeypatch: pytest.MonkeyPatch):
    """Nothing has happened to its flights by then: a lost leader's followers rejoin, the others get the answer."""
    pair = Pair()
    options = Options(lane=odd == "task")
    leader = pair.opened.open(1, attempt=2 if odd == "second delivery" else 1)
    follower, other = pair.opened.open(1, options=options), pair.opened.open(2)
    leader.is_lost, follower.is_lost = odd == "lost leader", odd == "lost follower"
    pair.end([leader, other, follower], 2)
    if odd == "large copies":
        monkeypatch.setattr("penstock.workers.joint_results.TURN_BYTES", 8)
    if odd == "lost leader":
        for harness in (pair.whole, pair.single):
            assert [(type(each), each.job.header.id) for each in harness.completer.seal()] == [
                (Rejoin, follower.header.id)
            ]
            assert [commit.job_id for commit in harness.completer.commits] == [other.header.id]
        return
    assert [commit.job_id for commit in pair.sealed()] == [job.header.id for job in (leader, follower, other)]
    assert pair.settle([CommitStatus.COMMITTED] * 3).completed == []


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNED, SEALED], ids=["unsigned", "signed", "sealed"])
def test_cached_answers_of_a_claim_are_committed_and_settled_as_a_whole(keyring: Keyring):
    """As one by one, byte by byte: of answers with other descriptions, and for jobs with other headers."""
    pair = Pair(keyring)
    version = pair.whole.version
    shapes = [(Tensor("y", "float32", (rows, 1)),) for rows in (1, 2)]
    answers = [
        EncodedOutputs(shapes[index % 2], np.full(1 + index % 2, index, np.float32).tobytes(), version.content_hash, 0)
        for index in range(6)
    ]
    for _ in range(2):
        jobs = [pair.opened.open(index, claimed=97.0, reply="r" if index > 3 else "") for index in range(6)]
        pair.find(jobs, answers)
        commits = pair.sealed()
        headers = [open_result(commit.sealed, keyring)[0] for commit in commits]
        assert [header.id for header in headers] == [job.header.id for job in jobs]
        assert all(header.is_cached and header.batch_size == 0 for header in headers)
        settlement = pair.settle([CommitStatus.COMMITTED] * 6)
        assert settlement.outcomes == []
        (found,) = settlement.from_cache
        assert (found.version, found.jobs) == (version, jobs)
        assert found.totals_s == pytest.approx([job.queue_ms / 1000 + 3.0 for job in jobs])


@pytest.mark.parametrize("odd", ["second delivery", "lost", "large"])
def test_odd_jobs_with_cached_answers_are_sealed_one_by_one(odd: str):
    """A claim with one of them is settled job by job."""
    pair = Pair()
    nbytes = 128 * 1024 if odd == "large" else 4
    answer = EncodedOutputs((Tensor("y", "uint8", (1, nbytes)),), bytes(nbytes), pair.whole.version.content_hash, 0)
    jobs = [pair.opened.open(1), pair.opened.open(1, attempt=2 if odd == "second delivery" else 1)]
    jobs[1].is_lost = odd == "lost"
    pair.find(jobs, [answer, answer])
    assert pair.whole.completer.has_unsent is (odd == "large")
    commits = pair.sealed()
    assert [commit.job_id for commit in commits] == [job.header.id for job in jobs[: 1 if odd == "lost" else 2]]
    settlement = pair.settle([CommitStatus.COMMITTED] * len(commits))
    assert (settlement.from_cache, len(settlement.outcomes)) == ([], len(commits))


def test_one_discarded_commit_of_cached_answers_discards_no_other():
    """It is counted, and every job leaves the memory."""
    pair = Pair()
    answer = EncodedOutputs((Tensor("y", "uint8", (1, 1)),), b"1", pair.whole.version.content_hash, 0)
    jobs = [pair.opened.open(1) for _ in range(3)]
    pair.find(jobs, [answer] * 3)
    pair.sealed()
    settlement = pair.settle([CommitStatus.COMMITTED, CommitStatus.FENCED, CommitStatus.COMMITTED])
    assert settlement.from_cache == []
    assert [outcome.job for outcome, _ in settlement.outcomes] == [jobs[0], jobs[2]]
    assert counted(pair.whole.metrics, "penstock_fenced", "1", "queue") == 1


def test_runs_cached_answers_and_outcomes_are_settled_by_their_own_statuses():
    """All three in one commit; one of each is fenced."""
    pair = Pair()
    answer = EncodedOutputs((Tensor("y", "uint8", (1, 1)),), b"1", pair.whole.version.content_hash, 0)
    ran, found, refused = ([pair.opened.open(each + 10 * kind) for each in range(2)] for kind in range(3))
    pair.end(ran, 2)
    pair.find(found, [answer, answer])
    pair.whole.completer.refuse([Waiting(job, None) for job in refused], EXPIRED)
    assert pair.whole.completer.seal() == []
    commits = pair.whole.completer.commits
    ids = [commit.job_id for commit in commits]
    assert sorted(ids) == sorted(job.header.id for job in (*ran, *found, *refused))
    fenced = {jobs[1].header.id for jobs in (ran, found, refused)}
    statuses = [CommitStatus.FENCED if each in fenced else CommitStatus.COMMITTED for each in ids]
    settlement = pair.whole.completer.settle(statuses, 99.5)
    assert {outcome.job.header.id: state for outcome, state in settlement.outcomes} == {
        ran[0].header.id: State.COMPLETED,
        found[0].header.id: State.COMPLETED,
        refused[0].header.id: State.EXPIRED,
    }
    assert len(pair.whole.leased) == 0


def test_a_cached_text_waits_for_its_events(harness: Harness):
    """Subscribers get the text before the end of its job; while the broker is away, the job is kept."""
    version = cold_version(spec_of(streams=True), 1)
    job = job_of(1)
    outcome = JobOutcome(job, EncodedOutputs((), b"", "d" * 64, 0), "cached", version)
    harness.leased.take([job])
    harness.completer.add(outcome)
    assert harness.completer.has_work
    assert harness.turn() == []
    assert harness.completer.take_texts() == [outcome]
    harness.completer.keep_texts([outcome])
    harness.completer.add_written(harness.completer.take_texts())
    assert harness.completer.take_texts() == []
    assert harness.turn() == [job.header.id]
    assert not harness.completer.has_work


def test_a_claim_of_cached_texts_waits_for_its_events(harness: Harness):
    """Also where all of its jobs were answered together."""
    version = cold_version(spec_of(streams=True), 1)
    jobs = [job_of(number) for number in (1, 2)]
    answer = EncodedOutputs((), b"", "d" * 64, 0)
    harness.completer.add_cached(CachedAnswers(version, jobs, [answer, answer]))
    assert harness.turn() == []
    assert [outcome.job for outcome in harness.completer.take_texts()] == jobs
