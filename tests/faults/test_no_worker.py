"""P1: no worker for the whole life of 10,000 jobs, and the broker's clock jumps by an hour while jobs wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from penstock import Client, Expired, JobHandle
from penstock.registry.broker.base import State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.package import load_package
from penstock.registry.queues import flow_key
from tests.faults.conftest import OpenStage, Stage, Trial
from tests.faults.jumping_worker import Clock
from tests.faults.rounds import seeds
from tests.packages import recorded_forwards

HOUR_S = 3600
INPUTS = {"x": np.ones((1, 4), np.float32)}


class Deserted(NamedTuple):
    """A stage without a worker, whose server has the time of `clock`."""

    stage: Stage
    clock: Clock
    broker: RedisStreams


@pytest.fixture(scope="module")
def deserted(
    open_stage: OpenStage, clock_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deserted]:
    """The model is known from an earlier worker."""
    file = tmp_path_factory.mktemp("clock") / "time"
    clock = Clock(file)
    stage = open_stage(server_environment={"LD_PRELOAD": str(clock_library), "CLOCK_FILE": str(file)})
    broker = RedisStreams.from_url(stage.server.url)
    broker.put_spec(stage.model, load_package(next((stage.models_root / stage.model).iterdir())).spec.to_json())
    yield Deserted(stage, clock, broker)
    broker.close()


def _end_of(job: JobHandle) -> str:
    try:
        job.result(180)
    except Expired:
        return job.status()
    return "answered"


def _check_ended(deserted: Deserted, jobs: list[JobHandle], trial: Trial) -> None:
    """All jobs ended as expired, their inputs left the queue, and no tenant has a job in flight."""
    stage, _, broker = deserted
    records = broker.job_records([job.id for job in jobs])
    trial.note(times=1, jobs=len(jobs))
    assert {record and record.state for record in records} == {State.EXPIRED}
    assert sum(depth.jobs for depth in broker.depths(stage.model)) == 0
    with stage.server.client() as client:
        assert client.hget(flow_key(stage.model), "t:default") is None


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_job_expires_without_a_worker(seed: int, count: int, deserted: Deserted, trial: Trial):
    """Two clients ask for all jobs at a time, one of them by their ids alone: each job ends once, as expired."""
    stage = deserted.stage
    with Client(stage.server.url) as client, Client(stage.server.url) as other, ThreadPoolExecutor(4) as pool:
        jobs = client.submit_many(stage.model, [INPUTS] * count, deadline_s=1 + seed % 2)
        own = [pool.submit(_end_of, job) for job in jobs]
        found = [pool.submit(_end_of, other.job(job.id)) for job in reversed(jobs)]
        assert {each.result(120) for each in (*own, *found)} == {"expired"}
    _check_ended(deserted, jobs, trial)


@pytest.mark.parametrize("seed", seeds())
def test_jump_of_the_clock_expires_what_waits(seed: int, deserted: Deserted, trial: Trial):
    """The deadline is the broker's: an hour later by its clock, jobs of half an hour have expired; so have new jobs of
    a second, after the clock went back."""
    stage, clock, _ = deserted
    with Client(stage.server.url) as client, ThreadPoolExecutor(20) as pool:
        jobs = client.submit_many(stage.model, [INPUTS] * 20, deadline_s=HOUR_S / 2)
        patient = client.submit(stage.model, INPUTS, deadline_s=2 * HOUR_S)
        clock.jump_to(HOUR_S)
        assert set(pool.map(_end_of, jobs)) == {"expired"}
        assert patient.status() == "queued"
        clock.jump_to(0)
        late = client.submit_many(stage.model, [INPUTS] * 20, deadline_s=1)
        assert set(pool.map(_end_of, late)) == {"expired"}
        assert patient.cancel()
    _check_ended(deserted, [*jobs, *late], trial)


def test_later_worker_finds_nothing_to_do(deserted: Deserted):
    """No expired job is run by a worker that starts afterwards."""
    stage = deserted.stage
    with Client(stage.server.url) as client:
        assert _end_of(client.submit(stage.model, {"x": [[-77.0, 0, 0, 0]]}, deadline_s=0.1)) == "expired"
        stage.start_worker()
        assert client.submit(stage.model, {"x": [[5.0, 0, 0, 0]]}).result(180)["y"][0, 0] == 10
    assert [-77.0] not in recorded_forwards(stage.forward_log)
