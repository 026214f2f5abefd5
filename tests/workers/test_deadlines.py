"""Deadlines in a worker, under a virtual clock: a busy device and a paused model delay no bad news."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.registry.broker.base import State
from penstock.workers.batch_run import BatchRun
from tests.packages import write_sleeper
from tests.workers.stepped import SteppedHarness, SteppedWorker, open_harness


@pytest.fixture
def harness(models_root: Path) -> Iterator[SteppedHarness]:
    """One model, of which two jobs fill a batch."""
    write_sleeper(models_root, "double", forward_s=0.0, max_batch_size=2)
    yield from open_harness(models_root)


def test_waiting_job_expires_while_the_device_is_busy(harness: SteppedHarness):
    """A long forward runs: the client of a job behind it hears of the deadline at once, not after the forward."""
    worker = harness.start_worker()
    running = harness.publish("double", 1)
    worker.turn(2)
    work = worker.begin()
    assert work is not None
    ahead = harness.publish("double", 3, 4, deadline_s=60)
    worker.turn(2)
    late, patient = harness.publish("double", 5, deadline_s=0.4)[0], harness.publish("double", 6)[0]
    worker.turn(2)
    assert harness.job_record(late).is_claimed
    harness.pass_time(1)
    assert harness.state(late) is State.EXPIRED
    assert [harness.state(job) for job in (*running, *ahead, patient)] == [State.QUEUED] * 4
    worker.end(work)
    worker.forwards()
    assert [harness.answer(job) for job in (*running, *ahead, patient)] == [2, 6, 8, 12]


def test_job_of_a_formed_batch_expires_while_the_device_is_busy(harness: SteppedHarness):
    """The next batch was formed ahead: its overdue job leaves it, and the other one runs."""
    worker = harness.start_worker()
    running = harness.publish("double", 1)
    worker.turn(2)
    work = worker.begin()
    assert work is not None
    late, patient = harness.publish("double", 3, deadline_s=0.4)[0], harness.publish("double", 4)[0]
    harness.pass_time(0.2)
    worker.turn(3)
    assert [run.jobs[0].header.id for run in worker.drain.parts.executor.waiting()] == [late]
    harness.pass_time(1)
    assert harness.state(late) is State.EXPIRED
    worker.end(work)
    worker.forwards()
    assert [harness.answer(job) for job in (*running, patient)] == [2, 8]


@pytest.mark.parametrize("is_formed", [False, True])
def test_a_follower_expires_while_its_leader_waits(is_formed: bool, harness: SteppedHarness):
    """Also if the batch of its leader is formed. The leader and its other follower go on."""
    worker = harness.start_worker()
    running = harness.publish("double", 1)
    work = worker.begin_next()
    leader, *beside = harness.publish("double", 7, *([8] if is_formed else []))
    worker.turn(2)
    assert len(worker.drain.parts.executor.waiting()) == is_formed
    (late,), (patient,) = harness.publish("double", 7, deadline_s=0.4), harness.publish("double", 7)
    worker.turn(2)
    assert worker.counted("penstock_single_flight") == 2
    harness.pass_time(1)
    assert harness.state(late) is State.EXPIRED
    assert harness.answer(late) == "Expired"
    assert [harness.state(job) for job in (*running, leader, *beside, patient)] == [State.QUEUED] * (4 if beside else 3)
    worker.end(work)
    worker.forwards()
    assert [harness.answer(job) for job in (*running, leader, *beside, patient)] == [2, 14, *([16] * is_formed), 14]
    assert worker.drain.health.readiness[1]["in_memory"] == 0


def begun_with_follower(harness: SteppedHarness, worker: SteppedWorker) -> tuple[BatchRun, str, str]:
    """A forward that has begun, its only job, and a follower of that job whose time is over by now."""
    (leader,), (follower,) = harness.publish("double", 7), harness.publish("double", 7, deadline_s=0.4)
    run = worker.begin_next()
    assert worker.counted("penstock_single_flight") == 1
    assert [job.header.id for job in run.jobs] == [leader]
    harness.pass_time(1)
    return run, leader, follower


def test_a_follower_has_begun_with_its_leader(harness: SteppedHarness):
    """Its time passes during the forward: it goes on, as a job of that batch would."""
    worker = harness.start_worker()
    _, leader, follower = begun_with_follower(harness, worker)
    assert [harness.state(job) for job in (leader, follower)] == [State.QUEUED] * 2


def test_a_follower_that_has_begun_gets_the_answer(harness: SteppedHarness):
    """Its time passed during the forward of its leader."""
    worker = harness.start_worker()
    run, leader, follower = begun_with_follower(harness, worker)
    worker.end(run)
    assert [harness.answer(job) for job in (leader, follower)] == [14, 14]


def test_overdue_jobs_of_a_paused_model_end(harness: SteppedHarness):
    """A paused model hands out nothing: its workers end the jobs whose time has passed, and only these, and count
    them."""
    worker = harness.start_worker()
    harness.broker.pause("double")
    harness.pass_time(2)
    late, patient = harness.publish("double", 1, deadline_s=1), harness.publish("double", 2, deadline_s=60)
    harness.pass_time(0.5)
    assert harness.state(late[0]) is State.QUEUED
    harness.pass_time(3)
    assert harness.state(late[0]) is State.EXPIRED
    assert harness.answer(late[0]) == "Expired"
    assert (worker.counted("penstock_jobs"), worker.counted("infer_requests")) == (1, 1)
    assert harness.state(patient[0]) is State.QUEUED
    assert sum(depth.jobs for depth in harness.broker.depths("double")) == 1
    harness.broker.resume("double")
    harness.pass_time(2)
    harness.workers[0].forwards()
    assert harness.answer(patient[0]) == 4
