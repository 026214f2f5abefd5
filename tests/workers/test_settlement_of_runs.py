"""Runs that are sealed, committed and reported as a whole: in sum what their jobs are one by one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.registry.broker.base import CommitStatus, State
from penstock.registry.envelope import Failure, Keyring
from penstock.registry.queues import lane_key
from penstock.registry.settings_sections import CacheConfig
from penstock.workers.batch_run import BatchRun, JointAnswers
from penstock.workers.cache import AnswerCache, SingleFlight
from penstock.workers.completer import CompletedRun, Completer
from penstock.workers.job import ClaimedJob
from penstock.workers.joint_results import JointResults
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.listener import Ended, NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.telemetry import BatchTelemetry
from penstock.workers.versions.tuner import AnsweredJob, BatchObservation
from penstock.workers.versions.version import ServedModel
from tests.workers.claims_of_jobs import KINDS, SIGNING, UNSIGNED, Kind, Sealer, delivery_of
from tests.workers.doubles import ready_version, run_of
from tests.workers.test_shared_headers import Reader

SETTLED = {
    **{name: KINDS[name] for name in ("plain", "another tenant", "several rows", "a reply", "retries")},
    **{name: KINDS[name] for name in ("a task", "outputs", "a trace", "an idempotency key")},
    "a reply to Celery without a task": Kind(header={"reply": lane_key("double")}),
}
"""Jobs of one model, by name."""
PLAIN = ("plain", "another tenant", "several rows", "a reply", "retries")


class OneByOne(Completer):
    """A completer that never seals a run as a whole."""

    def _joint_results(self, run: BatchRun) -> JointResults | None:
        return None


class Ends(NullListener):
    """Remembers the ends of jobs."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []

    def finished(self, ended: Sequence[Ended], at: float) -> None:
        self.ended += ended


class Observer:
    """Remembers what it saw of each run."""

    row_limit = 0

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def observe(self, batch: BatchObservation) -> None:
        answered: list[AnsweredJob] = list(batch.answered(lambda _job_id: True))
        ids = [(each.job_id, {name: values.tolist() for name, values in each.outputs.items()}) for each in answered]
        self.seen.append((batch.rows, batch.tokens, batch.seconds, ids))


class Worker:
    """The end of a worker's jobs, from their runs to the reports, at 100 s."""

    def __init__(self, completer: type[Completer], keyring: Keyring) -> None:
        self.keyring, self.sealer = keyring, Sealer(keyring)
        self.version, self.leased = ready_version(), LeasedJobs()
        self.version.observer = self.observer = Observer()
        self.listener, self.metrics = Ends(), InferenceMetrics((0.5, 1.0, 2.0, 4.0))
        answers = AnswerCache(CacheConfig(), lambda: 100.0)
        self.reader = Reader(keyring)
        self.completer = completer(
            "worker-1",
            keyring,
            {"double": ServedModel("double", self.version)},
            self.leased,
            SingleFlight(),
            answers,
            self.listener,
            self.metrics,
            client_tracebacks=False,
            now_ms=lambda: 0.0,
            clock=lambda: 100.0,
            jitter=lambda: 1.0,
        )
        self.telemetry = BatchTelemetry(self.listener, self.metrics, answers)
        self.settled: Counter[tuple[str, State]] = Counter()
        self.runs_settled_whole = 0
        self.known: list[ClaimedJob] = []

    def jobs_of(self, kinds: Sequence[str]) -> list[ClaimedJob]:
        deliveries = [
            delivery_of(self.sealer.job(SETTLED[kind]), SETTLED[kind], len(self.known) + number)
            for number, kind in enumerate(kinds)
        ]
        jobs = self.reader.open_all(deliveries, 96.5, 6500.0)
        for job in jobs:
            self.version.fit(job)
            # Sums of such numbers are exact in any order.
            job.queue_ms = 500.0
        self.known += jobs
        return jobs

    def end(self, kinds: Sequence[str], failing: int | None, lost: int | None) -> None:
        """A run of these jobs ends. failing: the number of the job that fails; lost: of the one that is not ours."""
        jobs = self.jobs_of(kinds)
        self.leased.take(jobs)
        run = run_of(self.version, *jobs)
        rows = sum(job.rows for job in jobs)
        run.answers = JointAnswers({"y": np.arange(rows, dtype=np.float32).reshape(rows, 1)}, jobs)
        if failing is not None:
            answers: list[Any] = list(run.answers)
            answers[failing % len(jobs)] = Failure("ModelError", "ValueError: no")
            run.answers = answers
        if lost is not None:
            jobs[lost % len(jobs)].is_lost = True
        run.started, run.ended, run.tokens, run.padded_tokens = 97.0, 98.0, 3, 4
        self.completer.collect([run])

    def seal(self) -> list[tuple[str, ...]]:
        """Seal what has ended; returns what goes on instead."""
        return [(type(each).__name__, each.job.header.id) for each in self.completer.seal()]

    def settle(self, statuses: dict[str, CommitStatus]) -> None:
        """The broker answers: COMMITTED, unless it is told otherwise of a job."""
        commits = self.completer.commits
        told = [statuses.get(commit.job_id, CommitStatus.COMMITTED) for commit in commits]
        settlement = self.completer.settle(told, 99.5)
        completed: list[CompletedRun] = settlement.completed
        self.runs_settled_whole += len(completed)
        self.settled.update((job.header.id, State.COMPLETED) for each in completed for job in each.jobs)
        self.settled.update((outcome.job.header.id, state) for outcome, state in settlement.outcomes)
        self.telemetry.add(settlement)
        self.telemetry.flush()
        self.completer.steer()

    def facts(self) -> dict[str, Any]:
        """All that is seen of it from outside."""
        queue = self.version.queue
        ended = [(each.header, each.state, each.runtime_s, each.error, each.version) for each in self.listener.ended]
        return {
            "settled": self.settled,
            "ended": sorted(ended, key=lambda each: each[0].id),
            "memory": (len(self.leased), self.leased.nbytes, queue.in_memory, queue.in_flight, queue.row_bytes),
            "work": (self.completer.has_work, self.completer.commits),
            "jobs": [(job.takes_room, job.is_lost, job.tries) for job in self.known],
            "batches": self.telemetry.batches,
            "observed": sorted(map(repr, self.observer.seen)),
            "metrics": sorted(
                (sample.name, sorted(sample.labels.items()), sample.value)
                for family in self.metrics.collect()
                for sample in family.samples
                if not sample.name.endswith("_created") and "seconds_since" not in sample.name
            ),
        }


