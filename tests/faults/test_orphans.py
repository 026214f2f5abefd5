"""F23: a worker or its supervisor is killed (kill -9) and its children stay: a model forked, also in C."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock import Client
from tests.faults.conftest import OpenStage, Stage, StartLoad, Trial
from tests.faults.rounds import seeds
from tests.packages import write_package
from tests.processes import descendants, is_alive, kill
from tests.servers import wait_until

LEASE_S: Final = 1.0
FORKER: Final = """
    import ctypes, os, time
    import numpy as np

    def build():
        def forward(inputs):
            kinds = set(inputs["x"][:, 0].tolist())
            # 1: the child waits. 2: it returns into the worker's code. 3: a library in C forks.
            if 1.0 in kinds and os.fork() == 0:
                time.sleep(600)
            if 2.0 in kinds:
                os.fork()
            if 3.0 in kinds and ctypes.CDLL(None).fork() == 0:
                time.sleep(600)
            return {"y": inputs["x"] * 2}

        return forward
"""
"""A fork in Python ends with its worker. The fork of a C library cannot be tied to it: the next start ends it."""


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """A server with a recorder model and one whose forwards fork."""
    stage = open_stage()
    write_package(stage.models_root, "forker", FORKER, max_batch_size=1)
    return stage


def _fork_children(stage: Stage, worker: int) -> set[int]:
    """Jobs make the worker fork in each way; returns its descendants that stay while it lives."""
    with Client(stage.server.url) as client:
        for kind in (1.0, 2.0, 3.0):
            answer = client.submit("forker", {"x": np.full((1, 4), kind, np.float32)}).result(180)
            assert answer["y"][0, 0] == 2 * kind
    return wait_until(lambda: _exactly(descendants(worker), 2), 60, "the fork that returned has ended")


def _exactly(found: set[int], count: int) -> set[int]:
    return found if len(found) == count else set()


def _worker_of(supervisor: int) -> int:
    return next(pid for pid in descendants(supervisor) if b"penstock.workers" in _command(pid))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    "victim",
    ["supervisor", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bare worker", "supervised worker"))],
)
@pytest.mark.parametrize("seed", seeds(ways=3))
def test_children_of_the_dead_do_not_keep_the_device(
    seed: int, victim: str, stage: Stage, start_load: StartLoad, tmp_path: Path, trial: Trial
):
    """The next worker of this device starts, nothing is lost, and no child of the dead one is left."""
    own: Any = {"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_WORKER_INDEX": "0"}
    first = stage.start_worker(is_supervised=victim != "bare worker", **own)
    worker = first.pid if victim == "bare worker" else _worker_of(first.pid)
    left = _fork_children(stage, worker)
    load = start_load(stage.server, stage.forward_log)
    try:
        with load.running():
            load.publish(20 + seed)
            load.await_progress(30)
            os.kill(worker if victim == "supervised worker" else first.pid, signal.SIGKILL)
            died = time.monotonic()
            if victim != "supervised worker":
                stage.start_worker(**own)
            load.await_progress(60)
            trial.recovered(time.monotonic() - died, within=LEASE_S + 10)
        wait_until(lambda: not any(map(is_alive, (worker, *left))), 30, "no child of the dead worker is left")
        trial.check(load.history(60))
        load.check_answers()
    finally:
        for pid in left:
            kill(pid)
        for process in stage.workers:
            process.stop()
