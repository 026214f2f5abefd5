"""F4: the broker is killed (kill -9) and comes back with its disk, while jobs wait and more come in."""

from __future__ import annotations

import time

import pytest

from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.rounds import seeds
from tests.servers import RedisServer

RESUME_S = 5.0
"""From the moment that the broker answers again."""


def _sync_every_write(server: RedisServer) -> None:
    # With everysec the server leaves its buffer in memory while an fsync of the second before still runs. On a slow
    # disk a job that was accepted in that time would die with the process.
    with server.client() as client:
        client.config_set("appendfsync", "always")


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker, on a server that forgets nothing."""
    stage = open_stage(forward_s=0.05)
    _sync_every_write(stage.server)
    stage.start_worker()
    return stage


@pytest.mark.parametrize("seed", seeds())
def test_killed_broker_loses_nothing_and_work_resumes(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """kill -9 of the broker with a backlog and one worker: nothing lost, consuming again within 5 s, every time."""
    load = start_load(stage.server, stage.forward_log)
    with load.running():
        load.publish_at_once(100 + 10 * seed)
        load.await_progress(20)
        stage.server.restart()
        is_back = time.monotonic()
        _sync_every_write(stage.server)
        load.await_progress(30)
        trial.recovered(time.monotonic() - is_back, within=RESUME_S)
    trial.check(load.history(60))
    load.check_answers()
