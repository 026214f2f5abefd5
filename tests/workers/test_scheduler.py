"""The scheduler: which batch goes to a model thread next, which is taken back, and when a forward hangs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from penstock.registry.envelope import JobHeader
from penstock.registry.queues import Priority
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.workers.backlog import Backlog, Waiting
from penstock.workers.batch_run import BatchRun
from penstock.workers.executor import Executor
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.listener import NullListener
from penstock.workers.scheduler import Scheduler
from penstock.workers.versions.version import ServedVersion, VersionState
from tests.workers.doubles import job_of, ready_version

LIMIT_S = 5.0


class Starts(NullListener):
    """Remembers which jobs were started, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        self.batches.append([header.id for header in jobs])


class Harness:
    """A scheduler over these versions; its model threads are the test."""

    def __init__(self, *versions: ServedVersion, threads: int = 1) -> None:
        self.now = 1000.0
        self.broker_now = 0.0
        self.listener = Starts()
        turns = deque(versions)
        self.backlog = Backlog(turns)
        too_late = Scheduler.too_late_check(lambda: self.broker_now)
        self.executor = Executor(threads, lambda: None, too_late, lambda _: None, lambda: self.now)
        self.scheduler = Scheduler(
            self.backlog,
            self.executor,
            turns,
            self.listener,
            lambda _job, _touch: (_ for _ in ()).throw(RuntimeError("nothing streams here")),
            broker_now=lambda: self.broker_now,
            clock=lambda: self.now,
        )

    def add(self, version: ServedVersion, count: int = 1, priority: Priority = Priority.NORMAL) -> list[ClaimedJob]:
        jobs = [job_of(model=version.name, priority=priority, claimed=self.now) for _ in range(count)]
        self.backlog.add(version, jobs)
        return jobs

    def begin(self, seat: str = "a") -> BatchRun:
        run = self.executor.begin(seat)
        assert run is not None
        return run

    def end(self, run: BatchRun, seat: str = "a") -> None:
        self.executor.finish(seat, run)
        run.version.queue.in_flight -= 1

    def forward(self) -> list[ClaimedJob]:
        """The jobs of the next forward."""
        assert self.scheduler.dispatch() == []
        run = self.begin()
        self.end(run)
        return run.jobs


def test_an_idle_thread_gets_a_batch_at_once_and_a_busy_one_has_the_next_when_it_is_due():
    """While a forward runs, one batch is formed ahead: at the end of its wait, or when it is full."""
    version = ready_version(max_rows=2)
    harness = Harness(version)
    harness.add(version)
    harness.scheduler.dispatch()
    run = harness.begin()
    (second,) = harness.add(version)
    harness.scheduler.dispatch()
    assert harness.executor.waiting() == []
    due = harness.scheduler.next_wakeup()
    assert 0 < due - harness.now - version.policy.limits.max_wait_s < 0.001
    harness.now = due
    harness.add(version, 4)
    harness.scheduler.dispatch()
    (ahead,) = harness.executor.waiting()
    assert second in ahead.jobs
    harness.scheduler.dispatch()
    assert len(harness.executor.waiting()) == 1, "no second batch is formed ahead"
    assert [len(batch) for batch in harness.listener.batches] == [1, 2]
    assert version.queue.in_flight == 2
    harness.end(run)


def quick_version(name: str = "double") -> ServedVersion:
    """A version whose forwards were short of late, and may run on any thread."""
    version = ready_version(name=name)
    version.runtime.may_change_threads = True  # type: ignore[misc]
    for _ in range(100):
        version.queue.note_forward(0.0001)
    return version


def test_a_short_forward_is_kept_for_the_io_thread():
    """No model thread is needed, and no other batch is formed before it has run, also not for other models."""
    version, other = quick_version(), quick_version("other")
    harness = Harness(version, other)
    jobs = harness.add(version, 40)
    harness.add(other, 3)
    sizes = []
    while harness.scheduler.dispatch() == [] and harness.executor.kept is not None:
        assert harness.executor.waiting() == [harness.executor.kept]
        assert harness.scheduler.dispatch() == []
        assert harness.executor.waiting() == [harness.executor.kept]
        harness.executor.run_kept()
        (run,) = harness.executor.take_done()
        run.version.queue.in_flight -= 1
        sizes.append((run.batch.key.model, len(run.answers)))
    assert sizes == [("double", 16), ("other", 3), ("double", 16), ("double", 8)]
    assert len(jobs) == 40
    assert (harness.executor.waiting(), harness.executor.running()) == ([], [])


