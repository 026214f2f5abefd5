"""One gateway with a real worker and a real Redis, shared by the tests of the protocols."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import yaml

from tests.gateway_process import GatewayProcess
from tests.packages import write_double, write_package, write_raiser, write_sleeper
from tests.producers.gateway.texts import Site, writing_site
from tests.servers import ROOT, RedisServer, WorkerProcess, redis_binaries, require

_EMBEDDER = """
import numpy as np

def build():
    def forward(inputs):
        rows = [np.frombuffer(text.encode()[:4].ljust(4), np.uint8) for text in inputs["text"]]
        return {"vector": np.stack(rows).astype(np.float32) / 255}

    return forward
"""


class GatewayStack(NamedTuple):
    """A server, a worker for `double`, `napper` (0.3 s), `raiser`, `counter` (streams), `embedder`, and a gateway."""

    server: RedisServer
    worker: WorkerProcess
    gateway: GatewayProcess
    models_root: Path


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayStack]:
    """A server of its own."""
    folder = tmp_path_factory.mktemp("gateway")
    root = folder / "models"
    write_double(root)
    write_sleeper(root, "napper", forward_s=0.3, max_batch_size=1)
    write_raiser(root)
    write_embedder(root)
    shutil.copytree(ROOT / "models" / "counter", root / "counter")
    server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server")).start()
    often = {"PENSTOCK_INFERENCE_STATE_RECONCILE_INTERVAL_S": "0.2"}
    worker = WorkerProcess(server, root, folder, name="gateway@test", environment=often)
    gateway = GatewayProcess(server, folder / "gateway")
    try:
        yield GatewayStack(server, worker.start(), gateway.start(), root)
    finally:
        gateway.stop()
        worker.stop()
        server.stop()


@pytest.fixture
def http(stack: GatewayStack) -> Iterator[httpx.Client]:
    """A client of the shared gateway."""
    with stack.gateway.client() as client:
        yield client


@pytest.fixture(scope="package")
def site(stack: GatewayStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway and a worker that write texts, on the shared server."""
    with writing_site(stack.server, tmp_path_factory.mktemp("texts")) as found:
        yield found


StartGateway = Callable[..., GatewayProcess]
"""(*options, **environment) -> GatewayProcess."""


@pytest.fixture
def start_gateway(stack: GatewayStack, tmp_path: Path) -> Iterator[StartGateway]:
    """Starts further gateways on the shared server; they end with the test."""
    started: list[GatewayProcess] = []

    def start(*options: str, **environment: str) -> GatewayProcess:
        folder = tmp_path / f"gateway{len(started)}"
        started.append(GatewayProcess(stack.server, folder, *options, environment=environment))
        return started[-1].start()

    yield start
    for gateway in started:
        gateway.stop()


def write_embedder(root: Path, name: str = "embedder") -> None:
    """A package that takes `text` (batch) and answers `vector` float32 (batch, 4): the first letters as fractions."""
    file = write_package(root, name, _EMBEDDER) / "model.yaml"
    spec = yaml.safe_load(file.read_text())
    spec["inputs"] = [{"name": "text", "dtype": "string", "shape": ["batch"]}]
    spec["outputs"] = [{"name": "vector", "dtype": "float32", "shape": ["batch", 4]}]
    file.write_text(yaml.safe_dump(spec))
