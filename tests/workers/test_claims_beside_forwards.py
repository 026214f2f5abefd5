"""Whether jobs are claimed while a forward runs: at once, unless its commit is near and carries the claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.workers.batch_run import BatchRun
from tests.packages import write_package
from tests.workers.stepped import SteppedHarness, SteppedWorker

KNOWN = 40
_DOUBLE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 2}
"""


@pytest.fixture
def worker(harness: SteppedHarness, models_root: Path) -> SteppedWorker:
    """A worker whose batches have one job, and that holds two jobs of a model at most."""
    write_package(models_root, "double", _DOUBLE, max_batch_size=1)
    return harness.start_worker()


def begin(worker: SteppedWorker) -> BatchRun:
    """The next forward has begun."""
    worker.turn(2)
    run = worker.begin()
    assert run is not None
    return run


def make_known(harness: SteppedHarness, worker: SteppedWorker, seconds: float) -> None:
    """The forwards of late took so long."""
    for number in range(KNOWN):
        harness.publish("double", number)
        run = begin(worker)
        harness.now += seconds
        worker.end(run)


def commit_beside(worker: SteppedWorker, run: BatchRun) -> BatchRun:
    """The run ends, the next one begins, and is under way when the first one is committed; returns the next one."""
    executor = worker.drain.parts.executor
    executor.run(run)
    executor.finish("a", run)
    following = worker.begin()
    assert following is not None
    worker.turn()
    return following


def held(worker: SteppedWorker) -> int:
    return len(worker.drain.parts.leased)


def test_the_commit_of_a_short_forward_carries_the_next_claim(harness: SteppedHarness, worker: SteppedWorker):
    """No round trip of its own for jobs that the model thread cannot begin before."""
    make_known(harness, worker, 0.002)
    harness.publish("double", *range(100, 105))
    second = commit_beside(worker, begin(worker))
    before = held(worker)
    worker.turn(3)
    assert held(worker) == before
    worker.end(second)
    assert held(worker) == before
    worker.forwards()
    assert len(worker.notes.ends) == KNOWN + 5


def test_a_long_forward_does_not_keep_jobs_from_being_claimed(harness: SteppedHarness, worker: SteppedWorker):
    """They are opened meanwhile, and the device gets them at once."""
    make_known(harness, worker, 0.05)
    harness.publish("double", *range(100, 105))
    commit_beside(worker, begin(worker))
    before = held(worker)
    worker.turn()
    assert held(worker) > before


def test_a_forward_that_takes_longer_than_those_before_delays_no_claim(harness: SteppedHarness, worker: SteppedWorker):
    """It may hang: the jobs of other models must not wait for it."""
    make_known(harness, worker, 0.002)
    harness.publish("double", *range(100, 105))
    commit_beside(worker, begin(worker))
    before = held(worker)
    worker.turn()
    assert held(worker) == before
    harness.now += 0.01
    worker.turn()
    assert held(worker) > before