RUN = st.tuples(
    st.one_of(
        st.lists(st.sampled_from(PLAIN), min_size=1, max_size=4),
        st.lists(st.sampled_from(sorted(SETTLED)), min_size=1, max_size=4),
    ),
    st.one_of(st.none(), st.none(), st.none(), st.integers(0, 3)),
    st.one_of(st.none(), st.none(), st.none(), st.integers(0, 3)),
)
STATUS = st.sampled_from(
    [*([CommitStatus.COMMITTED] * 6), CommitStatus.FENCED, CommitStatus.GONE],
)


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNING], ids=["unsigned", "signed"])
@settings(max_examples=50, derandomize=True)
@given(
    exchanges=st.lists(
        st.tuples(st.lists(RUN, min_size=1, max_size=3), st.booleans(), st.lists(STATUS, max_size=12)),
        min_size=1,
        max_size=3,
    )
)
def test_runs_are_settled_and_reported_as_their_jobs_one_by_one(
    exchanges: list[tuple[list[tuple[list[str], int | None, int | None]], bool, list[CommitStatus]]], keyring: Keyring
):
    """Several runs, some of them with a failure, a lost job or a job that is not plain, in one exchange; an exchange
    may be without an answer, and repeated with what ended meanwhile; some commits are fenced, or their job is gone."""
    together, alone = Worker(Completer, keyring), Worker(OneByOne, keyring)
    for runs, is_answered, statuses in [*exchanges, ([], True, [])]:
        told: dict[str, CommitStatus] = {}
        for worker in (together, alone):
            for run in runs:
                worker.end(*run)
        assert together.seal() == alone.seal()
        commits = [{commit.job_id: commit for commit in worker.completer.commits} for worker in (together, alone)]
        assert commits[0] == commits[1]
        assert len(commits[0]) == len(together.completer.commits)
        for commit, status in zip(alone.completer.commits, statuses, strict=False):
            told[commit.job_id] = status
        for worker in (together, alone) if is_answered else ():
            worker.settle(told)
    assert together.facts() == alone.facts()
    assert alone.runs_settled_whole == 0


@pytest.mark.parametrize("keyring", [UNSIGNED, SIGNING], ids=["unsigned", "signed"])
def test_plain_runs_are_settled_as_a_whole(keyring: Keyring):
    """Three of them in one exchange; the jobs of one with a fenced commit are settled one by one."""
    worker = Worker(Completer, keyring)
    for _ in range(3):
        worker.end(PLAIN, None, None)
    worker.seal()
    fenced = worker.known[len(PLAIN) + 1].header.id
    worker.settle({fenced: CommitStatus.FENCED})
    assert worker.runs_settled_whole == 2
    assert (sum(worker.settled.values()), len(worker.leased), worker.version.queue.in_memory) == (14, 0, 0)


def test_commits_of_runs_are_repeated_until_they_are_answered():
    """While the broker is away they are neither sealed again nor lost, and later runs go with them."""
    worker = Worker(Completer, UNSIGNED)
    worker.end(PLAIN, None, None)
    worker.seal()
    first = worker.completer.commits
    assert worker.completer.has_work
    worker.end(["plain", "plain"], None, None)
    assert worker.completer.has_work
    worker.seal()
    assert worker.completer.commits[: len(first)] == first
    assert len(worker.completer.commits) == len(first) + 2
    worker.settle({})
    assert (worker.runs_settled_whole, worker.completer.has_work, len(worker.leased)) == (2, False, 0)


def test_a_batch_that_is_settled_as_a_whole_has_its_log_line(caplog: pytest.LogCaptureFixture):
    """The same as that of a batch whose jobs are settled one by one."""
    lines = []
    for completer in (Completer, OneByOne):
        worker = Worker(completer, UNSIGNED)
        worker.end(PLAIN, None, None)
        worker.seal()
        caplog.clear()
        with caplog.at_level(logging.INFO, "penstock.server"):
            worker.settle({})
        facts = ("model", "batch", "size", "compute_ms", "job_ids")
        lines.append([(each.message, [getattr(each, fact) for fact in facts]) for each in caplog.records])
    assert lines[0] == lines[1]
    assert len(lines[0]) == 1


def test_a_job_with_the_reply_address_of_celery_is_counted_as_one_of_celery():
    """Whatever its options say: the way of a job is told by its address, also in a run that could be whole."""
    for completer in (Completer, OneByOne):
        worker = Worker(completer, UNSIGNED)
        worker.end(["a reply to Celery without a task"] * 2, None, None)
        worker.seal()
        worker.settle({})
        samples = [sample for family in worker.metrics.collect() for sample in family.samples]
        requests = {each.labels["route"]: each.value for each in samples if each.name == "infer_requests_total"}
        assert requests == {"celery": 2}
