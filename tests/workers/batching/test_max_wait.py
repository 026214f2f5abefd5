"""batching.max_wait_ms in a whole worker: its loop turns when it would wake up, under a virtual clock (CF-009)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest

from penstock.workers.batch_run import BatchRun
from tests.packages import write_double
from tests.workers.stepped import SteppedHarness, SteppedWorker, open_harness

ROUNDS = 10
GAP_S = 0.0071
"""Between two jobs; no multiple of a setting, so that the jobs come at all moments."""
SLACK_S = 0.001
"""A loop that polls in whole milliseconds aims behind the moment."""
FORWARD_S = 0.2
"""The forward that keeps the device busy: longer than every wait here."""

Start = Callable[[float], "Worker"]


class Worker:
    """A worker with one model thread, which is the test."""

    def __init__(self, harness: SteppedHarness) -> None:
        self.harness = harness
        self.stepped: SteppedWorker = harness.start_worker()
        self._numbers = itertools.count()

    def publish(self) -> str:
        """A job that is equal to no other one; the worker claims it at once."""
        (job_id,) = self.harness.publish("double", next(self._numbers))
        self.stepped.turn(2)
        return job_id

    def sleep_until(self, until: float) -> None:
        """The loop sleeps, and turns whenever it has asked to be woken."""
        scheduler = self.stepped.drain.parts.scheduler
        while (wakeup := scheduler.next_wakeup()) < until:
            self.harness.now = max(self.harness.now, wakeup)
            self.stepped.turn()
        self.harness.now = until
        self.stepped.turn()

    def ahead(self) -> list[BatchRun]:
        """The batches that are closed and wait for the model thread."""
        return self.stepped.drain.parts.executor.waiting()

    def busy(self) -> BatchRun:
        """A forward that has begun."""
        self.publish()
        run = self.stepped.begin()
        assert run is not None
        return run


@pytest.fixture
def start(models_root: Path) -> Iterator[Start]:
    """A worker under this setting, in milliseconds."""
    write_double(models_root)
    harnesses: list[Iterator[SteppedHarness]] = []

    def start(max_wait_ms: float) -> Worker:
        harnesses.append(open_harness(models_root, batching={"max_wait_ms": max_wait_ms}))
        return Worker(next(harnesses[-1]))

    yield start
    for harness in harnesses:
        next(harness, None)


def closing_wait_s(worker: Worker) -> float:
    """How long one job stays open for others, behind a forward that goes on."""
    running = worker.busy()
    arrived = worker.harness.now
    worker.publish()
    if not worker.ahead():
        wakeup = worker.stepped.drain.parts.scheduler.next_wakeup()
        assert wakeup < inf
        worker.sleep_until(wakeup)
    assert [len(run.jobs) for run in worker.ahead()] == [1]
    waited_s = worker.harness.now - arrived
    worker.sleep_until(arrived + FORWARD_S)
    worker.stepped.end(running)
    assert worker.stepped.forward()
    return waited_s


@pytest.mark.parametrize("max_wait_ms", [0, 5, 50])
def test_a_lone_job_waits_so_long_for_others_while_the_device_is_busy(start: Start, max_wait_ms: float):
    """At the median and at the p99: for the setting, and not longer but for the loop's own slack."""
    worker = start(max_wait_ms)
    waits_s = []
    for _ in range(ROUNDS):
        waits_s.append(closing_wait_s(worker))
        worker.harness.now += GAP_S
    assert min(waits_s) >= max_wait_ms / 1000 - 1e-6
    assert max(waits_s) <= max_wait_ms / 1000 + SLACK_S


@pytest.mark.parametrize(("max_wait_ms", "sizes"), [(0, [1, 3]), (5, [2, 2]), (50, [3, 1])])
def test_jobs_that_come_meanwhile_share_its_forward(start: Start, max_wait_ms: float, sizes: list[int]):
    """Behind one forward come jobs after 0, 3, 20 and 70 ms: the setting decides how many of them the next one has."""
    worker = start(max_wait_ms)
    running = worker.busy()
    arrived = worker.harness.now
    for after_s in (0.0, 0.003, 0.02, 0.07):
        worker.sleep_until(arrived + after_s)
        worker.publish()
    worker.sleep_until(arrived + FORWARD_S)
    worker.stepped.end(running)
    assert [len(ids) for ids in worker.stepped.forwards()] == sizes


@pytest.mark.parametrize("max_wait_ms", [0, 5, 50])
def test_an_idle_device_waits_for_no_others(start: Start, max_wait_ms: float):
    """Whatever the setting: the job is on the model before the clock moves."""
    worker = start(max_wait_ms)
    for _ in range(ROUNDS):
        job_id = worker.publish()
        run = worker.stepped.begin()
        assert run is not None
        assert [job.header.id for job in run.jobs] == [job_id]
        assert run.started == run.jobs[0].claimed
        worker.harness.now += FORWARD_S
        worker.stepped.end(run)
