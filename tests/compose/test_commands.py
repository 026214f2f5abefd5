"""Exit statuses and output of the `penstock` command as a shell sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.registry.broker.redis_streams import RedisStreams
from tests.packages import write_double
from tests.servers import ROOT, RedisServer


def _penstock(server: RedisServer, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from penstock.compose.cli import main; main()", *arguments],
        env={"PYTHONPATH": str(ROOT), "PENSTOCK_HOME": str(home), "PENSTOCK_REDIS_URL": server.url},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize("broken", ["absent", "misspelt"])
def test_refused_package_ends_with_status_1(broken: str, shared_redis: RedisServer, tmp_path: Path, slot: str):
    """`models register` of an invalid package prints one line, exits with 1 and publishes nothing."""
    package = tmp_path / slot / "1"
    if broken == "misspelt":
        package = write_double(tmp_path, slot)
        file = package / "model.yaml"
        file.write_text(file.read_text().replace("entrypoint", "entrypiont"))
    ended = _penstock(shared_redis, tmp_path, "models", "register", str(package))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert f"{slot}/1/model.yaml" in ended.stderr
    assert str(tmp_path) not in ended.stderr
    broker = RedisStreams.from_url(shared_redis.url)
    assert broker.spec(slot) is None
    broker.close()


def test_data_for_programs_is_one_json_document(shared_redis: RedisServer, tmp_path: Path, slot: str):
    """With --json every command prints one JSON document on stdout."""
    package = write_double(tmp_path, slot)
    registered = _penstock(shared_redis, tmp_path, "models", "register", str(package), "--json")
    assert {"name": slot, "version": "1", "stage": "draft"}.items() <= json.loads(registered.stdout).items()
    submitted = _penstock(shared_redis, tmp_path, "submit", slot, "-i", "x=[[1, 2, 3, 4]]", "--json")
    assert json.loads(submitted.stdout)["job_id"].startswith(f"{slot}.")
    state = json.loads(_penstock(shared_redis, tmp_path, "status", "--json").stdout)
    waiting = {queue["priority"]: queue["jobs"] for queue in state["queues"] if queue["model"] == slot}
    assert waiting == {"critical": 0, "high": 0, "normal": 1, "low": 0}
    listed = json.loads(_penstock(shared_redis, tmp_path, "models", "list", "--json").stdout)
    assert slot in [model["name"] for model in listed]