def test_a_batch_that_is_kept_can_be_recalled():
    """It does not run then, and its jobs are in the next one."""
    version = quick_version()
    harness = Harness(version)
    jobs = harness.add(version, 4)
    harness.scheduler.dispatch()
    harness.scheduler.recall_all()
    harness.executor.run_kept()
    assert (harness.executor.take_done(), harness.executor.waiting()) == ([], [])
    harness.add(version)
    harness.scheduler.dispatch()
    harness.executor.run_kept()
    (run,) = harness.executor.take_done()
    assert run.jobs[:4] == jobs
    assert len(run.jobs) == 5


def test_a_model_thread_that_is_awake_may_take_the_batch_that_is_kept():
    """It had a token for a batch that was recalled. The I/O thread then runs nothing, and forms the next one."""
    version = quick_version()
    harness = Harness(version)
    harness.add(version)
    harness.scheduler.dispatch()
    run = harness.begin()
    harness.executor.run_kept()
    assert harness.executor.running() == [run]
    harness.end(run)
    harness.add(version)
    harness.scheduler.dispatch()
    assert harness.executor.kept is not None


@pytest.mark.parametrize(("interrupted", "is_kept"), [(1, True), (2, False)])
def test_one_interrupted_forward_changes_nothing(interrupted: int, is_kept: bool):
    """The system stops any thread now and then. A second one of late says that forwards are not short any more."""
    version = quick_version()
    harness = Harness(version)
    for _ in range(interrupted):
        version.queue.note_forward(0.005)
        version.queue.note_forward(0.0001)
    harness.add(version)
    harness.scheduler.dispatch()
    assert (harness.executor.kept is not None) is is_kept
    assert len(harness.executor.waiting()) == 1


@pytest.mark.parametrize(
    "why", ["long of late", "unknown", "formed ahead", "two threads", "bound to its thread", "suspect"]
)
def test_any_other_forward_is_handed_to_a_model_thread(why: str):
    """A long or unknown forward, one behind another one, one beside others, one of a model that stays, a suspect's."""
    version, other = quick_version(), ready_version(name="other")
    harness = Harness(version, other, threads=2 if why == "two threads" else 1)
    if why == "long of late":
        version.queue.note_forward(0.5)
    elif why == "unknown":
        version.queue.forget_forwards()
    elif why == "formed ahead":
        harness.add(other)
        harness.scheduler.dispatch()
        harness.begin()
        version.queue.row_bytes = 4
    elif why == "bound to its thread":
        version.runtime.may_change_threads = False  # type: ignore[misc]
    if why == "suspect":
        harness.backlog.add_suspect(version, job_of(crashes=1))
    else:
        harness.add(version, 16 if why == "formed ahead" else 1)
    harness.scheduler.dispatch()
    assert harness.executor.kept is None
    assert [run.version for run in harness.executor.waiting()] == [version]


def test_versions_take_turns():
    """A version with many jobs has one batch, then the version with one job has its own."""
    flooded, calm = ready_version(max_rows=2), ready_version(max_rows=2, name="calm")
    harness = Harness(flooded, calm)
    harness.add(flooded, 6)
    harness.add(calm, 1)
    harness.now += 1
    assert [harness.forward()[0].header.model for _ in range(4)] == ["double", "calm", "double", "double"]


def test_a_version_runs_no_more_forwards_than_its_concurrency():
    """Of two threads it gets one, and no batch is formed ahead that the other thread might take first."""
    version, other = ready_version(max_rows=1), ready_version(max_rows=1, name="other")
    harness = Harness(version, other, threads=2)
    harness.add(version, 3)
    harness.scheduler.dispatch()
    assert (len(harness.executor.waiting()), harness.executor.idle) == (1, 1)
    harness.begin("a")
    harness.add(other)
    harness.scheduler.dispatch()
    harness.begin("b")
    harness.scheduler.dispatch()
    assert (harness.executor.waiting(), harness.executor.idle) == ([], 0)


def test_a_more_urgent_job_dissolves_the_batch_that_was_formed_ahead():
    """The urgent job runs next, the recalled job keeps its place behind it; an equally urgent job changes nothing."""
    version = ready_version(max_rows=1)
    harness = Harness(version)
    harness.add(version)
    harness.scheduler.dispatch()
    run = harness.begin()
    (ahead,) = harness.add(version)
    harness.scheduler.dispatch()
    (equal,) = harness.add(version)
    harness.scheduler.dispatch()
    assert [each.jobs for each in harness.executor.waiting()] == [[ahead]]
    (urgent,) = harness.add(version, priority=Priority.CRITICAL)
    harness.scheduler.dispatch()
    assert [each.jobs for each in harness.executor.waiting()] == [[urgent]]
    harness.end(run)
    assert [harness.forward() for _ in range(3)] == [[urgent], [ahead], [equal]]
    assert version.queue.in_flight == 0


