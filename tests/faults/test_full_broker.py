"""F12: another program fills the broker up to its maxmemory, and it refuses to write."""

from __future__ import annotations

import time

import pytest
import redis

from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.rounds import seeds
from tests.servers import RedisServer, wait_until

RESUME_S = 2.0
FULL_S = 2.5
"""Longer than a lease: nothing may be lost because renewals are refused, too."""
BACKLOG = 600
"""Over a second of work."""
_ROOM = 4 * 1024 * 1024


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """Two workers, each of which does 320 jobs a second."""
    stage = open_stage(forward_s=0.05)
    stage.start_workers(2)
    return stage


def _fill(server: RedisServer) -> None:
    """Leaves the server far beyond its limit: what ends meanwhile does not make room either."""
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + _ROOM)
        # Not a long value: the server counts what it receives before it asks whether there is room.
        client.setrange("foreign", 8 * _ROOM, b"end")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("one-more", "byte")


def _relieve(server: RedisServer) -> None:
    with server.client() as client:
        client.delete("foreign")


@pytest.mark.parametrize("seed", seeds())
def test_full_broker_refuses_and_loses_nothing(seed: int, stage: Stage, start_load: StartLoad, trial: Trial):
    """Submits are refused without effect, workers live on, and 2 s after the relief they finish what waited."""
    waiting = start_load(stage.server, stage.forward_log)
    refused = start_load(stage.server, stage.forward_log, timeout_s=1)
    refused.publish(1)
    processes = [worker.pid for worker in stage.workers]
    waiting.publish_at_once(BACKLOG + seed)
    accepted = refused.accepted
    _fill(stage.server)
    full_since = time.monotonic()
    try:
        while time.monotonic() < full_since + FULL_S:
            refused.publish(1)
    finally:
        _relieve(stage.server)
    trial.recovered(waiting.await_progress(30), within=RESUME_S)
    assert [worker.pid for worker in stage.workers if worker.is_running] == processes
    histories = waiting.history(60), refused.history(60)
    findings = trial.check(*histories)
    assert refused.accepted == accepted
    assert refused.refused, "no job was refused"
    assert findings.recovered == frozenset()
    waiting.check_answers()
    wait_until(lambda: all(worker.report().get("ready") for worker in stage.workers), 5, "the workers are ready")
