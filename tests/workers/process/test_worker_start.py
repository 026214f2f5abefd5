"""A worker before, while and after it serves its models, and the folder of these models."""

from __future__ import annotations

import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from penstock import Client
from tests.conftest import StartWorker
from tests.packages import recorded_forwards, write_double, write_package, write_recorder
from tests.servers import RedisServer, WorkerProcess, free_port, wait_until

X = np.array([[1, 2, 3, 4]], np.float32)


def _ready_status(port: int) -> int | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=180) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code
    except OSError:
        return None


def _ready_lines(worker: WorkerProcess) -> list[dict[str, Any]]:
    return [line for line in worker.logs() if line["msg"] == "ready"]


def test_a_worker_is_ready_when_its_models_are_loaded(shared_redis: RedisServer, models_root: Path, tmp_path: Path):
    """CX-027: the probe answers from the start, with 503 until the model is loaded. Then one log line says "ready"."""
    gate = tmp_path / "gate"
    source = f"""
        import time
        from pathlib import Path

        def build():
            while not Path({str(gate)!r}).exists():
                time.sleep(0.01)
            return lambda inputs: {{"y": inputs["x"] * 2}}
    """
    write_package(models_root, "slow-to-load", source)
    port = free_port()
    environment = {"PENSTOCK_METRICS_PORT": str(port)}
    worker = WorkerProcess(shared_redis, models_root, tmp_path, name="starting@test", environment=environment)
    try:
        worker.launch()
        wait_until(lambda: _ready_status(port) == 503, 60, "the probe listens")
        assert not worker.report()
        assert _ready_lines(worker) == []
        gate.touch()
        wait_until(lambda: _ready_status(port) == 200, 20, "the worker is ready")
        (line,) = wait_until(lambda: _ready_lines(worker), 10, "the worker says so")
        facts = {name: line[name] for name in ("level", "worker", "models", "device", "queues")}
        assert facts == {
            "level": "info",
            "worker": "starting@test",
            "models": ["slow-to-load"],
            "device": "cpu",
            "queues": ["infer.{slow-to-load}", "penstock"],
        }
    finally:
        worker.stop()


def test_the_models_root_is_only_read(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """IN-057: a worker serves models from a folder that it may not write to, and does not change the folder."""
    source = "from .factors import FACTOR\n\n\ndef build():\n    return lambda inputs: {'y': inputs['x'] * FACTOR}\n"
    folder = write_package(models_root, "read-only", source)
    (folder / "factors.py").write_text("FACTOR = 3\n")
    before = {path: path.stat().st_mtime_ns for path in models_root.rglob("*")}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        start_worker(shared_redis, models_root)
        with Client(shared_redis.url) as client:
            assert client.submit("read-only", {"x": X}).result(timeout=180)["y"].tolist() == (X * 3).tolist()
        assert {path: path.stat().st_mtime_ns for path in models_root.rglob("*")} == before
    finally:
        for path in before:
            path.chmod(0o755)


def test_disabled_inference_is_the_bare_model(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, tmp_path: Path
):
    """CF-003: every forward has one row, each of two equal jobs runs, no optimization is enabled, and the outputs equal
    those of the model alone to the last bit."""
    write_recorder(models_root, tmp_path / "forward_log", "bare", forward_s=0.02)
    worker = start_worker(shared_redis, models_root, environment={"PENSTOCK_INFERENCE_ENABLED": "false"})
    questions = [np.array([[number, 0.1, 1e-30, -number]], np.float32) for number in (1.0, 2.0, 2.0, 3.0, 3.0)]
    with Client(shared_redis.url) as client:
        jobs = client.submit_many("bare", [{"x": each} for each in questions])
        answers = [job.result(timeout=180)["y"] for job in jobs]
    for question, answer in zip(questions, answers, strict=True):
        assert answer.tobytes() == (question * 2).tobytes()
    served = [forward for forward in recorded_forwards(tmp_path / "forward_log") if forward[0] > 0]
    assert sorted(served) == [[1.0], [2.0], [2.0], [3.0], [3.0]]
    assert worker.report()["levels"] == {}


def test_a_store_of_states_that_hangs_does_not_hold_up_a_shutdown(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """After SIGTERM the worker claims no more jobs and ends within its grace period, also when a server hangs."""
    grace_s = 600
    write_double(models_root, "unhurried")
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as hanging, Client(shared_redis.url) as client:
        hanging.settimeout(20)
        environment = {
            "PENSTOCK_METRICS_PORT": str(port),
            "PENSTOCK_INFERENCE_QUEUE_DRAIN_GRACE_S": str(grace_s),
            "PENSTOCK_INFERENCE_STATE_REDIS_URL": f"redis://127.0.0.1:{hanging.getsockname()[1]}/0",
            "PENSTOCK_INFERENCE_STATE_RECONCILE_INTERVAL_S": "0.01",
        }
        worker = start_worker(shared_redis, models_root, environment=environment)
        assert client.submit("unhurried", {"x": X}).result(timeout=180)["y"].tolist() == (X * 2).tolist()
        # A sweep gives up after five seconds; this is the beginning of another.
        hanging.accept()[0].close()
        connection, _ = hanging.accept()
        with connection:
            worker.signal(signal.SIGTERM)
            wait_until(lambda: _ready_status(port) != 200, 30, "the worker says that it stops")
            job = client.submit("unhurried", {"x": X + 1})
            assert worker.wait(180) == 0
        assert job.status() == "queued"
        job.cancel()
