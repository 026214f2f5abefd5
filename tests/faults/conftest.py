"""What fault tests share: a failing worker as a process, and loads that are closed in the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from uuid import uuid4

import pytest

from tests.faults.load import Load
from tests.servers import RedisServer, WorkerProcess


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
        program = [sys.executable, "-m", "tests.faults.failing_worker"]
        self._spawn([*program, *self._fail_point, self.name], self._environment)


StartFailing = Callable[..., FailingWorker]
"""(server, models_root, *, how, point, nth, environment) -> FailingWorker."""
StartLoad = Callable[..., Load]
"""(server, ledger, model="recorder") -> Load."""


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
    """Makes loads for a recorder model."""
    loads: list[Load] = []

    def start(server: RedisServer, ledger: Path, model: str = "recorder") -> Load:
        loads.append(Load(server, model, ledger, f"load-{uuid4().hex[:8]}"))
        return loads[-1]

    yield start
    for load in loads:
        load.close()
