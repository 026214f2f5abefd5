"""Hung forwards: a worker whose forward passes its limit gives the rest back and takes nothing more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.registry.broker.base import State
from penstock.registry.envelope import Retry
from penstock.workers.batch_run import BatchRun
from tests.packages import write_recorder
from tests.servers import ROOT
from tests.workers.stepped import (
    KNOWN,
    LEASE_S,
    LIMIT_S,
    SteppedHarness,
    SteppedWorker,
    open_harness,
)


class Thread:
    """A model thread of the test's own."""

    def __init__(self, worker: SteppedWorker, seat: str) -> None:
        self.seat = seat
        self._worker = worker
        self.work = worker.begin(seat)

    def finish(self) -> None:
        assert self.work is not None
        self._worker.end(self.work, self.seat)


def test_beside_a_hung_forward_the_rest_is_given_back_at_the_limit(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """At the limit and not before: what waits goes to others, and this worker takes nothing any more, not even what
    it has just given back; the batch that hangs stays in its journal and under its lease.
    """
    write_recorder(models_root, forward_log)
    worker = harness.start_worker()
    hung = harness.publish("recorder", 1, retry=Retry(attempts=2))
    worker.turn(2)
    thread = Thread(worker, "a")
    waiting = harness.publish("recorder", *range(2, 40))
    harness.pass_time(LIMIT_S - 0.5)
    assert any(harness.job_record(job).is_claimed for job in waiting)
    harness.pass_time(1)
    assert not any(harness.job_record(job).is_claimed for job in waiting)
    harness.pass_time(3)
    assert not any(harness.job_record(job).is_claimed for job in waiting)
    assert worker.counted("penstock_taken_over") == 0
    assert [job.job_id for job in worker.journal.jobs] == hung
    assert harness.job_record(hung[0]).is_claimed
    other = harness.start_worker()
    harness.pass_time(1)
    other.forwards()
    assert [harness.answer(job) for job in waiting] == [2 * number for number in range(2, 40)]
    assert harness.state(hung[0]) is State.QUEUED
    # Its job has another try, and it ends after all, before a supervisor kills the process: its answer counts.
    thread.finish()
    assert harness.answer(hung[0]) == 2
    assert worker.journal.jobs == []


def test_a_limit_shorter_than_the_drains_own_rest_is_kept(models_root: Path, forward_log: Path):
    """A forward of a tenth of a second hangs: noticed at the drain's next turn, though that comes later than that."""
    write_recorder(models_root, forward_log)
    for harness in open_harness(models_root, timeout_seconds=0.1):
        worker = harness.start_worker()
        harness.publish("recorder", 1)
        worker.turn(2)
        thread = Thread(worker, "a")
        (waiting,) = harness.publish("recorder", 2)
        harness.pass_time(1)
        assert not harness.job_record(waiting).is_claimed
        thread.finish()


def test_a_process_that_stood_still_gives_its_forward_another_limit(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """After a freeze of the whole process the forward is answered; it hangs only when it takes its limit once more."""
    write_recorder(models_root, forward_log)
    worker = harness.start_worker()
    (job,) = harness.publish("recorder", 1, retry=Retry(attempts=2))
    worker.turn(2)
    thread = Thread(worker, "a")
    harness.now += 2 * LIMIT_S
    (waiting,) = harness.publish("recorder", 2)
    harness.pass_time(LIMIT_S - 1)
    assert harness.job_record(waiting).is_claimed
    harness.pass_time(2)
    assert not harness.job_record(waiting).is_claimed
    thread.finish()
    assert harness.answer(job) == 2


def test_progress_moves_the_limit(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """A forward in parts has its limit for each of them."""
    write_recorder(models_root, forward_log)
    worker = harness.start_worker()
    (job,) = harness.publish("recorder", 1)
    worker.turn(2)
    thread = Thread(worker, "a")
    for _ in range(4):
        harness.pass_time(LIMIT_S - 1)
        assert thread.work is not None
        thread.work.touch()
    (later,) = harness.publish("recorder", 2)
    harness.pass_time(1)
    assert harness.job_record(later).is_claimed
    thread.finish()
    assert harness.answer(job) == 2


def test_a_forward_that_hangs_on_the_io_thread_keeps_no_other_jobs(
    harness: SteppedHarness, models_root: Path, monkeypatch: pytest.MonkeyPatch
):
    """Meanwhile no job of another worker is taken over, and the thread that ends the process gives the others back."""
    shutil.copytree(ROOT / "models" / "mlp", models_root / "mlp")
    row = {"x": [[1.0] * 384]}
    dead = harness.start_worker()
    (lapsed,) = harness.publish_inputs("mlp", row)
    dead.turn(2)
    harness.suspend(dead)
    worker = harness.start_worker()
    for version in worker.drain.lifecycle.turns:
        for _ in range(KNOWN):
            version.queue.note_forward(0.0001)
    worker.turn(3)
    drain, executor = worker.drain, worker.drain.parts.executor
    run = executor.run
    hung: list[str] = []
    others: list[str] = []

    def hangs(batch: BatchRun) -> None:
        theirs = [job.header.id for job in batch.jobs]
        here = [held.job_id for held in drain.parts.leased.snapshot()]
        if not hung and len(here) > len(theirs):
            for _ in range(4):
                harness.now += LEASE_S / 2
                drain.leases.tick()
            assert harness.job_record(lapsed).holder != drain.consumer
            drain.give_back_others()
            hung.extend(theirs)
            others.extend(job for job in here if job not in theirs and harness.state(job) is State.QUEUED)
            assert all(harness.job_record(job).is_claimed for job in hung)
            assert not any(harness.job_record(job).is_claimed for job in others)
        run(batch)

    monkeypatch.setattr(executor, "run", hangs)
    harness.publish_inputs("mlp", *[row] * 150)
    worker.turn(4)
    assert hung
    assert others
    harness.pass_time(2 * LEASE_S)
    assert harness.state(lapsed) is State.COMPLETED, "once the forward has ended"
