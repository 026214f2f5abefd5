"""F13: two workers are restarted one after the other (SIGTERM, drain, start) under half their load; the time is p99."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from penstock.registry.envelope import ResultHeader
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.load import Load
from tests.faults.rounds import seeds
from tests.servers import WorkerProcess, let_pass

FORWARD_S = 0.05
MAX_BATCH = 4
LEASE_S = 1.0
JOBS_PER_S = 2 * MAX_BATCH / FORWARD_S / 2
"""Half of what both workers do; while one is away, all that the other one does."""
STEADY_S = 1.5


@pytest.fixture
def stage(open_stage: OpenStage) -> Stage:
    """Two workers whose capacity is known."""
    stage = open_stage(forward_s=FORWARD_S, max_batch_size=MAX_BATCH)
    stage.start_workers(2)
    return stage


@contextmanager
def _steadily(load: Load) -> Iterator[None]:
    """Publishes JOBS_PER_S inside the block, each when it is due."""
    is_over = threading.Event()
    begun = time.monotonic()

    def publish_on() -> None:
        for number in itertools.count():
            if is_over.wait(max(0.0, begun + number / JOBS_PER_S - time.monotonic())):
                return
            load.publish(1)

    thread = threading.Thread(target=publish_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(30)


def _latency_ms(results: Sequence[ResultHeader]) -> float:
    """The 99th percentile from acceptance to the end of the forward."""
    spans = [result.timings.queue_ms + result.timings.batch_ms + result.timings.compute_ms for result in results]
    return float(np.percentile(spans, 99))


def _restart(worker: WorkerProcess) -> None:
    worker.terminate()
    assert worker.wait(180) == 0, worker.tail()
    worker.start()


@pytest.mark.parametrize("seed", seeds())
def test_rolling_restart_fails_no_job(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """Nothing is lost, fails or runs twice, and p99 stays within twice the steady one and a lease."""
    before = start_load(stage.server, stage.forward_log)
    with _steadily(before):
        let_pass(STEADY_S)
    meanwhile = start_load(stage.server, stage.forward_log)
    with _steadily(meanwhile):
        for worker in stage.workers:
            _restart(worker)
    findings = trial.check(before.history(), meanwhile.history(), times=len(stage.workers))
    assert findings.re_executed == frozenset()
    assert {result.attempt for result in meanwhile.results.values()} == {1}
    assert meanwhile.accepted == len(meanwhile.results)
    before.check_answers()
    meanwhile.check_answers()
    steady, rolling = (_latency_ms([*load.results.values()]) for load in (before, meanwhile))
    trial.recovered(rolling / 1000, within=2 * steady / 1000 + LEASE_S)
