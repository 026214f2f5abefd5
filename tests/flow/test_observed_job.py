"""IN-005, IN-042, IN-043, IN-049, IN-050, IN-054, IN-055: one job in log, metric and result; the probes of a worker."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from penstock.registry.envelope import Keyring, open_result
from penstock.registry.errors import ModelError
from penstock.registry.queues import record_key
from tests.conftest import StartWorker
from tests.flow.conftest import Fleet, Samples, probe
from tests.packages import write_package
from tests.servers import ROOT, RedisServer, WorkerProcess, free_port, wait_until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
SUBMIT = """
import sys
from penstock import Client
from penstock.registry import logs
logs.configure("DEBUG")
inputs, trace = {"x": [[float(sys.argv[2]), 2, 3, 4]]}, sys.argv[3]
job = Client(sys.argv[1]).submit("double", inputs, traceparent=trace)
job.result(180)
print(job.id)
"""
HEAVY = """
import time
from pathlib import Path

def wait_for(name):
    while not Path({folder!r}, name).exists():
        time.sleep(0.01)

def build():
    wait_for("may load")

    def forward(inputs):
        if inputs["x"].any():
            wait_for("may answer")
        return {{"y": inputs["x"]}}

    return forward
"""


def openmetrics(worker: WorkerProcess) -> str:
    """The page of a worker in the format that has exemplars."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(worker.report()["probe"] + "/metrics", headers=accept)  # noqa: S310  # loopback
    with urllib.request.urlopen(request, timeout=180) as page:  # noqa: S310
        return str(page.read(), "utf-8")


def test_one_job_is_followed_from_client_to_result(fleet: Fleet):
    """The id that the client logs stands in the worker's log with its batch, and in the result; metrics count it.

    So does the id of its trace (AR-096), which OpenMetrics shows beside the latency.
    """
    before = Samples(fleet.worker).total("infer_requests_total", model="double")
    command = [sys.executable, "-c", SUBMIT, fleet.server.url, "46.5", TRACEPARENT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=180)
    job_id = done.stdout.strip()
    (submitted,) = [line for line in map(json.loads, done.stderr.splitlines()) if line.get("job_id") == job_id]
    assert (submitted["logger"], submitted["msg"], submitted["model"]) == ("client", "job submitted", "double")

    (committed,) = wait_until(
        lambda: [line for line in fleet.worker.logs() if job_id in line.get("job_ids", ())], 5, "the worker logs it"
    )
    assert (committed["logger"], committed["model"], committed["size"]) == ("server", "double", 1)
    assert committed["batch"] > 0
    assert committed["trace_ids"] == [TRACE_ID]
    with fleet.server.client() as redis:
        header, _ = open_result(redis.get(record_key(job_id))[2:], Keyring.parse(None))
    assert header.id == job_id
    wait_until(lambda: Samples(fleet.worker).total("infer_requests_total", model="double") > before, 30, "a count")
    assert Samples(fleet.worker).total("infer_requests_total", model="double") - before == 1
    assert TRACE_ID in openmetrics(fleet.worker)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=180).stdout.strip()
    wait_until(
        lambda: [line for line in fleet.worker.logs() if again in line.get("job_ids", ()) and "batch" not in line],
        5,
        "the worker logs an equal job that needed no batch",
    )
    assert probe(fleet.worker, "/health/ready")[0] == 200


def test_every_log_line_is_json(client: Client, fleet: Fleet):
    """From the first one on: a time with a zone, level, logger and message, from the loggers that users know."""
    with pytest.raises(ModelError, match=r"\(model.py, line \d+, in forward\)$"):
        client.submit("raiser", {"x": np.full((1, 4), -1, np.float32)}, traceparent=TRACEPARENT).result(180)
    text = fleet.worker.output.read_text()
    lines = [json.loads(line) for line in text[text.index('{"ts"') :].splitlines()]
    for line in lines:
        assert datetime.fromisoformat(line["ts"]).tzinfo is not None
        assert {"ts", "level", "logger", "msg"} <= line.keys()
    loggers = {line["logger"] for line in lines}
    assert {"server", "runtime"} <= loggers
    assert {name for name in loggers if not name.startswith(("celery", "kombu"))} <= {"server", "runtime", "client"}
    (failed,) = [line for line in lines if line["msg"] == "a job failed"][-1:]
    assert (failed["model"], failed["trace_id"]) == ("raiser", TRACE_ID)
    assert failed["job_id"].startswith("raiser.")
    assert 'raise ValueError("a negative row")' in failed["exception"]


def test_probes_tell_what_the_worker_can_do(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker, tmp_path: Path
):
    """Ready: not before the models are loaded, while the broker is away or while draining. Live: all the time."""
    write_package(models_root, "heavy", HEAVY.format(folder=str(tmp_path)), max_batch_size=1)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {"PENSTOCK_METRICS_PORT": str(port)}
    worker = start_worker(redis_server, models_root, environment=environment, wait=False)

    def is_ready() -> bool:
        return probe(worker, "/health/ready", url)[0] == 200

    def is_up() -> bool:
        try:
            return probe(worker, "/health/live", url)[0] == 200
        except OSError:
            return False

    def gauge(name: str) -> float:
        page = probe(worker, "/metrics", url)[1].decode()
        return float(next(line for line in page.splitlines() if line.startswith(name)).rpartition(" ")[2])

    wait_until(is_up, 20, "the probe answers")
    assert not is_ready()
    assert gauge("READY") == 0
    (tmp_path / "may load").touch()
    wait_until(is_ready, 20, "the worker is ready")
    assert gauge("READY") == 1
    assert gauge("model_loaded") == 1

    redis_server.kill()
    wait_until(lambda: not is_ready(), 10, "the worker notices that the broker is away")
    assert is_up()
    redis_server.start()
    wait_until(is_ready, 10, "the worker is ready again")

    with Client(redis_server.url) as client:
        job = client.submit("heavy", {"x": np.array([[1.5, 0, 0, 0]], np.float32)})
        wait_until(lambda: job.status() == "running", 5, "the forward runs")
        worker.terminate()
        wait_until(lambda: not is_ready(), 5, "the worker drains")
        assert is_up()
        assert gauge("READY") == 0
        (tmp_path / "may answer").touch()
        assert job.result(180)["y"][0, 0] == 1.5
    assert worker.wait(180) == 0
