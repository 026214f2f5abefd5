"""F3: workers are killed (kill -9) at random moments: 100 kills while over 10,000 jobs come in."""

from __future__ import annotations

import random

import pytest

from penstock.registry.queues import dead_key
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.rounds import seeds
from tests.servers import let_pass, wait_until

KILLS = 5
"""In one round, over JOBS jobs: 20 rounds are the 100 over 10,000."""
JOBS = 500
BATCH = 16
FORWARD_S = 0.01
LONGEST_PAUSE_S = 1.0
"""From one kill to the next. Who kills without end kills some job three times, and that is poison then."""
RESUME_S = 4.0
"""A lease of one second and one more, and the start of a process where no other worker is left."""


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """Three workers, of which any one is killed and started again."""
    stage = open_stage(forward_s=FORWARD_S)
    stage.start_workers(3)
    return stage


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds())
def test_random_kills_lose_and_double_nothing(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """Every job ends once and in no dead letter, and no kill makes more than a batch run again."""
    chance = random.Random(seed)
    load = start_load(stage.server, stage.forward_log)
    slowest = 0.0
    with load.running(burst=2 * BATCH, pause_s=0.12):
        for _ in range(KILLS):
            let_pass(chance.uniform(0.0, LONGEST_PAUSE_S))
            victim = chance.choice([worker for worker in stage.workers if worker.is_running])
            victim.kill()
            victim.launch()
            slowest = max(slowest, load.await_progress(20))
        wait_until(lambda: load.accepted >= JOBS, 60, "all jobs are published")
    trial.recovered(slowest, within=RESUME_S)
    findings = trial.check(load.history(), times=KILLS)
    assert len(findings.re_executed) <= KILLS * BATCH
    assert findings.recovered == frozenset()
    load.check_answers()
    with stage.server.client() as client:
        assert client.xlen(dead_key(stage.model)) == 0
