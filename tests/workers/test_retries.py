"""Retries: a job that failed waits for its pause and runs again, as often as its policy allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.broker.base import State
from penstock.registry.envelope import Retry, open_result
from tests.packages import write_package
from tests.workers.stepped import (
    LEASE_S,
    UNSIGNED,
    SteppedHarness,
    open_harness,
)

TWICE = Retry(attempts=2, backoff_s=4, longest_s=60)
THRICE = Retry(attempts=3, backoff_s=4, longest_s=60)


def write_flaky(root: Path, name: str = "flaky", *, failures: int) -> Path:
    """Answers 2 x; raises ValueError for a negative first number, until it has been alone for `failures` times."""
    return write_package(
        root,
        name,
        f"""
        from collections import Counter

        def build():
            failed = Counter()

            def forward(inputs):
                for number in inputs["x"][:, 0].tolist():
                    if number < 0 and failed[number] < {failures}:
                        failed[number] += len(inputs["x"]) == 1
                        raise ValueError("not now")
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
    )


def test_a_job_without_a_policy_has_one_forward(harness: SteppedHarness, models_root: Path):
    """A failure is its end."""
    write_flaky(models_root, failures=1)
    worker = harness.start_worker()
    (job,) = harness.publish("flaky", -1)
    assert worker.forwards() == [[job]]
    assert harness.answer(job) == "ModelError"
    assert worker.notes.retries == []


@pytest.mark.parametrize(("jitter", "pauses"), [(0.0, [2.0, 4.0]), (1.0, [4.0, 8.0])])
def test_a_failed_job_rests_and_runs_again(
    jitter: float, pauses: list[float], harness: SteppedHarness, models_root: Path
):
    """The third forward succeeds; between them are the policy's pauses, to the moment."""
    write_flaky(models_root, failures=2)
    worker = harness.start_worker(jitter=jitter)
    (job,) = harness.publish("flaky", -1, retry=THRICE)
    for pause in pauses:
        assert worker.forwards() == [[job]]
        harness.pass_time(pause - 0.01)
        assert worker.forwards() == []
        harness.pass_time(0.01)
    assert worker.forwards() == [[job]]
    assert (harness.state(job), harness.answer(job)) == (State.COMPLETED, -2)
    assert worker.notes.retries == [job, job]
    assert worker.counted("penstock_retried") == 2
    assert worker.drain.health.readiness[1]["in_memory"] == 0


def test_the_last_attempt_is_the_end(harness: SteppedHarness, models_root: Path):
    """After as many forwards as the policy has the failure is the job's own; its neighbour never waited for it."""
    write_flaky(models_root, failures=9)
    worker = harness.start_worker()
    job, neighbour = harness.publish("flaky", -1, 5, retry=TWICE)
    assert worker.forwards() == [[job, neighbour]]
    assert harness.answer(neighbour) == 10
    harness.pass_time(4)
    assert worker.forwards() == [[job]]
    assert harness.answer(job) == "ModelError"
    harness.pass_time(60)
    assert worker.forwards() == []


def test_a_deadline_ends_the_retries(harness: SteppedHarness, models_root: Path):
    """When the next forward could only begin too late the failure stands at once."""
    write_flaky(models_root, failures=9)
    worker = harness.start_worker()
    (job,) = harness.publish("flaky", -1, retry=THRICE, deadline_s=6)
    worker.forwards()
    harness.pass_time(4)
    worker.forwards()
    assert (harness.state(job), harness.answer(job)) == (State.FAILED, "ModelError")
    assert worker.notes.retries == [job]


