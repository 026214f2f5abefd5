"""The `penstock` command: what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from penstock.compose.cli import main
from penstock.registry.package import load_package
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.packages import write_double, write_package
from tests.servers import ROOT, RedisServer, wait_until


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, (*path, name))
    else:
        yield path


@pytest.mark.parametrize("path", list(commands(main)), ids=" ".join)
def test_every_command_shows_an_example(path):
    """`--help` of each command ends with a line that can be typed."""
    shown = CliRunner().invoke(main, [*path, "--help"])
    assert shown.exit_code == 0
    assert f"  penstock {' '.join(path)}" in shown.output


def test_help_is_quick():
    """Help loads no framework, no NumPy and no broker."""
    code = (
        "import sys; import penstock.compose.cli\n"
        "print(sorted({'celery', 'numpy', 'pydantic', 'redis', 'rich', 'torch'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"


def test_submit_and_wait(home):
    """A job from the shell: a bare value is one row, a list is taken as it is, the result is printed."""
    shown = penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 4]]", "--wait", "--json")
    assert shown.exit_code == 0
    answer = json.loads(shown.output)
    assert answer["job_id"].startswith("double.")
    assert (answer["version"], len(answer["content_hash"])) == ("1", 64)
    assert answer["outputs"] == {"y": [[2, 4, 6, 8]]}
    again = json.loads(penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 4]]", "--wait", "--json").output)
    assert again == {**answer, "job_id": again["job_id"], "is_cached": True}


def test_submit_reads_inputs_from_stdin(home):
    """All inputs as one JSON object, for data too long for a command line."""
    shown = penstock(home, "submit", "double", "--inputs", "-", "--wait", stdin='{"x": [[0, 0, 0, 1]]}')
    assert "y float32 (1, 4)\n[[0. 0. 0. 2.]]" in shown.output


def test_submit_prints_the_id(home):
    """Without --wait the id is all that is printed, ready for another program."""
    shown = penstock(home, "submit", "double", "-i", "x=[[1, 2, 3, 4]]", "--priority", "high")
    assert shown.output.startswith("double.")
    assert shown.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["submit", "nonesuch", "-i", "x=1"], "Unknown model 'nonesuch'"),
        (["submit", "double"], "Missing required input(s): x. Expected inputs: x"),
        (["submit", "double", "-i", "x=[[1, 2]]"], "x: "),
        (["models", "register", "/nonexistent/model/1"], "model/1/model.yaml: cannot be read"),
    ],
)
def test_a_refusal_is_one_line(home, arguments, line):
    """What was wrong and what was expected, on stderr, and an exit status that is not 0."""
    shown = penstock(home, *arguments)
    assert shown.exit_code in (1, EXIT_CONFIGURATION)
    assert shown.stderr.startswith(f"Error: {line}")
    assert shown.stderr.count("\n") == 1
    assert shown.stdout == ""


def test_malformed_options_are_usage_errors(home):
    """What click can see before anything is asked is a usage error."""
    assert "Expected NAME=VALUE" in penstock(home, "submit", "double", "-i", "x").stderr
    assert "not a JSON object" in penstock(home, "submit", "double", "--inputs", "-", stdin="[1]").stderr
    assert penstock(home, "submit", "double", "-i", "x=1", "--priority", "urgent").exit_code == 2


def test_status_shows_what_runs(home):
    """Queues, workers and models, for people and for programs."""
    state = json.loads(penstock(home, "status", "--json").output)
    assert [model["name"] for model in state["models"]] == ["double"]
    assert {queue["priority"] for queue in state["queues"]} == {"critical", "high", "normal", "low"}
    assert [(report["device"], report["ready"], report["models"]) for report in state["workers"]] == [
        ("cpu", True, {"double": "1"})
    ]
    shown = penstock(home, "status").output
    assert "cpu0@" in shown
    assert "double/1" in shown


def test_waiting_jobs_show_depth_and_age(shared_redis: RedisServer, home, tmp_path, slot):
    """Jobs of a registered model wait without a worker, and status says how many and for how long."""
    package = write_package(tmp_path, slot, "def build(): ...")
    there = {"PENSTOCK_REDIS_URL": shared_redis.url}
    shown = penstock(home, "models", "register", str(package), **there)
    assert shown.output.startswith(f"Registered {slot}/1 (draft, content ")
    for _ in range(2):
        assert penstock(home, "submit", slot, "-i", "x=[[1, 2, 3, 4]]", "--priority", "low", **there).exit_code == 0
    state = json.loads(penstock(home, "status", "--json", **there).output)
    low = next(queue for queue in state["queues"] if (queue["model"], queue["priority"]) == (slot, "low"))
    assert (low["jobs"], low["running"]) == (2, 0)
    assert 0 < low["oldest_waiting_s"] < 60
    assert slot in penstock(home, "status", **there).output


def test_registered_models_are_listed(shared_redis: RedisServer, home, tmp_path, slot):
    """`models list` says what each model takes and gives."""
    there = {"PENSTOCK_REDIS_URL": shared_redis.url}
    package = write_package(tmp_path, slot, "def build(): ...")
    shown = penstock(home, "models", "register", str(package), "--json", **there)
    content_hash = load_package(package).manifest().content_hash
    assert json.loads(shown.output) == {"name": slot, "version": "1", "content_hash": content_hash, "stage": "draft"}
    known = json.loads(penstock(home, "models", "list", slot, "--json", **there).output)
    assert known == [
        {
            "name": slot,
            "version": "1",
            "stage": "draft",
            "content_hash": content_hash,
            "is_active": False,
            "workers": [],
            "inputs": {"x": "float32 (batch, 4)"},
            "outputs": {"y": "float32 (batch, 4)"},
        }
    ]


def test_bench_measures_the_running_stack(home):
    """Throughput, latency and CPU per job of the stack that runs, worker and Redis included."""
    shown = penstock(home, "bench", "--model", "double", "--count", "600", "--outstanding", "64", "--json")
    assert shown.exit_code == 0, shown.stderr
    figures = json.loads(shown.output)
    assert figures["jobs"] == 600
    assert 0 < figures["alone_p50_ms"] <= figures["alone_p99_ms"]
    assert 0 < figures["saturated_p50_ms"] <= figures["saturated_p99_ms"]
    assert min(figures["jobs_per_s"], figures["client_cpu_us"], figures["redis_cpu_us"]) > 0
    assert figures["worker_cpu_us"] is not None


def test_no_broker_is_said_in_one_line(tmp_path):
    """Neither a URL nor a running stack: what to set and what to start."""
    shown = penstock(tmp_path, "status")
    assert shown.exit_code == EXIT_CONFIGURATION
    assert shown.stderr == (
        "Error: No broker is configured and no embedded stack runs. Expected PENSTOCK_REDIS_URL, or `penstock up`\n"
    )


def test_broker_away_is_said_in_one_line(tmp_path):
    """A broker that does not answer ends the command within its time-out."""
    shown = penstock(tmp_path, "status", PENSTOCK_REDIS_URL=f"unix://{tmp_path}/nobody.sock")
    assert shown.exit_code == 1
    assert shown.stderr.startswith("Error: The broker did not answer within 5 s")
    assert shown.stderr.count("\n") == 1


def test_misspelt_settings_are_refused(tmp_path):
    """A variable and a key that no setting has, each with the nearest that exists."""
    shown = penstock(tmp_path, "status", PENSTOCK_REDIS_ULR="redis://localhost")
    assert shown.exit_code == EXIT_CONFIGURATION
    assert "PENSTOCK_REDIS_ULR" in shown.stderr
    assert "PENSTOCK_REDIS_URL" in shown.stderr
    config = tmp_path / "penstock.yaml"
    config.write_text("batching: {max_wait: 5}\n")
    shown = penstock(tmp_path, "--config", str(config), "status")
    assert shown.exit_code == EXIT_CONFIGURATION
    assert "batching.max_wait_ms" in shown.stderr


def test_worker_command_serves_and_drains(shared_redis: RedisServer, tmp_path, slot):
    """`penstock worker` runs a worker under its supervisor, answers, and ends with 0 on SIGTERM."""
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

            # It may answer a job before its first report.
            wait_until(lambda: names() == ["cpu3"], 5, "the worker is listed")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_worker_command_passes_a_refusal_on(shared_redis: RedisServer, tmp_path):
    """A worker that cannot work as it is configured ends the command with its status, not with restarts."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_REDIS_URL": shared_redis.url,
        "PENSTOCK_METRICS_PORT": "0",
    }
    command = [sys.executable, "-c", "from penstock.compose.cli import main; main()", "worker", "--models", "nonesuch"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_CONFIGURATION
    assert "nonesuch" in ended.stderr
    assert "Traceback" not in ended.stderr
