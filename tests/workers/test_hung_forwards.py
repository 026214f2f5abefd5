"""Hung forwards: a worker whose forward passes its limit gives the rest back and takes nothing more."""

from __future__ import annotations

from pathlib import Path

from penstock.registry.broker.base import State
from penstock.registry.envelope import Retry
from tests.packages import write_recorder
from tests.workers.stepped import (
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
