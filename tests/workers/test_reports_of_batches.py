"""When a committed batch is reported: beside the next exchange, if that is near, and at once otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.workers.batch_run import BatchRun
from tests.packages import write_package
from tests.workers.stepped import KNOWN, SteppedHarness, SteppedWorker, make_known

_DOUBLE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 2}
"""


@pytest.fixture
def worker(harness: SteppedHarness, models_root: Path) -> SteppedWorker:
    """A worker whose batches have one job."""
    write_package(models_root, "double", _DOUBLE, max_batch_size=1)
    return harness.start_worker()


def commit_beside(worker: SteppedWorker, run: BatchRun) -> BatchRun:
    """The run ends, the next one begins, and the drain takes a turn meanwhile; returns the next one."""
    executor = worker.drain.parts.executor
    executor.run(run)
    executor.finish("a", run)
    following = worker.begin()
    assert following is not None
    worker.turn()
    return following


def reported(worker: SteppedWorker) -> int:
    """Batches of one job that were counted, and whose end was told."""
    assert worker.drain.parts.telemetry.batches == len(worker.notes.ends)
    return worker.drain.parts.telemetry.batches


def test_a_report_waits_for_the_exchange_of_a_short_forward(harness: SteppedHarness, worker: SteppedWorker):
    """It costs the short forward nothing, and none is lost."""
    # The forwards of late decide, and nothing is known of the first ones. Shorter ones need no thread of their own.
    make_known(harness, worker, 0.002)
    assert reported(worker) == KNOWN
    harness.publish("double", 101.0, 102.0)
    second = commit_beside(worker, worker.begin_next())
    assert reported(worker) == KNOWN
    worker.turn()
    assert reported(worker) == KNOWN
    # The report of the first job is made beside the commit of the second one. That of the second one waits for the
    # third job, which comes meanwhile.
    harness.publish("double", 103.0)
    worker.end(second)
    assert reported(worker) == KNOWN + 1
    worker.forwards()
    assert reported(worker) == KNOWN + 3


def test_a_report_does_not_wait_for_a_long_forward(harness: SteppedHarness, worker: SteppedWorker):
    """Nobody waits for the end of a job whose successor runs for long."""
    harness.publish("double", 1.0, 2.0)
    first = worker.begin_next()
    harness.now += 0.05
    commit_beside(worker, first)
    assert reported(worker) == 1
