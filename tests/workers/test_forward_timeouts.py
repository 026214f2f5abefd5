"""CX-016: a forward over its limit ends its job with ForwardTimeout, after the forwards that the job is allowed.

Who is at fault is known of a job alone: jobs that hung in a batch run once more, one by one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.producers.job_state import open_outcome
from penstock.registry.broker.base import State
from penstock.registry.envelope import Retry
from penstock.registry.errors import ForwardTimeout
from penstock.workers.batch_run import BatchRun, forward_timeout
from penstock.workers.executor import Executor
from tests.flow.conftest import amend
from tests.packages import recorded_forwards, write_double, write_package, write_recorder
from tests.servers import wait_until
from tests.workers.doubles import Formed, job_of, run_of, spec_of, version_of
from tests.workers.runtime.formats import opened
from tests.workers.stepped import LEASE_S, LIMIT_S, UNSIGNED, SteppedHarness, SteppedWorker, open_harness

TEXT = r"^The forward took longer than its limit of 30 s$"


def hang(harness: SteppedHarness, worker: SteppedWorker) -> BatchRun:
    """The worker's next forward exceeds its limit; the worker's own threads notice it."""
    worker.turn(2)
    run = worker.begin()
    assert run is not None
    harness.pass_time(LIMIT_S + 1)
    return run


def replaced(harness: SteppedHarness, worker: SteppedWorker, *, over_limit: bool = False) -> SteppedWorker:
    """Another worker in the place of one whose process was ended; it has taken the jobs over."""
    harness.crash(worker, over_limit=over_limit)
    other = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    return other


def assert_timed_out(harness: SteppedHarness, job_id: str) -> None:
    """The client sees a ForwardTimeout, and there is no dead letter."""
    assert harness.state(job_id) is State.FAILED
    with pytest.raises(ForwardTimeout, match=TEXT) as raised:
        open_outcome(job_id, harness.job_record(job_id), UNSIGNED).outputs()
    assert isinstance(raised.value, TimeoutError)
    assert harness.broker.dead_letters(job_id.rpartition(".")[0]) == []


def test_a_job_that_hangs_alone_ends_at_the_limit(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """Its own worker commits the time-out before its process ends, with the times of the forward; the job runs once."""
    write_recorder(models_root, forward_log)
    worker = harness.start_worker()
    (job,) = harness.publish("recorder", 1)
    hang(harness, worker)
    assert_timed_out(harness, job)
    info = open_outcome(job, harness.job_record(job), UNSIGNED).info()
    assert (info.status, info.worker, info.batch_size, info.version) == ("failed", "stepped-0", 1, "1")
    assert LIMIT_S < info.compute_ms / 1000 < LIMIT_S + 2
    assert (job, State.FAILED, "ForwardTimeout") in worker.notes.ends
    assert len(worker.journal.over) == 1, "the journal says so, in case the commit does not arrive"
    other = replaced(harness, worker, over_limit=True)
    assert other.forwards() == []


def test_the_answer_of_a_forward_that_was_given_up_is_discarded(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """The forward ends after all, before the process does: the job has its end, and no second one is committed."""
    write_recorder(models_root, forward_log)
    worker = harness.start_worker()
    (job,) = harness.publish("recorder", 1)
    run = hang(harness, worker)
    worker.end(run)
    assert_timed_out(harness, job)
    assert worker.counted("penstock_fenced") == 0
    assert len(worker.notes.ends) == 1
    assert [held.job_id for held in worker.journal.jobs] == [job]


def test_neighbours_of_a_hung_job_are_answered(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """A batch hangs: no job of it fails for that. Each runs alone; the one that hangs alone ends with the time-out."""
    write_recorder(models_root, forward_log)
    jobs = harness.publish("recorder", 1, 2, 3)
    first = harness.start_worker()
    hang(harness, first)
    assert {harness.state(job) for job in jobs} == {State.QUEUED}
    second = replaced(harness, first, over_limit=True)
    hang(harness, second)
    (gone,) = [job for job in jobs if harness.state(job) is not State.QUEUED]
    assert_timed_out(harness, gone)
    third = replaced(harness, second, over_limit=True)
    third.forwards()
    assert sorted(str(harness.answer(job)) for job in jobs if job != gone) == sorted(
        f"{2.0 * (jobs.index(job) + 1)}" for job in jobs if job != gone
    )


@pytest.mark.parametrize(
    ("attempts", "max_crashes", "forwards"), [(1, 3, 1), (2, 3, 2), (3, 3, 3), (9, 3, 3), (9, 1, 1)]
)
def test_a_retry_allows_further_forwards_up_to_the_limit_of_crashes(
    attempts: int, max_crashes: int, forwards: int, models_root: Path, forward_log: Path
):
    """Each hung forward is a try, and takes a process: the job ends with the last one that both limits allow."""
    write_recorder(models_root, forward_log)
    for harness in open_harness(models_root, queue={"lease_s": LEASE_S, "max_crashes": max_crashes}):
        (job,) = harness.publish("recorder", 1, retry=Retry(attempts=attempts, backoff_s=1))
        worker = harness.start_worker()
        for hung in range(forwards):
            assert harness.state(job) is State.QUEUED, f"after {hung} forwards"
            hang(harness, worker)
            worker = replaced(harness, worker, over_limit=True)
        assert_timed_out(harness, job)
        assert worker.forwards() == []


def test_a_failed_try_and_a_hung_one_count_together(harness: SteppedHarness, models_root: Path):
    """Two tries: the first raises, the second hangs and is the last."""
    write_package(
        models_root,
        "moody",
        """
        def build():
            def forward(inputs):
                if inputs["x"].any():
                    raise ValueError("no")
                return {"y": inputs["x"]}
            return forward
        """,
    )
    (job,) = harness.publish("moody", 1, retry=Retry(attempts=2, backoff_s=0.5))
    worker = harness.start_worker()
    assert worker.forward() == [job]
    harness.pass_time(2)
    hang(harness, worker)
    assert_timed_out(harness, job)


@pytest.mark.parametrize("crashes", [0, 1, 2])
def test_the_next_process_ends_a_job_whose_process_was_killed_at_the_limit(
    crashes: int, harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """A call that never releases the interpreter: the process commits nothing and its supervisor kills it.

    The journal says that the forward was over its limit, and the last. The next worker runs the job no more, and it
    becomes no dead letter, however often processes died for it before.
    """
    write_recorder(models_root, forward_log)
    (job,) = harness.publish("recorder", 1)
    worker = harness.start_worker()
    for _ in range(crashes):
        worker.turn(2)
        assert worker.begin() is not None
        worker = replaced(harness, worker)
    worker.turn(2)
    assert worker.begin() is not None
    other = replaced(harness, worker, over_limit=True)
    assert other.forwards() == []
    assert_timed_out(harness, job)
    assert (job, State.FAILED, "ForwardTimeout") in other.notes.ends


def test_a_process_that_dies_before_its_limit_is_a_crash(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """Nothing in the journal says that the forward was over its limit: its job is a suspect and runs again."""
    write_recorder(models_root, forward_log)
    (job,) = harness.publish("recorder", 1)
    worker = harness.start_worker()
    worker.turn(2)
    assert worker.begin() is not None
    other = replaced(harness, worker)
    assert other.forwards() == [[job]]
    assert harness.answer(job) == 2


def test_a_job_that_hung_in_an_optimized_form_runs_once_more_as_built(harness: SteppedHarness, models_root: Path):
    """The form may be at fault: a hang in it is not the last forward, and the next one is the author's own."""
    write_double(models_root)
    (job,) = harness.publish("double", 1)
    worker = harness.start_worker()
    version = worker.drain.lifecycle.models["double"].active
    assert version is not None
    version.runtime = Formed(version.runtime)
    version.has_loaded()
    hang(harness, worker)
    assert harness.state(job) is State.QUEUED
    other = replaced(harness, worker, over_limit=True)
    assert other.forwards() == [[job]]
    assert harness.answer(job) == 2


