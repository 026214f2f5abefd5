"""`penstock status` and `penstock workers`."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from penstock.compose.stack.restarts import RestartReport
from penstock.compose.stack.supervisor import ChildState
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.commands.conftest import settings_of
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.servers import RedisServer


def test_status_shows_what_runs(home):
    """Queues, workers and models are shown, as tables and as JSON."""
    state = json.loads(penstock(home, "status", "--json").output)
    assert [model["name"] for model in state["models"]] == ["double"]
    assert {queue["priority"] for queue in state["queues"]} == {"critical", "high", "normal", "low"}
    assert [(report["device"], report["ready"], report["models"]) for report in state["workers"]] == [
        ("cpu", True, {"double": "1"})
    ]
    shown = penstock(home, "status").output
    assert "cpu0@" in shown
    assert "double/1" in shown
    (supervised,) = state["supervised"]
    assert (supervised["worker"], supervised["restarts"]) == (state["workers"][0]["name"], 0)


def test_waiting_jobs_show_depth_and_age(shared_redis: RedisServer, home, tmp_path, slot):
    """Jobs of a registered model wait without a worker, and status shows their number and age."""
    package = write_double(tmp_path, slot)
    there = {"PENSTOCK_REDIS_URL": shared_redis.url}
    shown = penstock(home, "models", "register", str(package), **there)
    assert shown.output.startswith(f"Registered {slot}/1 (draft, content hash ")
    for _ in range(2):
        assert penstock(home, "submit", slot, "-i", "x=[[1, 2, 3, 4]]", "--priority", "low", **there).exit_code == 0
    state = json.loads(penstock(home, "status", "--json", **there).output)
    low = next(queue for queue in state["queues"] if (queue["model"], queue["priority"]) == (slot, "low"))
    assert (low["jobs"], low["running"]) == (2, 0)
    assert 0 < low["oldest_waiting_s"] < 60
    assert slot in penstock(home, "status", **there).output


def test_a_worker_that_crashes_is_named(home: Path, tmp_path: Path):
    """`penstock status` and `doctor` name it with restarts, last status and next start while its supervisor lives."""
    states = [
        ChildState("cpu7", restarts=4, failures=4, last_status=1, next_start=time.monotonic() + 1000),
        ChildState("cpu8", restarts=1, failures=0, last_status=-9, next_start=None),
    ]
    there = {"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_REDIS_URL": settings_of(home).redis_url or ""}
    with RestartReport.open(tmp_path) as report:
        report.write(states)
        crashing, steady = json.loads(penstock(home, "status", "--json", **there).output)["supervised"]
        host = socket.gethostname()
        assert 0 < crashing.pop("next_start_in_s") <= 1000
        assert crashing == {"worker": f"cpu7@{host}", "restarts": 4, "failures": 4, "last_status": 1}
        assert (steady["worker"], steady["next_start_in_s"]) == (f"cpu8@{host}", None)
        (line,) = (line for line in penstock(home, "status", **there).output.splitlines() if "cpu7" in line)
        assert line.split()[:5] == [f"cpu7@{host}", "4", "1", "in", line.split()[4]]
        assert "cpu8" not in penstock(home, "status", **there).output
        assert f"worker cpu7@{host} failed 4 times in a row" in penstock(home, "doctor", **there).output
    assert json.loads(penstock(home, "status", "--json", **there).output)["supervised"] == []


def test_no_broker_is_one_line(tmp_path):
    """Without a URL and a running stack the error names the setting and the command to start one."""
    shown = penstock(tmp_path, "status")
    assert shown.exit_code == EXIT_CONFIGURATION
    assert shown.stderr == (
        "Error: No broker is configured and no embedded stack runs. Expected PENSTOCK_REDIS_URL, or `penstock up`\n"
    )


def test_a_broker_that_is_away_is_one_line(tmp_path):
    """When the broker does not answer, the command ends with one line, after the workers that crash for it."""
    with RestartReport.open(tmp_path) as report:
        report.write([ChildState("cpu7", restarts=0, failures=1, last_status=75, next_start=None)])
        shown = penstock(tmp_path, "status", PENSTOCK_REDIS_URL=f"unix://{tmp_path}/absent.sock")
    assert shown.exit_code == 1
    worker, error = shown.stderr.splitlines()
    assert worker.endswith("failed once, at last with exit status 75; it runs again")
    assert error.startswith("Error: The broker did not answer within 5 s")


def test_live_workers_are_listed(home: Path):
    """Each worker has its name, device, state and models, as a table and as JSON."""
    (report,) = json.loads(penstock(home, "workers", "--json").stdout)
    assert (report["device"], report["ready"], report["models"]) == ("cpu", True, {"double": "1"})
    shown = penstock(home, "workers").stdout
    assert report["name"] in shown
    assert "double/1" in shown
