"""scripts/load_test.py as a user runs it: against a real gateway, and against a server that shows what it was sent."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.gateway_process import GatewayProcess
from tests.packages import write_double, write_sleeper
from tests.servers import ROOT, RedisServer, WorkerProcess, redis_binaries, require

pytestmark = pytest.mark.slow
"""Locust starts a client, and waits between two looks at its own figures."""
Recorded: TypeAlias = tuple[str, list[bytes], set[str | None]]
"""(URL, bodies, values of `Authorization`)"""
HEADLESS = ["--headless", "-u", "4", "-r", "4", "--only-summary", "--run-time", "30s"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose clients may load, with a worker for `double` and `napper` (0.5 s)."""
    # Not imported: it replaces the threads and sockets of its process.
    require(importlib.util.find_spec("locust"), "locust")
    folder = tmp_path_factory.mktemp("load")
    root = folder / "models"
    write_double(root)
    write_sleeper(root, "napper", forward_s=0.5, max_batch_size=1)
    server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server")).start()
    often = {"PENSTOCK_INFERENCE_STATE_RECONCILE_INTERVAL_S": "0.2"}
    worker = WorkerProcess(server, root, folder, name="load@test", environment=often)
    environment = {**often, "PENSTOCK_INFERENCE_SERVER_MODEL_CONTROL": "true"}
    gateway = GatewayProcess(server, folder / "gateway", environment=environment)
    try:
        worker.start()
        yield gateway.start()
    finally:
        gateway.stop()
        worker.stop()
        server.stop()


class Recorder(BaseHTTPRequestHandler):
    """Answers each prediction without an output, and keeps the bodies. Its models generate text."""

    bodies: list[bytes]
    keys: set[str | None]

    def do_GET(self) -> None:
        self.keys.add(self.headers["authorization"])
        inputs = [
            {"name": "prompt", "dtype": "string", "shape": [1], "optional": True},
            {"name": "prompt_token_ids", "dtype": "int64", "shape": [1, "prompt_tokens"], "optional": True},
        ]
        self._answer(json.dumps({"inputs": inputs}).encode())

    def do_POST(self) -> None:
        self.keys.add(self.headers["authorization"])
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self._answer(b'{"model": "m", "version": "1", "outputs": {}}')

    def _answer(self, answer: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def recorder() -> Iterator[Recorded]:
    """(URL, bodies, values of `Authorization`) of a server that answers with empty outputs."""
    # Not imported: it replaces the threads and sockets of its process.
    require(importlib.util.find_spec("locust"), "locust")
    bodies: list[bytes] = []
    keys: set[str | None] = set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Recorder", (Recorder,), {"bodies": bodies, "keys": keys}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies, keys
    server.shutdown()
    thread.join()
    server.server_close()


def run(host: str, folder: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """(exit status, output, figures of the predictions) of a run."""
    command = [sys.executable, str(ROOT / "scripts" / "load_test.py"), *HEADLESS, "--host", host]
    done = subprocess.run(
        [*command, "--json-file", "figures", *options], cwd=folder, capture_output=True, text=True, check=False
    )
    file = folder / "figures.json"
    found = json.loads(file.read_text()) if file.exists() else []
    return done.returncode, done.stdout + done.stderr, found[0] if found else {}


def test_a_bounded_run_against_a_gateway(gateway: GatewayProcess, tmp_path: Path):
    """IN-059: all requests of a sample body succeed, after a load and a warm-up that are not counted."""
    options = ["--model-name", "double", "--load-model", "--model-version", "1", "--warmup", "5", "--verify-response"]
    status, output, figures = run(gateway.url, tmp_path, *options, "--requests", "200")
    assert status == 0, output
    assert figures["num_failures"] == 0, output
    assert figures["num_requests"] == 200
    assert figures["name"] == "/v1/models/double/versions/1:predict"


def test_a_host_may_end_with_a_slash(gateway: GatewayProcess, tmp_path: Path):
    """As browsers copy it: the paths of the requests have one slash."""
    status, output, figures = run(f"{gateway.url}/", tmp_path, "--model-name", "double", "--requests", "4")
    assert (status, figures.get("num_failures"), figures.get("num_requests")) == (0, 0, 4), output


def test_a_model_without_required_inputs_gets_its_first(recorder: Recorded, tmp_path: Path):
    """As one that generates text: its prompt is one of several inputs, of which any one is enough."""
    url, bodies, _ = recorder
    status, output, _ = run(url, tmp_path, "--model-name", "writer", "--requests", "2")
    assert (status, [json.loads(body) for body in bodies]) == (0, [{"inputs": {"prompt": ["a sentence"]}}] * 2), output


def test_every_request_has_the_key_of_its_file(recorder: Recorded, tmp_path: Path):
    """Also that for the signature, and those of the warm-up."""
    url, bodies, keys = recorder
    (tmp_path / "key").write_text("pk_1234\n")
    options = ["--model-name", "m", "--requests", "2", "--warmup", "1"]
    status, output, _ = run(url, tmp_path, *options, "--api-key-file", "key")
    assert (status, len(bodies), keys) == (0, 3, {"Bearer pk_1234"}), output


def test_time_outs_are_counted(gateway: GatewayProcess, tmp_path: Path):
    """IN-061: a model of 0.5 s and a time-out of 0.1 s: each request fails, and the exit status says so."""
    options = ["--model-name", "napper", "--request-timeout", "0.1", "--requests", "8"]
    status, output, figures = run(gateway.url, tmp_path, *options)
    assert (status, figures["num_failures"], figures["num_requests"]) == (1, 8, 8), output


def test_a_body_of_your_own_and_empty_outputs(recorder: Recorded, tmp_path: Path):
    """IN-060, IN-062: the server sees the body of the file; answers without an output fail where they are verified."""
    url, bodies, _ = recorder
    file = tmp_path / "payload.json"
    file.write_text('{"inputs": {"x": [[7, 7]]}}')
    options = ["--model-name", "m", "--payload-file", str(file), "--requests", "6"]
    status, output, _ = run(url, tmp_path, *options)
    assert (status, len(bodies), set(bodies)) == (0, 6, {file.read_bytes()}), output
    status, output, figures = run(url, tmp_path, *options, "--verify-response")
    assert (status, figures["num_failures"]) == (1, 6), output


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (["--model-name", "nothing"], 2, "The load test cannot begin: status 404"),
        (["--model-name", "double", "--request-timeout", "0"], 2, "Expected seconds"),
        (["--model-name", "double", "--payload-file", "/nowhere"], 2, "Expected a file"),
        (["--model-name", "double", "--warmup", "-1"], 2, "Expected a whole number"),
        (["--model-name", "double", "--processes", "2"], 2, "Expected --run-time for several processes"),
    ],
)
@pytest.mark.slow
def test_runs_that_cannot_begin(gateway: GatewayProcess, tmp_path: Path, options: list[str], status: int, text: str):
    """One line that says what was expected, and an exit status."""
    found, output, _ = run(gateway.url, tmp_path, *options, "--requests", "1")
    assert found == status, output
    assert text in output
