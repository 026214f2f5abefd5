"""The operators' commands over real Redis: dead letters, pauses, purges, workers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from penstock import Client
from penstock.producers.client import JobHandle
from penstock.registry.broker.base import State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Failure
from penstock.registry.errors import Cancelled, DeadLettered
from penstock.registry.queues import WORKERS_KEY, Priority, dead_key, stream_key, worker_key
from penstock.registry.settings import Settings
from penstock.registry.stack_file import with_broker
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from penstock.workers.results import unrun_result
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.servers import RedisServer, wait_until

KEYS = "k1:" + "A" * 43 + "="
X = {"x": [[1.0, 2.0, 3.0, 4.0]]}


@contextmanager
def _client(home: Path) -> Iterator[Client]:
    with Client.from_env(settings=_settings(home)) as client:
        yield client


def _settings(home: Path) -> Settings:
    return with_broker(Settings.load(environ={"PENSTOCK_HOME": str(home)}))


@pytest.fixture
def paused(home: Path) -> Iterator[Client]:
    """A client of the stack whose worker starts nothing, until the test resumes it."""
    assert json.loads(penstock(home, "queue", "pause", "double", "--json").stdout) == {
        "model": "double",
        "paused": True,
    }
    with _client(home) as client:
        # A worker looks for pauses just before it reports: after the second report from now on it has heard of ours.
        for _ in range(2):
            _await_report(home)
        yield client
    penstock(home, "queue", "purge", "double", "--yes")
    penstock(home, "queue", "resume", "double")


def _await_report(home: Path) -> None:
    with redis.Redis.from_url(_settings(home).redis_url or "") as client:
        (name,) = client.zrange(WORKERS_KEY, 0, -1)
        left_ms = [int(client.pttl(worker_key(name.decode())))]

        def is_new() -> bool:
            left_ms.append(int(client.pttl(worker_key(name.decode()))))
            return left_ms[-1] > left_ms[-2]

        wait_until(is_new, 10, "the worker reports")


def _dead_letter(home: Path, client: Client) -> tuple[JobHandle, str]:
    """A job that a worker gave up, and the name of its letter."""
    settings = _settings(home)
    with closing(RedisStreams.from_url(settings.redis_url or "")) as broker:
        # This end never claims, so it does not know of the pause, and its blocking read is served; unless the worker's
        # own, from before the pause, is served first: then that job is given back, and the next one is ours.
        for _ in range(20):
            job = client.submit("double", X, priority="high")
            broker.arm("undertaker", ["double"], 8, 1000)
            for delivery in broker.collect():
                failure = Failure("DeadLettered", "The job went to the dead letters. It killed three workers")
                sealed = unrun_result(job.id, job.tenant, failure, worker="undertaker", keyring=settings.keyring)
                assert broker.dead_letter(
                    "undertaker", delivery, "it killed three workers", job_id=job.id, sealed=sealed
                )
                return job, broker.dead_letters("double")[-1].entry
    pytest.fail("no job could be dead-lettered")


def test_paused_model_accepts_and_waits(home: Path, paused: Client):
    """Jobs are accepted during a pause, status and doctor say so, and after it they run."""
    job = paused.submit("double", X)
    assert json.loads(penstock(home, "status", "--json").stdout)["paused"] == ["double"]
    assert "Paused: double" in penstock(home, "status").stdout
    assert "penstock queue resume double" in penstock(home, "doctor").stdout
    assert job.status() == "queued"
    assert penstock(home, "queue", "resume", "double").stdout == "double is resumed.\n"
    assert job.result(timeout=10)["y"].tolist() == [[2, 4, 6, 8]]


def test_purged_jobs_end_cancelled_for_their_client(home: Path, paused: Client):
    """Signed as the stack signs: the waiting client reads why; other priorities stay."""
    low = [paused.submit("double", X, priority="low") for _ in range(3)]
    high = paused.submit("double", X, priority="high")
    shown = penstock(home, "queue", "purge", "double", "--priority", "low", "--yes", "--json")
    assert json.loads(shown.stdout) == {"model": "double", "priority": "low", "withdrawn": 3}
    for job in low:
        with pytest.raises(Cancelled, match="an operator purged its queue"):
            job.result(timeout=5)
    assert high.status() == "queued"
    shown = penstock(home, "queue", "purge", "double", stdin="n\n")
    assert shown.exit_code == 1
    assert "Withdraw 1 waiting job of double?" in shown.stderr
    assert high.status() == "queued"


def test_replayed_job_is_answered_under_its_id(home: Path, paused: Client):
    """A job that was given up: listed with the reason, shown with its header, put back, run, read by its client."""
    job, entry = _dead_letter(home, paused)
    with pytest.raises(DeadLettered, match="It killed three workers"):
        job.result(timeout=5)
    (letter,) = json.loads(penstock(home, "dead", "list", "--json").stdout)
    expected = ("double", entry, job.id, "default", "high", "it killed three workers", 1)
    fields = ("model", "entry", "job_id", "tenant", "priority", "reason", "deliveries")
    assert tuple(letter[name] for name in fields) == expected
    listed = penstock(home, "dead", "list", "double").stdout
    assert f"double {entry}" in listed
    assert f"job {job.id} of tenant default" in listed
    shown = json.loads(penstock(home, "dead", "show", "double", entry, "--json").stdout)
    assert shown["header"]["inputs"] == {"x": "float32 (1, 4)"}
    assert shown["signature"].startswith("holds: key ")
    assert shown["replay"] == "possible"
    told = penstock(home, "dead", "replay", "double", entry).stdout
    assert told == f"{entry}  back in the queue as {job.id}\n"
    assert penstock(home, "dead", "list").stdout == "No dead letters.\n"
    penstock(home, "queue", "resume", "double")
    assert paused.job(job.id).result(timeout=10)["y"].tolist() == [[2, 4, 6, 8]]


def test_replay_of_all_names_what_stays(home: Path, paused: Client):
    """Of several letters the good ones go back, and exit status 1 says that others did not."""
    job, entry = _dead_letter(home, paused)
    with redis.Redis.from_url(_settings(home).redis_url or "") as client:
        client.xadd(dead_key("double"), {"reason": "foreign", "e": b"\x00" * 30})
    shown = penstock(home, "dead", "replay", "double", "--all", "--json")
    assert shown.exit_code == 1
    good, foreign = json.loads(shown.stdout)
    assert good == {"entry": entry, "job_id": job.id, "replayed": True, "reason": ""}
    assert (foreign["replayed"], foreign["reason"]) == (
        False,
        "its bytes cannot be a job: not a Penstock envelope",
    )
    assert penstock(home, "dead", "purge", "double", "--all", "--yes").stdout == (
        "1 dead letter of double forgotten.\n"
    )


def test_workers_lists_who_lives(home: Path):
    """Name, device, state and models, for people and for programs."""
    (report,) = json.loads(penstock(home, "workers", "--json").stdout)
    assert (report["device"], report["ready"], report["models"]) == ("cpu", True, {"double": "1"})
    shown = penstock(home, "workers").stdout
    assert report["name"] in shown
    assert "double/1" in shown


@pytest.fixture
def there(shared_redis: RedisServer, tmp_path: Path, slot: str) -> dict[str, str]:
    """The environment of a shell that knows a broker with a registered model, and no worker."""
    environ = {"PENSTOCK_REDIS_URL": shared_redis.url}
    assert penstock(tmp_path, "models", "register", str(write_double(tmp_path, slot)), **environ).exit_code == 0
    return environ


def test_letters_of_strangers_are_shown_and_not_obeyed(
    shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str
):
    """Another protocol version, escape sequences, no fields at all: each is listed and shown, none moves the cursor."""
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
    """As they were, for this user only, and never over a file that is there."""
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
    """By age, by name, or all; asked first; and what was not meant stays."""
    with shared_redis.client() as client:
        old = client.xadd(dead_key(slot), {"reason": "old", "e": b"1"}, id="1000-0").decode()
        new = client.xadd(dead_key(slot), {"reason": "new", "e": b"2"}).decode()
    shown = penstock(tmp_path, "dead", "purge", slot, "--older-than", "7d", stdin="n\n", **there)
    assert shown.exit_code == 1
    assert f"Forget 1 dead letter of {slot}, with the bytes?" in shown.stderr
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


def test_purge_without_the_key_says_so(there: dict[str, str], tmp_path: Path, slot: str):
    """Where jobs are signed the word that they are withdrawn must be: without the key nothing is."""
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


def test_large_queue_is_purged_in_parts(shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str):
    """Thousands of jobs and a few foreign entries among them: all leave, each job is told, no call is long."""
    with Client.from_env(settings=Settings.load(environ=there)) as client, shared_redis.client() as server:
        jobs = client.submit_many(slot, [X] * 3000)
        for _ in range(3):
            server.xadd(stream_key(slot, Priority.NORMAL), {"e": os.urandom(50), "more": "fields"})
        server.slowlog_reset()
        shown = penstock(tmp_path, "queue", "purge", slot, "--yes", "--json", **there)
        assert json.loads(shown.stdout)["withdrawn"] == 3003
        assert [call for call in server.slowlog_get() if call["duration"] > 100_000] == []
        assert server.xlen(stream_key(slot, Priority.NORMAL)) == 0
    with closing(RedisStreams.from_url(shared_redis.url)) as broker:
        states = {job_record and job_record.state for job_record in broker.job_records([job.id for job in jobs])}
    assert states == {State.CANCELLED}


@pytest.mark.parametrize("command", ["pause", "resume", "purge"])
def test_misspelt_model_is_refused(there: dict[str, str], tmp_path: Path, slot: str, command: str):
    """A typing error must not look like success; the models that exist are named."""
    refused = penstock(tmp_path, "queue", command, "nonesuch", *(["--yes"] if command == "purge" else []), **there)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: Unknown model 'nonesuch'. Expected one of: ")
    assert slot in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["dead", "show", "m", "latest"], "No dead letter 'latest' of model m"),
        (["dead", "show", "m", "1-1"], "No dead letter '1-1' of model m"),
        (["dead", "list", "../m"], "Bad model name '../m'"),
        (["dead", "purge", "m", "--older-than", "a week"], "Bad age 'a week'"),
        (["dead", "purge", "m"], "Expected entries, or --all."),
        (["dead", "purge", "m", "1-1", "--all"], "Expected entries, or --all."),
        (["dead", "purge", "m", "--all", "--older-than", "1d"], "Expected entries, --all or --older-than"),
        (["dead", "replay", "m"], "Expected entries, or --all."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused(there: dict[str, str], tmp_path: Path, arguments: list[str], line: str):
    """What was wrong and what is expected."""
    refused = penstock(tmp_path, *arguments, **there)
    assert refused.exit_code in (1, 2)
    assert f"Error: {line}" in refused.stderr
    assert refused.stdout == ""


def test_replay_of_a_missing_letter_fails_alone(
    shared_redis: RedisServer, there: dict[str, str], tmp_path: Path, slot: str
):
    """One wrong name does not keep the others from being looked at."""
    with shared_redis.client() as client:
        entry = client.xadd(dead_key(slot), {"reason": "why", "e": b"x"}).decode()
    shown = penstock(tmp_path, "dead", "replay", slot, "1-1", entry, "--json", **there)
    assert shown.exit_code == 1
    missing, foreign = json.loads(shown.stdout)
    assert "No dead letter '1-1'" in missing["reason"]
    assert "not a Penstock envelope" in foreign["reason"]
