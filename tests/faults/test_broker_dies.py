"""F4: the broker is killed and comes back with its disk, while jobs wait and more come in."""

from __future__ import annotations

import os
from pathlib import Path

from tests.conftest import StartWorker
from tests.faults.conftest import StartLoad
from tests.faults.history import check
from tests.faults.load import Load
from tests.packages import write_recorder
from tests.servers import RedisServer, wait_until

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "3"))
"""How often the broker dies; 20 for the full count."""
RESUME_S = 5.0
"""From the moment that the broker answers again."""


def _sync_every_write(server: RedisServer) -> None:
    # With everysec the server leaves its buffer in memory while an fsync of the second before still runs. On a slow
    # disk a job that was accepted in that time would die with the process.
    with server.client() as client:
        client.config_set("appendfsync", "always")


def _await_progress(load: Load, timeout_s: float) -> None:
    done = load.ended()
    wait_until(lambda: load.ended() > done, timeout_s, "the worker finishes more jobs")


def test_killed_broker_loses_nothing_and_work_resumes(
    redis_server: RedisServer, models_root: Path, tmp_path: Path, start_worker: StartWorker, start_load: StartLoad
):
    """kill -9 of the broker with a backlog and one worker: nothing lost, consuming again within 5 s, every time."""
    ledger = tmp_path / "ledger"
    write_recorder(models_root, ledger, forward_s=0.05)
    _sync_every_write(redis_server)
    start_worker(redis_server, models_root)
    load = start_load(redis_server, ledger)
    for _ in range(ROUNDS):
        with load.running():
            load.publish(150)
            _await_progress(load, 20)
            redis_server.restart()
            _sync_every_write(redis_server)
            _await_progress(load, RESUME_S)
    assert check(load.history(60)).violations == {}
    load.check_answers()