def test_a_resting_job_can_be_cancelled(harness: SteppedHarness, models_root: Path):
    """Its pause ends with the news, and it does not run again."""
    write_flaky(models_root, failures=1)
    worker = harness.start_worker()
    (job,) = harness.publish("flaky", -1, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    worker.forwards()
    harness.broker.cancel(job, "acme", b"")
    harness.pass_time(LEASE_S)
    assert harness.state(job) is State.CANCELLED
    assert worker.drain.health.readiness[1]["in_memory"] == 0


def test_a_job_that_is_revoked_while_it_rests_does_not_run_again(harness: SteppedHarness, models_root: Path):
    """Withdrawn through Celery in the middle of its pause: that is its end."""
    write_flaky(models_root, failures=1)
    worker = harness.start_worker()
    (job,) = harness.publish("flaky", -1, retry=TWICE)
    worker.forwards()
    worker.notes.revoked.add(job)
    harness.pass_time(4)
    assert worker.forwards() == []
    assert harness.state(job) is State.CANCELLED


def test_a_resting_job_that_was_lost_is_forgotten(harness: SteppedHarness, models_root: Path):
    """Another worker has the job by now: it neither runs nor ends here."""
    write_flaky(models_root, failures=1)
    worker = harness.start_worker()
    (job,) = harness.publish("flaky", -1, retry=TWICE)
    worker.forwards()
    assert len(harness.broker.take_over("other", "flaky", 0, 10)) == 1
    # The other's lease does not lapse.
    harness.pass_time(LEASE_S - 0.5)
    assert worker.forwards() == []
    assert harness.job_record(job).is_claimed
    assert worker.drain.health.readiness[1]["in_memory"] == 0


def test_a_resting_job_is_kept_from_others_by_its_lease(harness: SteppedHarness, models_root: Path):
    """A pause longer than the lease: the job stays where it rests, and has one forward there."""
    write_flaky(models_root, failures=1)
    worker, other = harness.start_worker(), harness.start_worker()
    (job,) = harness.publish("flaky", -1, retry=Retry(attempts=2, backoff_s=20, longest_s=20))
    assert worker.forwards() == [[job]]
    harness.pass_time(20)
    assert other.forwards() == []
    assert worker.forwards() == [[job]]
    assert harness.answer(job) == -2


@pytest.mark.parametrize("when", ["resting", "failing"])
def test_sigterm_gives_a_retried_job_back(when: str, harness: SteppedHarness, models_root: Path):
    """Neither a rest nor a failure under SIGTERM is the job's end: another worker runs it, as a first attempt."""
    write_flaky(models_root, failures=1)
    worker = harness.start_worker()
    (job,) = harness.publish("flaky", -1, retry=TWICE)
    worker.turn(2)
    work = worker.begin()
    assert work is not None
    if when == "resting":
        worker.end(work)
        worker.drain.ask_to_stop(10.0)
    else:
        worker.drain.ask_to_stop(10.0)
        worker.end(work)
    worker.turn(3)
    assert not harness.job_record(job).is_claimed
    harness.workers[:] = [harness.start_worker()]
    harness.pass_time(1)
    harness.workers[0].forwards()
    harness.pass_time(4)
    harness.workers[0].forwards()
    header, _ = open_result(harness.job_record(job).result, UNSIGNED)
    assert (header.error, header.attempt) == (None, 1)


def test_a_crash_while_a_job_rests_makes_it_no_suspect(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """A resting job was not on the model when the process died: it is no suspect, and shares a batch."""
    write_flaky(models_root, failures=1)
    worker = harness.start_worker()
    (resting,) = harness.publish("flaky", -1, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    worker.forwards()
    harness.publish("flaky", 3)
    worker.turn(2)
    assert worker.begin() is not None
    harness.crash(worker)
    successor = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    (company,) = harness.publish("flaky", 4)
    assert {resting, company} in [set(batch) for batch in successor.forwards()]


def test_resting_jobs_take_no_room_from_others(harness: SteppedHarness, models_root: Path):
    """More jobs rest than batches have room for, and new ones are claimed and run as ever."""
    write_flaky(models_root, failures=1)
    worker = harness.start_worker()
    harness.publish("flaky", *range(-100, 0), retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    assert len(worker.forwards()) >= 7
    jobs = harness.publish("flaky", *range(16))
    assert sorted(job for batch in worker.forwards() for job in batch) == sorted(jobs)


def test_equal_jobs_that_fail_do_not_keep_others_out(models_root: Path):
    """A hundred equal jobs fail on a worker that holds forty at most: the job behind them runs all the same."""
    write_flaky(models_root, failures=10_000)
    for harness in open_harness(models_root, batching={"max_queue_depth": 40}):
        worker = harness.start_worker()
        harness.publish("flaky", *[-1] * 100, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
        (behind,) = harness.publish("flaky", 5)
        worker.forwards()
        assert harness.state(behind) is State.COMPLETED


def test_when_too_many_rest_the_next_runs_again_at_once(models_root: Path):
    """Half of the memory may rest; beyond it a pause would keep sound jobs out."""
    write_flaky(models_root, failures=1)
    for harness in open_harness(models_root, batching={"max_queue_depth": 8}):
        worker = harness.start_worker()
        jobs = harness.publish("flaky", *range(-6, 0), retry=Retry(attempts=2, backoff_s=600, longest_s=600))
        worker.forwards()
        assert sum(harness.state(job) is State.COMPLETED for job in jobs) == 2
        harness.pass_time(600)
        worker.forwards()
        assert {harness.state(job) for job in jobs} == {State.COMPLETED}


def test_who_followed_a_job_that_rests_goes_ahead(harness: SteppedHarness, models_root: Path):
    """Of equal jobs the first fails and rests; the others do not wait for it, can be cancelled, and keep their
    deadlines, and one forward answers them all.
    """
    write_flaky(models_root, failures=1)
    worker = harness.start_worker()
    leader, *followers = harness.publish("flaky", *[-1] * 4, retry=Retry(attempts=2, backoff_s=600, longest_s=600))
    assert worker.forwards() == [[leader], followers[:1]]
    assert {harness.answer(job) for job in followers} == {-2}
    assert harness.state(leader) is State.QUEUED
    harness.pass_time(600)
    assert worker.forwards() == [[leader]]
    assert harness.answer(leader) == -2
