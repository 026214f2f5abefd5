"""Whether jobs are claimed while a forward runs: at once, unless its commit is near and carries the claim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages import write_package
from tests.workers.stepped import KNOWN, SteppedHarness, SteppedWorker, make_known, open_harness

_DOUBLE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 2}
"""


@pytest.fixture
def harness(models_root: Path) -> Iterator[SteppedHarness]:
    """Workers of so little room that a blocking claim takes one job."""
    yield from open_harness(models_root, batching={"max_queue_depth": 4})


@pytest.fixture
def worker(harness: SteppedHarness, models_root: Path) -> SteppedWorker:
    """A worker whose batches have one job, and that holds two jobs of a model whose forwards are not short."""
    write_package(models_root, "double", _DOUBLE, max_batch_size=1)
    return harness.start_worker()


def held(worker: SteppedWorker) -> int:
    return len(worker.drain.parts.leased)


def test_the_commit_of_a_short_forward_carries_the_next_claim(harness: SteppedHarness, worker: SteppedWorker):
    """The blocking claim has taken what had come: no round trip of its own asks for more."""
    make_known(harness, worker, 0.002)
    harness.publish("double", 101.0, 102.0, 103.0)
    run = worker.begin_next()
    worker.turn(3)
    assert held(worker) == 1
    worker.end(run)
    assert held(worker) == 2
    worker.forwards()
    assert len(worker.notes.ends) == KNOWN + 3


def test_a_busy_worker_claims_beside_a_short_forward(harness: SteppedHarness, worker: SteppedWorker):
    """Its queue has jobs without end: they are opened meanwhile, and fill the next batch."""
    make_known(harness, worker, 0.002)
    harness.publish("double", *range(100, 106))
    worker.end(worker.begin_next())
    executor = worker.drain.parts.executor
    run = worker.begin_next()
    executor.run(run)
    executor.finish("a", run)
    assert worker.begin() is not None
    worker.turn(2)
    assert held(worker) == 2


def test_a_long_forward_does_not_keep_jobs_from_being_claimed(harness: SteppedHarness, worker: SteppedWorker):
    """They are opened meanwhile, and the device gets them at once."""
    make_known(harness, worker, 0.05)
    harness.publish("double", 101.0, 102.0, 103.0)
    worker.begin_next()
    worker.turn()
    assert held(worker) == 2


def test_a_forward_that_takes_longer_than_those_before_delays_no_claim(harness: SteppedHarness, worker: SteppedWorker):
    """It may hang: the jobs of other models must not wait for it."""
    make_known(harness, worker, 0.002)
    harness.publish("double", 101.0, 102.0, 103.0)
    worker.begin_next()
    worker.turn()
    assert held(worker) == 1
    harness.now += 0.01
    worker.turn()
    assert held(worker) == 3


def test_jobs_that_wait_beside_a_short_forward_are_joined_by_others(models_root: Path):
    """The next batch is not cut: what comes while it forms is claimed at once."""
    write_package(models_root, "double", _DOUBLE, max_batch_size=8)
    for harness in open_harness(models_root, batching={"max_queue_depth": 12}):
        worker = harness.start_worker()
        make_known(harness, worker, 0.002)
        harness.publish("double", 101.0)
        worker.begin_next()
        # As many as the blocking claim takes now, and more than that.
        harness.publish("double", 102.0, 103.0)
        worker.turn()
        harness.publish("double", 104.0, 105.0, 106.0)
        worker.turn(2)
        assert held(worker) == 6