@pytest.mark.parametrize("crashes", [0, 2])
def test_a_forward_during_which_the_process_stood_still_has_one_more(
    crashes: int, harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """A process that was stopped for a part of the limit proves nothing against the job; the third time it ends."""
    write_recorder(models_root, forward_log)
    (job,) = harness.publish("recorder", 1)
    worker = harness.start_worker()
    for _ in range(crashes):
        worker.turn(2)
        assert worker.begin() is not None
        worker = replaced(harness, worker)
    worker.turn(2)
    assert worker.begin() is not None
    harness.now += LIMIT_S / 2
    harness.pass_time(LIMIT_S)
    if crashes:
        assert_timed_out(harness, job)
        return
    assert harness.state(job) is State.QUEUED
    other = replaced(harness, worker, over_limit=True)
    assert other.forwards() == [[job]]


def test_jobs_that_wait_behind_a_hung_forward_do_not_expire_from_it(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """They are given back at the limit and answered by another worker, though they waited longer than a limit."""
    amend(write_recorder(models_root, forward_log), batching={"max_batch_size": 1})
    worker = harness.start_worker()
    hung, *waiting = harness.publish("recorder", *range(1, 10))
    hang(harness, worker)
    assert_timed_out(harness, hung)
    harness.crash(worker)
    other = harness.start_worker()
    harness.pass_time(LIMIT_S + 1)
    other.forwards()
    assert [harness.answer(job) for job in waiting] == [2 * number for number in range(2, 10)]
    assert [1.0] not in recorded_forwards(forward_log)


GATED = """
import threading

IS_INSIDE, GATE = threading.Event(), threading.Event()

def wait():
    IS_INSIDE.set(); GATE.wait(180)

def build():
    def forward(inputs):
        if inputs["x"].any():
            wait()
        return {"y": inputs["x"]}
    return forward
"""


def test_a_time_out_names_the_line_at_which_the_model_hangs(models_root: Path):
    """The stack of the model thread is read while it hangs: the last own frame, and the whole stack for the log."""
    runtime = opened(write_package(models_root, "gated", GATED))
    package = runtime.model.__globals__  # type: ignore[attr-defined]  # the globals of the package's module
    job = job_of(1)
    job.inputs["x"] = np.ones((1, 4), np.float32)
    run = run_of(version_of(runtime, spec_of(), 16), job)
    executor = Executor(1, lambda: None, lambda _: {}, lambda _: None)
    executor.start()
    try:
        executor.submit(run, prepare_apart=False)
        assert package["IS_INSIDE"].wait(180)
        trace = executor.give_up(run)
    finally:
        package["GATE"].set()
        executor.stop()
    assert trace.where == "model.py, line 7, in wait"
    assert "IS_INSIDE.set(); GATE.wait(180)" in trace.text
    (given_up,) = executor.take_done()
    assert given_up.answers == [forward_timeout(LIMIT_S, trace.where, trace.text)]
    wait_until(lambda: run.answers, 60, "the forward ends")
    wait_until(lambda: not executor.is_alive(), 60, "its thread ends")
    assert (executor.take_done(), executor.running()) == ([], [])
    runtime.close()
