"""CF-002, SH-002: what a worker's folder and environment say reaches the worker, or it refuses in one line."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from penstock import Client
from tests.conftest import StartWorker
from tests.flow.conftest import probe
from tests.packages import write_double
from tests.servers import RedisServer, WorkerProcess, free_port, wait_until

EXIT_CONFIGURATION = 78
ENCRYPTED = {"PENSTOCK_INFERENCE_PRIVACY_MODE": "persisted_encrypted"}


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
        (
            {"PENSTOCK_INFERENCE_COST_GPU_NAME": "H100", "PENSTOCK_INFERENCE_COST_HOURLY_RATES": "L4=0.8,A100=3.6"},
            "penstock: There is no hourly rate for the device 'H100'. Expected cost.hourly_rate, or one of the names "
            "in cost.hourly_rates: A100, L4",
        ),
        (
            {"PENSTOCK_HEARTBEAT_FD": "99"},
            "penstock: PENSTOCK_HEARTBEAT_FD=99 is not an open pipe. A supervisor sets it: leave it unset otherwise",
        ),
        (
            ENCRYPTED,
            "penstock: The worker does not start, because of a security check. privacy configuration: there is no key "
            "for data at rest; no redact_patterns and no redact_detectors: answers with personal data are stored, too. "
            "Expected PENSTOCK_L2_ENCRYPTION_KEY=<32 random bytes, hex or base64>",
        ),
        (
            {**ENCRYPTED, "PENSTOCK_L2_ENCRYPTION_KEY": "c2hvcnQ="},
            "penstock: Bad value of PENSTOCK_L2_ENCRYPTION_KEY: Data key 1 has 5 bytes as base64. Expected 32 random "
            "bytes as 64 hex digits or as base64; `penstock keys generate` makes such a key",
        ),
    ],
    ids=["misspelt setting", "missing package", "no rate", "no supervisor", "missing data key", "short data key"],
)
def test_worker_that_cannot_work_says_so_in_one_line(
    environment: dict[str, str], line: str, shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """A misspelt setting, a model without a package, no usable key: one clear line, and a status that is not 0."""
    write_double(models_root)
    worker = start_worker(shared_redis, models_root, environment=environment, wait=False)
    assert worker.wait(180) == EXIT_CONFIGURATION
    assert worker.tail(1) == line


class WorkerWithoutCryptography(WorkerProcess):
    """A worker of an installation that lacks the library cryptography."""

    def launch(self) -> None:
        """Start it as a process of its own: the tests' other workers are forks that have imported the library."""
        program = (
            "import sys; sys.modules['cryptography'] = None\n"
            f"from penstock.workers.__main__ import main; main(['-n', {self.name!r}])"
        )
        self._spawn([sys.executable, "-c", program], self._environment)


def test_worker_without_cryptography_encrypts_or_refuses(
    shared_redis: RedisServer, models_root: Path, folder: Path, slot: str
):
    """CF-046: it refuses persisted_encrypted, with the extra to install; without encryption at rest it serves."""
    write_double(models_root, slot)
    keys = {**ENCRYPTED, "PENSTOCK_L2_ENCRYPTION_KEY": "0" * 64}
    refused = WorkerWithoutCryptography(shared_redis, models_root, folder, name=f"a@{slot}", environment=keys)
    opted_out = {
        **ENCRYPTED,
        "PENSTOCK_INFERENCE_PRIVACY_ENCRYPT_AT_REST": "false",
        "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "off",
        "PENSTOCK_INFERENCE_PRIVACY_REDACT_DETECTORS": "ssn",
    }
    serving = WorkerWithoutCryptography(shared_redis, models_root, folder, name=f"b@{slot}", environment=opted_out)
    try:
        refused.launch()
        assert refused.wait(180) == EXIT_CONFIGURATION
        assert refused.tail(1) == (
            "penstock: The library cryptography cannot be imported, and it encrypts data. Expected: pip install "
            "'.[cli]' in the checkout of Penstock"
        )
        assert serving.start().report()["ready"]
    finally:
        refused.stop()
        serving.stop()


def test_worker_reads_its_data_keys(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, tmp_path: Path, slot: str
):
    """With a key file of its own the worker serves; one that other users can read ends it before it takes a job."""
    write_double(models_root, slot)
    file = tmp_path / "data.key"
    file.write_text(f"{'0' * 64}\n")
    file.chmod(0o600)
    environment = {
        **ENCRYPTED,
        "PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE": "file",
        "PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_FILE": str(file),
    }
    start_worker(shared_redis, models_root, environment=environment).stop()
    file.chmod(0o640)
    with Client(shared_redis.url) as client:
        job = client.submit(slot, {"x": [[1.0, 2.0, 3.0, 4.0]]})
        worker = start_worker(shared_redis, models_root, environment=environment, wait=False)
        assert worker.wait(180) == EXIT_CONFIGURATION
        assert "data.key has mode -rw-r-----. Expected a file that only its owner can read" in worker.tail(1)
        assert job.status() == "queued"


def test_metrics_port_in_use_is_one_line(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """The second worker on a port ends at once and names it; the first serves on."""
    write_double(models_root)
    port = str(free_port())
    first = start_worker(shared_redis, models_root, environment={"PENSTOCK_METRICS_PORT": port})
    second = start_worker(shared_redis, models_root, environment={"PENSTOCK_METRICS_PORT": port}, wait=False)
    assert second.wait(180) == EXIT_CONFIGURATION
    assert second.tail(1).startswith(f"penstock: Metrics port {port} on 127.0.0.1 is in use.")
    assert probe(first, "/health/ready")[0] == 200


def test_metrics_are_where_the_settings_say_for_readers_with_their_token(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, tmp_path: Path
):
    """PENSTOCK_METRICS_HOST opens the probe to other addresses, and only with PENSTOCK_METRICS_BEARER_FILE."""
    write_double(models_root)
    token, port = tmp_path / "token", free_port()
    token.write_text("of the readers\n")
    token.chmod(0o600)
    opened = {"PENSTOCK_METRICS_HOST": "0.0.0.0", "PENSTOCK_METRICS_PORT": str(port)}  # noqa: S104 - the subject
    refused = start_worker(shared_redis, models_root, environment=opened, wait=False)
    assert refused.wait(180) == EXIT_CONFIGURATION
    assert "Metrics on 0.0.0.0 would be open to the network." in refused.tail(1)
    start_worker(shared_redis, models_root, environment={**opened, "PENSTOCK_METRICS_BEARER_FILE": str(token)})
    # Another address of the loopback than the default one.
    url = f"http://127.0.0.2:{port}/metrics"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=180)  # loopback
    asked = urllib.request.Request(url, headers={"Authorization": "Bearer of the readers"})
    with urllib.request.urlopen(asked, timeout=180) as page:  # noqa: S310
        assert b"READY 1.0" in page.read()


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
    assert refused.wait(180) == EXIT_CONFIGURATION
    assert refused.tail(1).startswith("penstock: ")
