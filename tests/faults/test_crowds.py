"""P1: a noisy tenant, a flood of critical jobs, and 1,000 equal jobs at once."""

from __future__ import annotations

import random
import time
from contextlib import closing
from itertools import chain

import pytest

from penstock import Client
from penstock.registry.broker.redis_streams import RedisStreams
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.load import row
from tests.faults.rounds import seeds
from tests.packages import recorded_forwards
from tests.servers import wait_until

FORWARD_S = 0.05
BATCH = 16
IN_FLIGHT = 64
AGEING_S = 0.2
EQUAL_JOBS = 1000
FLOOD = 640


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker, easily kept busy."""
    stage = open_stage(forward_s=FORWARD_S, max_batch_size=BATCH)
    stage.start_worker(PENSTOCK_INFERENCE_QUEUE_AGEING_S=f"{AGEING_S}")
    return stage


@pytest.mark.parametrize("seed", seeds(ways=3))
def test_noisy_tenant_delays_others_by_its_share_only(
    seed: int, stage: Stage, start_load: StartLoad, trial: Trial, monkeypatch: pytest.MonkeyPatch
):
    """A tenant that never stops has a bounded number of jobs in flight; a quiet one waits for those at most."""
    monkeypatch.setenv("PENSTOCK_INFERENCE_QUEUE_TENANT_MAX_IN_FLIGHT", str(IN_FLIGHT))
    noisy, quiet = (start_load(stage.server, stage.forward_log) for _ in range(2))
    chance = random.Random(seed)
    slowest = 0.0
    with noisy.running(burst=100, pause_s=0.0):
        wait_until(lambda: noisy.refused, 20, "the noisy tenant has its share")
        for _ in range(10):
            quiet.publish(chance.randint(1, 4))
            slowest = max(slowest, quiet.await_all(20))
    # What was in flight, what the worker held of it beyond, and its own batch; and as long again for a busy machine.
    trial.recovered(slowest, within=2 * (IN_FLIGHT / BATCH + 3) * FORWARD_S + 0.2)
    findings = trial.check(noisy.history(), quiet.history())
    assert findings.recovered == frozenset()
    assert noisy.refused.isdisjoint(noisy.results)
    noisy.check_answers()
    quiet.check_answers()


@pytest.mark.parametrize("seed", seeds(ways=3))
def test_flood_of_critical_jobs_does_not_starve_low_ones(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """Where more critical jobs wait than can run, low ones that have aged get an eighth of every batch."""
    flood, low = (start_load(stage.server, stage.forward_log) for _ in range(2))
    with closing(RedisStreams.from_url(stage.server.url)) as operator:
        operator.pause(stage.model)
        flood.publish_at_once(FLOOD, priority="critical")
        low.publish(7 + seed % 4, priority="low")
        operator.resume(stage.model)
    ended_s = low.await_all(60)
    flood.await_all(60)
    # Two of sixteen in every batch, once they have aged, behind the batches that had been claimed before.
    trial.recovered(ended_s, within=2 * (AGEING_S + (10 / 2 + 3) * FORWARD_S) + 0.2)
    low_history, flood_history = low.history(60), flood.history(60)
    trial.check(flood_history, low_history)
    low.check_answers()
    forwards = recorded_forwards(stage.forward_log)
    last_low = max(turn for turn, rows in enumerate(forwards) if low_history.accepted.intersection(rows))
    behind = [rows for rows in forwards[last_low + 1 :] if flood_history.accepted.intersection(rows)]
    assert len(behind) >= FLOOD / BATCH / 4, "the low jobs waited for the end of the flood"


@pytest.mark.parametrize("seed", seeds(ways=3))
def test_thousand_equal_jobs_are_one_forward(seed: int, open_stage: OpenStage, trial: Trial):
    """1,000 jobs that ask the same of the same model while the first of them runs: one forward answers all."""
    stage = open_stage(forward_s=1.0, max_batch_size=BATCH)
    stage.start_worker()
    number = 3_000_000.0 + seed
    with Client(stage.server.url) as client:
        begun = time.monotonic()
        jobs = client.submit_many(stage.model, [{"x": row(number)}] * EQUAL_JOBS)
        answers = [float(job.result(180)["y"][0, 0]) for job in jobs]
        trial.recovered(time.monotonic() - begun, within=3.0)
    assert answers == [number * 2] * EQUAL_JOBS
    ran = [each for each in chain.from_iterable(recorded_forwards(stage.forward_log)) if each == number]
    assert len(ran) == 1
    trial.note(times=EQUAL_JOBS, jobs=EQUAL_JOBS)
    stage.close()
