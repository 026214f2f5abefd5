"""`penstock status` and `penstock workers`."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.workers.process.exit_status import EXIT_CONFIGURATION
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


def test_no_broker_is_one_line(tmp_path):
    """Without a URL and a running stack the error names the setting and the command to start one."""
    shown = penstock(tmp_path, "status")
    assert shown.exit_code == EXIT_CONFIGURATION
    assert shown.stderr == (
        "Error: No broker is configured and no embedded stack runs. Expected PENSTOCK_REDIS_URL, or `penstock up`\n"
    )


def test_a_broker_that_is_away_is_one_line(tmp_path):
    """When the broker does not answer, the command ends with one line."""
    shown = penstock(tmp_path, "status", PENSTOCK_REDIS_URL=f"unix://{tmp_path}/absent.sock")
    assert shown.exit_code == 1
    assert shown.stderr.startswith("Error: The broker did not answer within 5 s")
    assert shown.stderr.count("\n") == 1


def test_live_workers_are_listed(home: Path):
    """Each worker has its name, device, state and models, as a table and as JSON."""
    (report,) = json.loads(penstock(home, "workers", "--json").stdout)
    assert (report["device"], report["ready"], report["models"]) == ("cpu", True, {"double": "1"})
    shown = penstock(home, "workers").stdout
    assert report["name"] in shown
    assert "double/1" in shown