def test_every_batch_that_has_not_begun_can_be_taken_back():
    """Its jobs are pending again, and the running batch goes on."""
    version = ready_version(max_rows=1)
    harness = Harness(version)
    harness.add(version, 3)
    harness.scheduler.dispatch()
    harness.begin()
    harness.scheduler.recall_all()
    assert harness.executor.waiting() == []
    assert (len(version.queue.batcher), version.queue.in_flight, len(harness.executor.running())) == (2, 1, 1)


def test_a_job_whose_time_has_passed_takes_no_place_in_a_batch():
    """It is returned with its version, and the jobs beside it run."""
    version = ready_version(max_rows=2)
    harness = Harness(version)
    late, sound = job_of(expires_ms=9), job_of(expires_ms=10)
    suspect = job_of(expires_ms=9, crashes=1)
    harness.backlog.add(version, [late, sound])
    harness.broker_now = 10.0
    assert harness.scheduler.dispatch() == [Waiting(late, version)]
    run = harness.begin()
    assert run.jobs == [sound]
    harness.end(run)
    harness.backlog.add_suspect(version, suspect)
    assert harness.scheduler.dispatch() == [Waiting(suspect, version)]


def test_suspects_and_other_jobs_take_turns_and_each_suspect_runs_alone_as_built():
    """Also between two suspects there is one batch of other jobs; nothing is formed ahead meanwhile."""
    version = ready_version(max_rows=4)
    harness = Harness(version, threads=2)
    suspects = [job_of(crashes=1) for _ in range(2)]
    for job in suspects:
        harness.backlog.add_suspect(version, job)
    others = harness.add(version, 6)
    runs = []
    for _ in range(4):
        harness.scheduler.dispatch()
        runs.append(harness.begin())
        harness.scheduler.dispatch()
        assert harness.executor.waiting() == [] or not harness.backlog.suspects
        assert harness.scheduler.next_wakeup() == inf
        harness.end(runs[-1])
    assert [run.jobs for run in runs] == [suspects[:1], others[:4], suspects[1:], others[4:]]
    assert [run.is_as_built for run in runs] == [True, False, True, False]


def test_a_suspect_whose_version_is_loading_delays_no_other_job():
    """It keeps waiting with its room, and the jobs of another version run."""
    loading, ready = ready_version(), ready_version(name="ready")
    loading.state = VersionState.LOADING
    harness = Harness(loading, ready)
    suspect = job_of(crashes=1)
    harness.backlog.add_suspect(loading, suspect)
    others = harness.add(ready, 2)
    assert harness.forward() == others
    assert (harness.backlog.suspects, loading.queue.in_memory) == (1, 1)
    loading.state = VersionState.READY
    assert harness.forward() == [suspect]


def test_behind_the_last_suspect_a_batch_that_is_kept_is_the_only_one():
    """Two batches are due: a model thread would take the second one beside it, and nobody would run the first one."""
    version = quick_version()
    version.queue.row_bytes = 4
    harness = Harness(version)
    suspect = job_of(crashes=1)
    harness.backlog.add_suspect(version, suspect)
    others = harness.add(version, 32)
    assert harness.forward() == [suspect]
    harness.executor.take_done()
    for jobs in (others[:16], others[16:]):
        harness.scheduler.dispatch()
        assert [run.jobs for run in harness.executor.waiting()] == [jobs]
        assert harness.executor.waiting() == [harness.executor.kept]
        harness.executor.run_kept()
        (run,) = harness.executor.take_done()
        assert run.jobs == jobs
        run.version.queue.in_flight -= 1
    assert (harness.executor.running(), version.queue.in_flight) == ([], 0)


def test_a_suspect_whose_version_is_loading_leaves_all_threads_to_the_others():
    """Of four model threads each has a batch, and the next one is formed ahead."""
    loading, ready = ready_version(name="loading"), ready_version(max_rows=2)
    loading.state = VersionState.LOADING
    ready.policy = ready.queue.policy = replace(ready.policy, concurrency=4)
    ready.queue.row_bytes = 4
    harness = Harness(loading, ready, threads=4)
    harness.backlog.add_suspect(loading, job_of(model="loading", crashes=1))
    harness.add(ready, 9)
    harness.scheduler.dispatch()
    runs = [harness.begin(seat) for seat in "abcd"]
    harness.scheduler.dispatch()
    assert [len(run.jobs) for run in runs] == [2] * 4
    assert len(ready.queue.batcher) == 1
    assert harness.scheduler.next_wakeup() < inf, "the job that is left is due at the end of its wait"
    loading.state = VersionState.READY
    assert harness.scheduler.next_wakeup() == inf
    harness.scheduler.dispatch()
    assert harness.executor.waiting() == [], "the suspect waits for the device, and the others behind it"


