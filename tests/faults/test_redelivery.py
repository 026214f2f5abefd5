"""P1: a worker with the default lease (5 s) dies with kill -9, and another one has its jobs within 6 s."""

from __future__ import annotations

import random
import time

import pytest

from penstock.registry.settings_sections import QueueConfig
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.rounds import seeds
from tests.servers import wait_until

LEASE_S = QueueConfig().lease_s
WITHIN_S = LEASE_S + 1
LONGEST_WAIT_S = 1.5


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """Two workers with the lease that users get."""
    stage = open_stage(forward_s=0.05)
    stage.start_workers(2, PENSTOCK_INFERENCE_QUEUE_LEASE_S=f"{LEASE_S:g}")
    return stage


@pytest.mark.parametrize("seed", seeds())
def test_jobs_of_a_killed_worker_are_redelivered_within_the_lease_and_a_second(
    seed: int, stage: Stage, start_load: StartLoad, trial: Trial
):
    """The jobs that the dead worker held are claimed again at most 6 s after its death."""
    load = start_load(stage.server, stage.forward_log)
    chance = random.Random(seed)
    victim = chance.choice(stage.workers)
    killed_after = time.monotonic() + chance.uniform(0.2, LONGEST_WAIT_S)
    with load.running(burst=16, pause_s=0.02):
        load.await_progress(20)
        wait_until(lambda: time.monotonic() > killed_after, LONGEST_WAIT_S + 5, "its moment comes")
        victim.kill()
        died_ms = time.time() * 1000
    victim.launch()
    trial.check(load.history())
    redelivered = [load.claimed_ms(job) for job, result in load.results.items() if result.attempt > 1]
    assert redelivered, "the dead worker held nothing"
    trial.recovered((max(redelivered) - died_ms) / 1000, within=WITHIN_S)
    load.check_answers()
    wait_until(victim.is_ready, 30, "the worker is back")
