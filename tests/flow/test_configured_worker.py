"""CF-002, SH-002: what a worker's folder and environment say reaches the worker, or it refuses in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from tests.conftest import StartWorker
from tests.flow.conftest import probe
from tests.packages import write_double
from tests.servers import RedisServer, WorkerProcess, free_port, wait_until

EXIT_CONFIGURATION = 78


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the worker is started."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def remote(shared_redis: RedisServer) -> Iterator[Celery]:
    """Any Celery program that can reach the broker."""
    with Celery("remote", broker=shared_redis.celery_url) as app:
        yield app


def test_settings_of_the_folder_reach_the_worker(
    shared_redis: RedisServer, models_root: Path, folder: Path, remote: Celery
):
    """A pyproject.toml beside the worker: its settings are read back with inspect, and the environment wins."""
    write_double(models_root)
    (folder / "pyproject.toml").write_text(
        """
        [tool.penstock.inference]
        max_level = 1

        [tool.penstock.inference.queue]
        result_ttl_s = 1234

        [tool.penstock.inference.celery]
        events = false
        """
    )
    environment = {"PENSTOCK_INFERENCE_CELERY_EVENTS": "true"}
    worker = WorkerProcess(shared_redis, models_root, folder, name="configured@test", environment=environment)
    try:
        worker.start()
        inspect = remote.control.inspect([worker.name], timeout=3, limit=1)  # asked again: it may not listen yet
        conf = wait_until(inspect.conf, 60, "the worker answers")[worker.name]
    finally:
        worker.stop()
    assert conf["result_expires"] == 1234
    assert conf["worker_send_task_events"] is True


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (
            {"PENSTOCK_INFERENCE_BATCHING_MAX_WAIT": "5"},
            "penstock: Unknown variable PENSTOCK_INFERENCE_BATCHING_MAX_WAIT. "
            "The nearest that exists is PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS",
        ),
        (
            {"PENSTOCK_WORKER_MODELS": "double,triple"},
            "penstock: Unknown model 'triple'. It has no package. Expected a package under the models root",
        ),
    ],
    ids=["misspelt setting", "missing package"],
)
def test_worker_that_cannot_work_says_so_in_one_line(
    environment: dict[str, str], line: str, shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """A misspelt setting or a model without a package: one clear line, and an exit status that is not 0."""
    write_double(models_root)
    worker = start_worker(shared_redis, models_root, environment=environment, wait=False)
    assert worker.wait(60) == EXIT_CONFIGURATION
    assert worker.tail(1) == line


def test_metrics_port_in_use_is_one_line(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """The second worker on a port ends at once and names it; the first serves on."""
    write_double(models_root)
    port = str(free_port())
    first = start_worker(shared_redis, models_root, environment={"PENSTOCK_METRICS_PORT": port})
    second = start_worker(shared_redis, models_root, environment={"PENSTOCK_METRICS_PORT": port}, wait=False)
    assert second.wait(60) == EXIT_CONFIGURATION
    assert second.tail(1).startswith(f"penstock: Metrics port {port} on 127.0.0.1 is in use.")
    assert probe(first, "/health/ready")[0] == 200


def test_worker_without_a_gpu_falls_back_to_the_cpu(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """`auto` serves on the CPU where no GPU is visible; a GPU that was asked for and is not there is refused."""
    write_double(models_root)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "none"}
    worker = start_worker(shared_redis, models_root, environment={**hidden, "PENSTOCK_INFERENCE_DEVICE": "auto"})
    assert worker.report()["device"] == "cpu"
    refused = start_worker(
        shared_redis, models_root, environment={**hidden, "PENSTOCK_INFERENCE_DEVICE": "cuda:0"}, wait=False
    )
    assert refused.wait(60) == EXIT_CONFIGURATION
    assert refused.tail(1).startswith("penstock: ")