def test_right_before_a_forward_withdrawn_and_late_jobs_are_sorted_out():
    """A cancelled or lost job and a job after its time each get their failure; others are not named."""
    sound, cancelled, lost, late = job_of(expires_ms=10), job_of(), job_of(), job_of(expires_ms=9)
    cancelled.is_cancelled = lost.is_lost = True
    too_late = Scheduler.too_late_check(lambda: 10.0)
    jobs = [sound, cancelled, lost, late]
    assert too_late(jobs) == {id(cancelled): CANCELLED, id(lost): CANCELLED, id(late): EXPIRED}


def test_a_forward_without_progress_for_its_limit_condemns_the_process():
    """Not at the limit but after it; progress starts the limit anew, and the verdict stays."""
    version = ready_version(timeout_s=LIMIT_S)
    harness = Harness(version)
    harness.add(version)
    harness.scheduler.dispatch()
    run = harness.begin()
    reasons = []
    for step in range(60):
        if step == 8:
            run.touch()
        harness.now += 0.5
        reasons.append(harness.scheduler.check_forwards())
    assert reasons.index(next(filter(None, reasons))) == 18, "half a second after 4 s and the limit of 5 s"
    assert set(reasons[18:]) == {"a forward of double took longer than its limit of 5 s"}
    harness.end(run)
    assert harness.scheduler.check_forwards() == reasons[-1]


def test_the_loop_is_woken_for_a_delayed_job():
    """It is woken a moment behind the time, because `poll` may return early; an idle device needs no other waking."""
    version = ready_version(max_rows=2)
    harness = Harness(version)
    harness.add(version)
    assert harness.scheduler.next_wakeup() == inf
    harness.backlog.delay(version, job_of(), harness.now + 60)
    assert 60 < harness.scheduler.next_wakeup() - harness.now < 60.01


def _declared(columns: int | str, name: str = "large", **options: int) -> ServedVersion:
    """A version whose results have so many floats a row."""
    outputs = [{"name": "y", "dtype": "float32", "shape": ["batch", columns]}]
    return ready_version(**options, name=name, outputs=outputs)


def test_a_batch_is_bounded_by_the_results_that_its_signature_declares():
    """Half of the worker's bytes: 128 MiB, three jobs of 40 MB; one job may be larger than that, and runs alone."""
    version = _declared(10_000_000)
    harness = Harness(version)
    harness.add(version, 7)
    assert [len(harness.forward()) for _ in range(3)] == [3, 3, 1]
    huge = _declared(10_000_000, most_bytes=64_000_000)
    harness = Harness(huge)
    harness.add(huge, 2)
    assert [len(harness.forward()) for _ in range(2)] == [1, 1]


def test_a_batch_is_bounded_by_the_results_of_earlier_ones():
    """Also the jobs that were pending before the first batch told of its results."""
    version = _declared("n")
    harness = Harness(version)
    harness.add(version, 40)
    harness.scheduler.dispatch()
    run = harness.begin()
    assert (len(run.jobs), harness.executor.waiting()) == (16, []), "the next one would be as large"
    version.queue.learn_results(run.batch, 16 * 40_000_000)
    harness.end(run)
    assert len(harness.forward()) == 3


def test_one_batch_with_large_results_is_in_memory_at_a_time():
    """None is formed ahead beside it, and none begins until its results are sent, whichever version it is of."""
    versions = large, other = _declared(10_000_000), _declared(10_000_000, "other")
    harness = Harness(*versions)
    for version in versions:
        harness.add(version, 32)
    harness.scheduler.dispatch()
    run = harness.begin()
    harness.now += 1
    harness.scheduler.dispatch()
    assert (run.version, harness.executor.waiting()) == (large, [])
    large.queue.unsent_bytes = 1
    harness.end(run)
    harness.scheduler.dispatch()
    assert (harness.executor.waiting(), harness.executor.idle) == ([], 1)
    large.queue.unsent_bytes = 0
    harness.scheduler.dispatch()
    assert harness.begin().version is other


def test_versions_with_small_results_do_not_wait_for_large_ones():
    """Neither for the forward of a large batch nor for its results."""
    large, small = _declared(10_000_000), ready_version(name="small")
    harness = Harness(large, small)
    harness.add(large, 32)
    harness.scheduler.dispatch()
    run = harness.begin()
    jobs = harness.add(small, 16)
    harness.scheduler.dispatch()
    assert [waiting.jobs for waiting in harness.executor.waiting()] == [jobs]
    large.queue.unsent_bytes = 1
    harness.end(run)
    assert harness.forward() == jobs
    late = harness.add(small, 1)
    assert harness.forward() == late


def test_a_batch_that_may_not_be_formed_ahead_wakes_nobody():
    """The I/O thread would spin until the forward ends."""
    large = _declared(10_000_000)
    harness = Harness(large)
    harness.add(large, 4)
    harness.scheduler.dispatch()
    harness.begin()
    assert len(large.queue.batcher) == 1
    assert harness.scheduler.next_wakeup() == inf
