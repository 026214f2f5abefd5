"""`penstock queue` over a real Redis."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock import Client
from penstock.registry.broker.base import State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import Cancelled
from penstock.registry.queues import Priority, stream_key
from penstock.registry.settings import Settings
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.commands.conftest import X
from tests.compose.conftest import penstock
from tests.servers import RedisServer

KEYS = "k1:" + "A" * 43 + "="


def test_paused_model_accepts_and_waits(home: Path, paused: Client):
    """Jobs are accepted during a pause, which status and doctor show, and run after it."""
    job = paused.submit("double", X)
    assert json.loads(penstock(home, "status", "--json").stdout)["paused"] == ["double"]
    assert "Paused: double" in penstock(home, "status").stdout
    assert "penstock queue resume double" in penstock(home, "doctor").stdout
    assert job.status() == "queued"
    assert penstock(home, "queue", "resume", "double").stdout == "double is resumed.\n"
    assert job.result(timeout=180)["y"].tolist() == [[2, 4, 6, 8]]


def test_purged_jobs_end_cancelled_for_their_client(home: Path, paused: Client):
    """The results are signed with the stack's key, so the client reads the reason; jobs of other priorities stay."""
    low = [paused.submit("double", X, priority="low") for _ in range(3)]
    high = paused.submit("double", X, priority="high")
    shown = penstock(home, "queue", "purge", "double", "--priority", "low", "--yes", "--json")
    assert json.loads(shown.stdout) == {"model": "double", "priority": "low", "withdrawn": 3}
    for job in low:
        with pytest.raises(Cancelled, match="An operator purged the queue"):
            job.result(timeout=180)
    assert high.status() == "queued"
    shown = penstock(home, "queue", "purge", "double", stdin="n\n")
    assert shown.exit_code == 1
    assert "Withdraw 1 waiting job of double?" in shown.stderr
    assert high.status() == "queued"


def test_purge_without_the_signing_key_is_refused(there: dict[str, str], tmp_path: Path, slot: str):
    """The results of signed jobs must be signed, so without the key no job is withdrawn."""
    signed = {**there, "PENSTOCK_SIGNING_KEYS": KEYS}
    for _ in range(2):
        submitted = penstock(tmp_path, "submit", slot, "-i", "x=[[1, 2, 3, 4]]", **signed)
        assert submitted.exit_code == 0
    refused = penstock(tmp_path, "queue", "purge", slot, "--yes", **there)
    assert refused.exit_code == EXIT_CONFIGURATION
    assert "signed with key 'k1', which is not known here" in refused.stderr
    assert "Expected it in PENSTOCK_SIGNING_KEYS" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert "AAAA" not in refused.stderr
    shown = penstock(tmp_path, "queue", "purge", slot, "--yes", **signed)
    assert shown.stdout == f"2 jobs of {slot} withdrawn.\n"


def _script_calls(server: Any) -> int:
    return int(server.info("commandstats")["cmdstat_evalsha"]["calls"])


def test_large_queue_is_purged_in_parts(shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str):
    """Thousands of jobs with a few foreign entries among them: all leave, each job is cancelled, no call is large."""
    with Client.from_env(settings=Settings.load(environ=there)) as client, shared_redis.client() as server:
        jobs = client.submit_many(slot, [X] * 3000)
        for _ in range(3):
            server.xadd(stream_key(slot, Priority.NORMAL), {"e": os.urandom(50), "more": "fields"})
        calls = _script_calls(server)
        shown = penstock(tmp_path, "queue", "purge", slot, "--yes", "--json", **there)
        assert json.loads(shown.stdout)["withdrawn"] == 3003
        assert _script_calls(server) - calls > 3003 / 300
        assert server.xlen(stream_key(slot, Priority.NORMAL)) == 0
    with closing(RedisStreams.from_url(shared_redis.url)) as broker:
        states = {job_record and job_record.state for job_record in broker.job_records([job.id for job in jobs])}
    assert states == {State.CANCELLED}


@pytest.mark.parametrize("command", ["pause", "resume", "purge"])
def test_misspelt_model_is_refused(there: dict[str, str], tmp_path: Path, slot: str, command: str):
    """A misspelt name is refused, and the error lists the models that exist."""
    refused = penstock(tmp_path, "queue", command, "nonesuch", *(["--yes"] if command == "purge" else []), **there)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: Unknown model 'nonesuch'. Expected one of: ")
    assert slot in refused.stderr
    assert refused.stderr.count("\n") == 1
