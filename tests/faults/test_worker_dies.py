"""F1: a worker is killed (kill -9) at each of the eight checkpoints of the job path, or told to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import StartWorker
from tests.faults.conftest import StartFailing, StartLoad, Trial
from tests.faults.failing_worker import POINTS
from tests.faults.history import check
from tests.faults.rounds import seeds
from tests.packages import recorded_forwards, write_recorder
from tests.servers import RedisServer, WorkerProcess, wait_until

LEASE_S = 1.0
"""What tests/servers.py starts every worker with."""
_AFTER_THE_FORWARD = ("after-forward", "before-commit")
_HOLDS_NOTHING_CERTAIN = ("before-claim", "after-commit")


class Stage(NamedTuple):
    """A server with a recorder model and one sound worker on it."""

    server: RedisServer
    models_root: Path
    forward_log: Path


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, shared_redis: RedisServer) -> Iterator[Stage]:
    """Shared by all points: what survives one death meets the next."""
    folder = tmp_path_factory.mktemp("stage")
    stage = Stage(shared_redis, folder / "models", folder / "forward_log")
    write_recorder(stage.models_root, stage.forward_log, forward_s=0.02)
    survivor = WorkerProcess(stage.server, stage.models_root, folder, name="survivor@test")
    survivor.start()
    yield stage
    survivor.stop()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("seed", seeds(ways=len(POINTS)))
def test_killed_worker_loses_and_doubles_nothing(
    seed: int, point, stage: Stage, start_failing: StartFailing, start_load: StartLoad, trial: Trial
):
    """kill -9 at any point: every accepted job ends exactly once, what the worker held within the lease plus 1 s."""
    load = start_load(stage.server, stage.forward_log)
    worker = start_failing(
        stage.server, stage.models_root, how="kill", point=point, nth=2 + seed if point != "mid-drain" else 1
    )
    with load.running():
        if point == "mid-drain":
            wait_until(lambda: load.ended() > 50, 20, "the load is under way")
            worker.terminate()
        status = wait_until(lambda: worker.child.poll(), 20, f"the worker dies at {point}")
        died_ms = time.time() * 1000
    assert status == -signal.SIGKILL, worker.tail()

    findings = trial.check(load.history())
    assert findings.recovered == frozenset()
    load.check_answers()
    redelivered = [load.claimed_ms(job) for job, result in load.results.items() if result.attempt > 1]
    if point not in _HOLDS_NOTHING_CERTAIN:
        assert redelivered, "the dead worker held nothing"
    if point in _AFTER_THE_FORWARD:
        assert findings.re_executed
    if redelivered:
        trial.recovered((max(redelivered) - died_ms) / 1000, within=LEASE_S + 1)


def test_stopped_worker_finishes_its_batch_and_gives_back_the_rest(
    shared_redis: RedisServer, tmp_path: Path, models_root: Path, start_worker: StartWorker, start_load: StartLoad
):
    """SIGTERM during a batch: that batch ends here, what was claimed beyond it runs elsewhere, on its first attempt."""
    forward_log = tmp_path / "forward_log"
    write_recorder(models_root, forward_log, "drained", forward_s=0.3)
    load = start_load(shared_redis, forward_log, "drained")
    first = start_worker(shared_redis, models_root)
    load.publish(40)
    wait_until(lambda: recorded_forwards(forward_log)[1:], 10, "a batch runs")
    first.terminate()
    assert first.wait(180) == 0
    running = {number for forward in recorded_forwards(forward_log) for number in forward if number}
    assert load.ended() == len(running) > 0

    start_worker(shared_redis, models_root)
    findings = check(load.history())
    assert findings.violations == {}
    assert findings.re_executed == frozenset()
    assert {result.attempt for result in load.results.values()} == {1}
