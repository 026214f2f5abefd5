"""`penstock bench` and `penstock worker`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from penstock.compose.bench import _allowed
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.servers import ROOT, RedisServer, wait_until


def test_bench_measures_the_running_stack(home):
    """The report has throughput, latency and CPU per job of the running stack, with worker and Redis."""
    shown = penstock(home, "bench", "--model", "double", "--count", "600", "--in-flight", "64", "--json")
    assert shown.exit_code == 0, shown.stderr
    report = json.loads(shown.output)
    assert report["jobs"] == 600
    assert 0 < report["alone_p50_ms"] <= report["alone_p99_ms"]
    assert 0 < report["saturated_p50_ms"] <= report["saturated_p99_ms"]
    assert min(report["jobs_per_s"], report["client_cpu_us"], report["redis_cpu_us"]) > 0
    assert report["worker_cpu_us"] is not None


def test_bench_takes_the_model_that_is_served(home):
    """Without --model and --count the first served model is measured; an unknown name lists the models."""
    shown = penstock(home, "bench", "--count", "32", "--in-flight", "8", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert (json.loads(shown.output)["model"], json.loads(shown.output)["jobs"]) == ("double", 32)
    refused = penstock(home, "bench", "--model", "mlp")
    assert refused.exit_code == 1
    assert refused.stderr == "Error: Unknown model 'mlp'. Models that a worker serves: double\n"


def test_bench_lets_the_time_decide_how_many_jobs_it_runs():
    """A fast model runs the most, a slow one at least a few, others what fits."""
    assert [_allowed(rate, 10.0, 20_000) for rate in (1e6, 300.0, 0.01)] == [20_000, 3_000, 8]


def test_worker_command_serves_and_drains(shared_redis: RedisServer, tmp_path, slot):
    """`penstock worker` runs a worker that serves jobs, and exits with 0 on SIGTERM."""
    write_double(tmp_path / "models", slot)
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_REDIS_URL": shared_redis.url,
        "PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models"),
        "PENSTOCK_METRICS_PORT": "0",
    }
    code = "from penstock.compose.cli import main; main()"
    command = [sys.executable, "-c", code, "worker", "--device", "cpu", "--models", slot, "--index", "3"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, env=environ, stderr=log, stdout=log) as process,
    ):
        try:
            there = {"PENSTOCK_REDIS_URL": shared_redis.url}
            submitted = ["submit", slot, "-i", "x=[[1, 2, 3, 4]]", "--wait", "--json"]
            wait_until(lambda: penstock(tmp_path, *submitted, **there).exit_code == 0, 60, "the worker serves")

            def names() -> list[str]:
                reports = json.loads(penstock(tmp_path, "status", "--json", **there).output)["workers"]
                return [report["name"].partition("@")[0] for report in reports if slot in report["models"]]

            # The worker may finish a job before its first report.
            wait_until(lambda: names() == ["cpu3"], 5, "the worker is listed")
            # Celery's warning about the user root and its banner would come before the line that ends the start.
            start, _, _ = (tmp_path / "log").read_text().partition("Warm shutdown")
            assert all(line.startswith("{") for line in start.splitlines()), start
            assert '"msg":"ready"' in start
            process.send_signal(signal.SIGTERM)
            assert process.wait(180) == 0
        finally:
            process.kill()


def test_worker_command_passes_a_refusal_on(shared_redis: RedisServer, tmp_path):
    """A worker that refuses its configuration is not restarted: the command exits with its status."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_REDIS_URL": shared_redis.url,
        "PENSTOCK_METRICS_PORT": "0",
    }
    command = [sys.executable, "-c", "from penstock.compose.cli import main; main()", "worker", "--models", "nonesuch"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == EXIT_CONFIGURATION
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("penstock: ")
    assert "nonesuch" in line


def test_a_worker_without_a_package_ends_in_one_line(tmp_path):
    """A package that only Celery imports ends the worker with status 78 before it connects anywhere."""
    code = (
        "import sys; sys.modules['packaging'] = None\n"
        "from penstock.workers.__main__ import main; main(['-n', 'cpu0@%h'])"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(tmp_path),
        "PENSTOCK_REDIS_URL": f"unix://{tmp_path}/absent.sock",
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert ended.returncode == EXIT_CONFIGURATION
    assert ended.stderr == (
        "penstock: packaging is not installed. Expected: pip install '.[worker]' in the checkout of Penstock\n"
    )


def test_a_url_that_celery_cannot_use_ends_in_one_line(tmp_path):
    """A scheme without a transport is a configuration error, not a traceback at every restart."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(tmp_path),
        "PENSTOCK_REDIS_URL": f"unix://{tmp_path}/absent.sock",
        "PENSTOCK_CELERY_URL": "nonesuch://host",
    }
    command = [sys.executable, "-m", "penstock.workers", "-n", "cpu0@%h"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == EXIT_CONFIGURATION
    (line,) = ended.stderr.splitlines()
    assert line.startswith("penstock: The URL in PENSTOCK_CELERY_URL has a scheme that Celery does not know")
