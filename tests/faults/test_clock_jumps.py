"""P1: the clocks of workers and of clients jump by an hour, forth and back."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.jumping_worker import Clock
from tests.faults.rounds import seeds
from tests.servers import RedisServer, WorkerProcess

HOUR_S = 3600.0
DEADLINE_S = 20.0


class JumpingWorker(WorkerProcess):
    """A worker process with a clock that the test sets."""

    def __init__(self, server: RedisServer, models_root: Path, folder: Path, *, name: str) -> None:
        super().__init__(server, models_root, folder, name=name)
        self.clock = Clock(folder / "clock")

    def launch(self) -> None:
        """Start it without waiting."""
        program = [sys.executable, "-m", "tests.faults.jumping_worker"]
        self._spawn([*program, str(self.folder / "clock"), self.name], self._environment)


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """A server and a model, without workers."""
    return open_stage(forward_s=0.01)


@pytest.fixture(scope="module")
def workers(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[JumpingWorker]]:
    """Two, each of which could take the other for dead."""
    folders = [tmp_path_factory.mktemp(name) for name in ("early", "late")]
    workers = [JumpingWorker(stage.server, stage.models_root, each, name=f"{each.name}@test") for each in folders]
    for worker in workers:
        worker.start()
    yield workers
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("seed", seeds())
def test_clocks_of_workers_and_clients_play_no_part(
    seed: int,
    stage: Stage,
    workers: list[JumpingWorker],
    start_load: StartLoad,
    trial: Trial,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """No job with a deadline expires, no lease of the living lapses, and nothing is lost, whichever clock jumps."""
    chance = random.Random(seed)
    ours = Clock(tmp_path / "clock")
    monkeypatch.setattr(time, "time", ours.time)
    monkeypatch.setattr(time, "time_ns", ours.time_ns)
    clocks = [ours, *(worker.clock for worker in workers)]
    load = start_load(stage.server, stage.forward_log)
    jumps = [(clock, hours) for clock in clocks for hours in (1, -1, 0)]
    chance.shuffle(jumps)
    for clock, hours in jumps:
        # With nothing in the queue, the next jobs are handed over without a look at any clock.
        clock.jump_to(hours * HOUR_S)
        load.publish(8, deadline_s=DEADLINE_S)
        load.publish(24)
        load.await_all(10)
    findings = trial.check(load.history(), times=len(jumps))
    assert findings.re_executed == frozenset()
    load.check_answers()
    assert {result.attempt for result in load.results.values()} == {1}
