"""`penstock job` over a real Redis."""

from __future__ import annotations

import json
from pathlib import Path

from penstock import Client
from penstock.registry.queues import new_job_id
from tests.compose.commands.conftest import X
from tests.compose.conftest import penstock
from tests.servers import RedisServer


def test_a_waiting_job_is_shown_as_text_and_as_data(
    shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str
):
    """The same facts in both forms, with exit status 0."""
    with Client(shared_redis.url, tenant="acme") as client:
        job = client.submit(slot, X, priority="high")
        facts = json.loads(penstock(tmp_path, "job", job.id, "--json", **there).stdout)
        text = penstock(tmp_path, "job", job.id, **there).stdout
        job.cancel()
        ended = json.loads(penstock(tmp_path, "job", job.id, "--json", **there).stdout)
    assert (facts["job_id"], facts["model"], facts["state"]) == (job.id, slot, "queued")
    assert (facts["tenant"], facts["priority"]) == ("acme", "high")
    assert text.startswith(f"job            {job.id}\nstate          queued\nmodel          {slot}\n")
    assert "priority       high\n" in text
    assert (ended["state"], ended["error"]["code"]) == ("cancelled", "Cancelled")


def test_an_unknown_job_is_one_line_and_exit_status_1(there: dict[str, str], tmp_path: Path, slot: str):
    """The same for an id that is none."""
    missing = penstock(tmp_path, "job", new_job_id(slot), "--json", **there)
    assert missing.exit_code == 1
    assert missing.stdout == ""
    assert missing.stderr.startswith(f"Error: Unknown job '{slot}.")
    assert missing.stderr.count("\n") == 1
    malformed = penstock(tmp_path, "job", "no-job", **there)
    assert (malformed.exit_code, malformed.stderr) == (1, "Error: Bad job id 'no-job'. Expected <model>.<uuid>\n")
