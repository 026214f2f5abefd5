"""F2: a worker freezes (SIGSTOP) with its connections open, and is killed, or goes on when its lease has lapsed."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.registry.metrics import FENCED
from penstock.registry.queues import GROUP, Priority, stream_key
from tests.faults.conftest import StartFailing, StartLoad, Trial
from tests.faults.history import check
from tests.faults.load import Load
from tests.faults.rounds import seeds
from tests.packages import write_recorder
from tests.servers import RedisServer, WorkerProcess, wait_until

LEASE_S = 1.0
"""What tests/servers.py starts every worker with."""


@pytest.fixture(scope="module")
def forward_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recorder model notes its forwards; its package lies beside it."""
    folder = tmp_path_factory.mktemp("recorder")
    write_recorder(folder / "models", folder / "forward_log")
    return folder / "forward_log"


@pytest.fixture(scope="module")
def survivor(
    forward_log: Path, tmp_path_factory: pytest.TempPathFactory, shared_redis: RedisServer
) -> Iterator[WorkerProcess]:
    """A sound worker beside the one that freezes."""
    worker = WorkerProcess(
        shared_redis, forward_log.parent / "models", tmp_path_factory.mktemp("survivor"), name="beside@test"
    )
    yield worker.start()
    worker.stop()


def _redelivered_s(load: Load, frozen_ms: float) -> float:
    """From the freeze until the last job of the frozen worker was claimed by another one."""
    claimed = [load.claimed_ms(job) for job, result in load.results.items() if result.attempt > 1]
    assert claimed, "the frozen worker held nothing"
    return (max(claimed) - frozen_ms) / 1000


def _held_by(server: RedisServer, worker: WorkerProcess) -> int:
    with server.client() as client:
        consumers = client.xinfo_consumers(stream_key("recorder", Priority.NORMAL), GROUP)
    return sum(each["pending"] for each in consumers if each["name"].decode().startswith(f"{worker.name}:"))


def _fenced(worker: WorkerProcess) -> float:
    with urllib.request.urlopen(worker.report()["probe"] + "/metrics", timeout=180) as page:  # noqa: S310  # loopback
        families = text_string_to_metric_families(page.read().decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == FENCED.name)


@pytest.mark.parametrize("seed", seeds(ways=3))
def test_jobs_handed_to_a_frozen_worker_survive_its_death(
    seed: int,
    shared_redis: RedisServer,
    forward_log: Path,
    survivor: WorkerProcess,
    start_worker,
    start_load: StartLoad,
    trial: Trial,
):
    """Jobs published after the freeze, some of them handed to the frozen worker, all end once after kill -9."""
    worker = start_worker(shared_redis, forward_log.parent / "models")
    load = start_load(shared_redis, forward_log)

    frozen_ms = 0.0

    def is_handed_jobs_while_frozen() -> bool:
        nonlocal frozen_ms
        worker.freeze()
        frozen_ms = time.time() * 1000
        before = _held_by(shared_redis, worker)
        load.publish(3 + seed)
        if _held_by(shared_redis, worker) > before:
            return True
        # Its claim was not out at that moment.
        worker.thaw()
        return False

    wait_until(is_handed_jobs_while_frozen, 20, "the frozen worker is handed a job")
    worker.kill()
    trial.check(load.history())
    trial.recovered(_redelivered_s(load, frozen_ms), within=LEASE_S + 1)
    load.check_answers()


@pytest.mark.parametrize("point", ["mid-forward", "before-commit"])
@pytest.mark.parametrize("seed", seeds(ways=3))
def test_results_after_a_lapsed_lease_are_discarded(
    seed: int,
    point,
    shared_redis: RedisServer,
    forward_log: Path,
    survivor: WorkerProcess,
    start_failing: StartFailing,
    start_load: StartLoad,
    trial: Trial,
):
    """A worker that slept past its lease and goes on changes nothing with its late results, and serves again."""
    worker = start_failing(shared_redis, forward_log.parent / "models", how="stop", point=point, nth=seed)
    load = start_load(shared_redis, forward_log)
    with load.running():
        wait_until(lambda: "T (stopped)" in Path(f"/proc/{worker.pid}/status").read_text(), 20, "the worker freezes")
        frozen_ms = time.time() * 1000
    assert check(load.history()).violations == {}
    trial.recovered(_redelivered_s(load, frozen_ms), within=LEASE_S + 1)

    worker.thaw()
    if point == "before-commit":
        # At the other point it may hear of its loss in time, and not even try.
        wait_until(lambda: worker.report() and _fenced(worker) > 0, 10, "the late commit is fenced")
        assert [line for line in worker.logs() if line["msg"] == "a late commit was discarded"]
    survivor.freeze()
    try:
        later = start_load(shared_redis, forward_log)
        later.publish(8)
        assert check(later.history()).violations == {}
        assert {result.worker for result in later.results.values()} == {worker.name}
    finally:
        survivor.thaw()
    trial.check(load.history())
    load.check_answers()
