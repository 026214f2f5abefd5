"""`penstock dead` over a real Redis."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import redis

from penstock import Client
from penstock.producers.client import JobHandle
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Failure, RequestContext
from penstock.registry.errors import DeadLettered
from penstock.registry.queues import dead_key
from penstock.registry.unrun import unrun_result
from tests.compose.commands.conftest import X, settings_of
from tests.compose.conftest import penstock
from tests.servers import RedisServer


def _dead_letter(home: Path, client: Client) -> tuple[JobHandle, str]:
    """A dead-lettered job, and the entry of its letter."""
    settings = settings_of(home)
    with closing(RedisStreams.from_url(settings.redis_url or "")) as broker:
        # This end does not know of the pause, so its blocking read is served. When the worker's own blocking read, from
        # before the pause, is served first, the worker gives the job back, and this end gets the next one.
        for _ in range(20):
            job = client.submit("double", X, priority="high")
            broker.arm("another worker", ["double"], 8, 1000)
            for delivery in broker.collect():
                failure = Failure("DeadLettered", "The job went to the dead letters. It killed three workers")
                sealed = unrun_result(
                    job.id, RequestContext(job.tenant), failure, settings.keyring, worker="another worker"
                )
                assert broker.dead_letter(
                    "another worker", delivery, "it killed three workers", job_id=job.id, sealed=sealed
                )
                return job, broker.dead_letters("double")[-1].entry
    pytest.fail("no job could be dead-lettered")


def test_replayed_job_is_answered_under_its_id(home: Path, paused: Client):
    """A dead-lettered job is listed with the reason, shown with its header, replayed, run, and read by its client."""
    job, entry = _dead_letter(home, paused)
    with pytest.raises(DeadLettered, match="It killed three workers"):
        job.result(timeout=180)
    (letter,) = json.loads(penstock(home, "dead", "list", "--json").stdout)
    expected = ("double", entry, job.id, "default", "high", "it killed three workers", 1)
    fields = ("model", "entry", "job_id", "tenant", "priority", "reason", "deliveries")
    assert tuple(letter[name] for name in fields) == expected
    listed = penstock(home, "dead", "list", "double").stdout
    assert f"double {entry}" in listed
    assert f"job {job.id} of tenant default" in listed
    shown = json.loads(penstock(home, "dead", "show", "double", entry, "--json").stdout)
    assert shown["header"]["inputs"] == {"x": "float32 (1, 4)"}
    assert shown["signature"].startswith("valid: key ")
    assert shown["replay"] == "possible"
    replayed = penstock(home, "dead", "replay", "double", entry).stdout
    assert replayed == f"{entry}  replayed as {job.id}\n"
    assert penstock(home, "dead", "list").stdout == "No dead letters.\n"
    penstock(home, "queue", "resume", "double")
    assert paused.job(job.id).result(timeout=180)["y"].tolist() == [[2, 4, 6, 8]]


def test_replay_of_all_names_what_stays(home: Path, paused: Client):
    """Of several letters the valid ones are replayed, and exit status 1 reports that others were not."""
    job, entry = _dead_letter(home, paused)
    with redis.Redis.from_url(settings_of(home).redis_url or "") as client:
        client.xadd(dead_key("double"), {"reason": "foreign", "e": b"\x00" * 30})
    shown = penstock(home, "dead", "replay", "double", "--all", "--json")
    assert shown.exit_code == 1
    good, foreign = json.loads(shown.stdout)
    assert good == {"entry": entry, "job_id": job.id, "replayed": True, "reason": ""}
    assert (foreign["replayed"], foreign["reason"]) == (
        False,
        "its bytes are no valid job: not a Penstock envelope",
    )
    assert penstock(home, "dead", "purge", "double", "--all", "--yes").stdout == ("1 dead letter of double deleted.\n")


def test_foreign_letters_are_shown_without_effects(
    shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str
):
    """Another protocol version, escape sequences, no fields: each is listed and shown, and none moves the cursor."""
    with shared_redis.client() as client:
        newer = client.xadd(dead_key(slot), {"reason": "\x1b[2J[red]\nnew line", "e": b"PS\x09J" + bytes(9)}).decode()
        bare = client.xadd(dead_key(slot), {"x": "y"}, id="18446744073709551615-1").decode()
    listed = penstock(tmp_path, "dead", "list", slot, **there)
    assert listed.exit_code == 0
    assert "\x1b" not in listed.stdout
    assert "\\x1b[2J[red]\\nnew line" in listed.stdout
    shown = penstock(tmp_path, "dead", "show", slot, newer, **there)
    assert "protocol 9; expected 1" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert json.loads(penstock(tmp_path, "dead", "show", slot, newer, "--json", **there).stdout)["protocol"] == 9
    shown = penstock(tmp_path, "dead", "show", slot, bare, **there)
    assert shown.exit_code == 0
    assert "not a Penstock envelope" in shown.stdout


def test_original_bytes_are_written_to_a_new_file(
    shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str
):
    """The bytes are unchanged, only this user can read the file, and an existing file is never replaced."""
    with shared_redis.client() as client:
        entry = client.xadd(dead_key(slot), {"reason": "why", "e": bytes(range(256))}).decode()
    output = tmp_path / "letter.bin"
    assert penstock(tmp_path, "dead", "show", slot, entry, "--output", str(output), **there).exit_code == 0
    assert output.read_bytes() == bytes(range(256))
    assert output.stat().st_mode & 0o777 == 0o600
    again = penstock(tmp_path, "dead", "show", slot, entry, "--output", str(output), **there)
    assert again.exit_code == 1
    assert again.stderr == "Error: letter.bin cannot be written: File exists. Expected a new file\n"


def test_old_letters_are_purged(shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str):
    """A purge by age, by entry or of all asks first, and deletes no other letter."""
    with shared_redis.client() as client:
        old = client.xadd(dead_key(slot), {"reason": "old", "e": b"1"}, id="1000-0").decode()
        new = client.xadd(dead_key(slot), {"reason": "new", "e": b"2"}).decode()
    shown = penstock(tmp_path, "dead", "purge", slot, "--older-than", "7d", stdin="n\n", **there)
    assert shown.exit_code == 1
    assert f"Delete 1 dead letter of {slot}, with the bytes?" in shown.stderr
    assert len(json.loads(penstock(tmp_path, "dead", "list", slot, "--json", **there).stdout)) == 2
    shown = penstock(tmp_path, "dead", "purge", slot, "--older-than", "7d", "--yes", "--json", **there)
    assert json.loads(shown.stdout) == {"model": slot, "purged": 1}
    (left,) = json.loads(penstock(tmp_path, "dead", "list", slot, "--json", **there).stdout)
    assert left["entry"] == new
    gone = penstock(tmp_path, "dead", "purge", slot, old, "--yes", **there)
    assert gone.exit_code == 1
    assert f"No dead letter '{old}'" in gone.stderr
    assert penstock(tmp_path, "dead", "purge", slot, new, "--yes", **there).exit_code == 0
    assert penstock(tmp_path, "dead", "list", slot, **there).stdout == "No dead letters.\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["dead", "show", "m", "latest"], "No dead letter 'latest' of model m"),
        (["dead", "show", "m", "1-1"], "No dead letter '1-1' of model m"),
        (["dead", "list", "../m"], "Bad model name '../m'"),
        (["dead", "purge", "m", "--older-than", "a week"], "Bad age 'a week'"),
        (["dead", "purge", "m"], "Expected entries, or --all."),
        (["dead", "purge", "m", "1-1", "--all"], "Expected entries, or --all."),
        (["dead", "purge", "m", "--all", "--older-than", "1d"], "Expected one of: entries, --all, --older-than."),
        (["dead", "replay", "m"], "Expected entries, or --all."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused(there: dict[str, str], tmp_path: Path, arguments: list[str], line: str):
    """The error names the bad argument and the expected ones."""
    refused = penstock(tmp_path, *arguments, **there)
    assert refused.exit_code in (1, 2)
    assert f"Error: {line}" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.parametrize("words", ["list", "replay --all", "purge --all --yes"])
def test_misspelt_model_is_refused(there: dict[str, str], tmp_path: Path, slot: str, words: str):
    """A misspelt name must not look like a model without dead letters; the error lists the models that exist."""
    command, *options = words.split()
    refused = penstock(tmp_path, "dead", command, "nonesuch", *options, **there)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: Unknown model 'nonesuch'. Expected one of: ")
    assert slot in refused.stderr


def test_letters_of_a_model_that_is_not_announced_are_handled(
    shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str
):
    """They outlive their model, and can be listed and deleted then."""
    gone = f"{slot}-gone"
    with shared_redis.client() as client:
        entry = client.xadd(dead_key(gone), {"reason": "why", "e": b"x"}).decode()
    (letter,) = json.loads(penstock(tmp_path, "dead", "list", gone, "--json", **there).stdout)
    assert letter["entry"] == entry
    assert penstock(tmp_path, "dead", "purge", gone, "--all", "--yes", **there).exit_code == 0
    assert penstock(tmp_path, "dead", "list", gone, **there).exit_code == 1


def test_replay_of_a_missing_letter_fails_alone(
    shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str
):
    """A wrong entry is reported, and the other entries are still handled."""
    with shared_redis.client() as client:
        entry = client.xadd(dead_key(slot), {"reason": "why", "e": b"x"}).decode()
    shown = penstock(tmp_path, "dead", "replay", slot, "1-1", entry, "--json", **there)
    assert shown.exit_code == 1
    missing, foreign = json.loads(shown.stdout)
    assert "No dead letter '1-1'" in missing["reason"]
    assert "not a Penstock envelope" in foreign["reason"]
