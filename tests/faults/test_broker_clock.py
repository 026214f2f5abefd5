"""P1: the broker's clock jumps by an hour, forth and back, while jobs wait and run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.jumping_worker import Clock
from tests.faults.rounds import seeds

HOUR_S = 3600.0
RESUME_S = 3.0
"""A lease, twice: a worker that seems to be away is given one, too."""


class Timed(NamedTuple):
    """A stage whose server has the time of `clock`."""

    stage: Stage
    clock: Clock


@pytest.fixture(scope="module")
def timed(open_stage: OpenStage, clock_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Timed:
    """Two workers, whose results outlive the jumps."""
    file = tmp_path_factory.mktemp("clock") / "time"
    clock = Clock(file)
    environment = {"LD_PRELOAD": str(clock_library), "CLOCK_FILE": str(file)}
    stage = open_stage(forward_s=0.05, server_environment=environment)
    stage.start_workers(2, PENSTOCK_INFERENCE_QUEUE_RESULT_TTL_S="86400")
    return Timed(stage, clock)


@pytest.mark.parametrize("seed", seeds())
def test_jump_of_the_brokers_clock_loses_nothing(seed: int, timed: Timed, start_load: StartLoad, trial: Trial):
    """Jobs that wait or run at the jump are answered soon after it, and so are later jobs."""
    stage, clock = timed
    load = start_load(stage.server, stage.forward_log)
    with stage.server.client() as client:
        for hours in (1, 0) if seed % 2 else (-1, 0):
            before_s, _ = client.time()
            load.publish_at_once(200 + seed)
            clock.jump_to(hours * HOUR_S)
            after_s, _ = client.time()
            assert abs(abs(after_s - before_s) - HOUR_S) < 10, "the server's clock did not jump"
            trial.recovered(load.await_progress(30), within=RESUME_S)
            trial.recovered(load.await_all(30), within=RESUME_S + 2)
    # The jump ended the lifetime of reply streams, too.
    load.check_records()
    trial.note(times=2, jobs=load.accepted)
