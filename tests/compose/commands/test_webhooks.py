"""`penstock webhooks` over a real Redis and a real receiver."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from penstock import Client
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.webhook_secrets import new_secret
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.receiver import HANG, Call, Receiver, Reply, verify
from tests.servers import ROOT, Process, RedisServer, free_port, redis_binaries, require, wait_until

SECRET = new_secret()
ALLOWED = {"PENSTOCK_WEBHOOK_SECRETS": SECRET, "PENSTOCK_INFERENCE_WEBHOOKS_ALLOW": "127.0.0.1"}
X = {"x": [[1.0, 2.0, 3.0, 4.0]]}
URL = "https://hooks.example:8443/path?token=secret"


@pytest.fixture
def broker(there: dict[str, str]) -> Iterator[RedisStreams]:
    """An end of the broker of the shell `there`."""
    with closing(RedisStreams.from_url(there["PENSTOCK_REDIS_URL"])) as found:
        yield found


def _ended(there: dict[str, str], slot: str, url: str) -> str:
    """A job with a webhook that was cancelled; its id."""
    with Client(there["PENSTOCK_REDIS_URL"]) as client:
        job = client.submit(slot, X, webhook=url)
        assert job.cancel() == "cancelled"
        return job.id


def _die(broker: RedisStreams, slot: str) -> str:
    (webhook,) = broker.take_webhooks(slot, 8, 60_000)
    assert broker.give_up_webhook(webhook, "the receiver answered 410: gone")
    return webhook.id


def test_list_shows_what_is_not_delivered(there: dict[str, str], broker: RedisStreams, slot: str, tmp_path: Path):
    """Receiver, reason and tries, and no path or query of the URL, which may hold a secret."""
    assert "No webhooks." in penstock(tmp_path, "webhooks", "list", slot, **there).stdout
    job_id = _ended(there, slot, URL)
    shown = penstock(tmp_path, "webhooks", "list", slot, **there)
    assert shown.exit_code == 0
    assert "hooks.example:8443" in shown.stdout
    assert "token" not in shown.stdout
    dead = _die(broker, slot)
    (facts,) = json.loads(penstock(tmp_path, "webhooks", "list", slot, "--dead", "--json", **there).stdout)
    assert facts["id"] == dead
    assert {
        "job_id": job_id,
        "receiver": "hooks.example:8443",
        "state": "cancelled",
        "tries": 1,
    }.items() <= facts.items()
    assert "410: gone" in penstock(tmp_path, "webhooks", "list", **there).stdout


def test_replay_makes_dead_ones_due(there: dict[str, str], broker: RedisStreams, slot: str, tmp_path: Path):
    """By id, or all; an unknown id is named, with exit status 1."""
    _ended(there, slot, URL)
    dead = _die(broker, slot)
    unknown = penstock(tmp_path, "webhooks", "replay", slot, "evt_unknown", **there)
    assert unknown.exit_code == 1
    assert f"evt_unknown  is no dead webhook of {slot}" in unknown.stdout
    shown = penstock(tmp_path, "webhooks", "replay", slot, dead, "--json", **there)
    assert json.loads(shown.stdout) == [{"id": dead, "replayed": True}]
    _die(broker, slot)
    assert f"1 webhook of {slot} replayed." in penstock(tmp_path, "webhooks", "replay", slot, "--all", **there).stdout
    assert [webhook.id for webhook in broker.take_webhooks(slot, 8, 60_000)] == [dead]
    neither = penstock(tmp_path, "webhooks", "replay", slot, **there)
    assert neither.exit_code == 2


def test_test_sends_one_signed_event(tmp_path: Path):
    """It prints the answer; a receiver that refuses is exit status 1."""
    with Receiver(lambda call: Reply(204 if call.path == "/good" else 401)) as receiver:
        good = penstock(tmp_path, "webhooks", "test", receiver.url("/good"), **ALLOWED)
        bad = penstock(tmp_path, "webhooks", "test", receiver.url("/bad"), "--json", **ALLOWED)
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert "the receiver answered 204" in good.stdout
    assert json.loads(bad.stdout)["status"] == 401
    assert all(verify(call, SECRET) for call in receiver.calls)
    assert receiver.calls[0].event["type"] == "webhook.test"


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("http://example.com/", "The URL of the webhook is not encrypted"),
        ("https://user:pw@example.com/", "The URL of the webhook has a user or a password"),
    ],
)
def test_test_refuses_a_bad_url(url: str, line: str, tmp_path: Path):
    """One line, and nothing is sent."""
    shown = penstock(tmp_path, "webhooks", "test", url, **ALLOWED)
    assert shown.exit_code == 1
    assert shown.stderr.startswith(f"Error: {line}")


def test_test_guards_this_machine(tmp_path: Path):
    """Without the operator's word no loopback address is called."""
    with Receiver() as receiver:
        shown = penstock(tmp_path, "webhooks", "test", receiver.url(), PENSTOCK_WEBHOOK_SECRETS=SECRET)
    assert shown.exit_code == 1
    assert "is not a public one, and webhooks.allow does not name it" in shown.stdout
    assert receiver.calls == []


def test_test_connects_within_the_limit_of_the_setting(tmp_path: Path):
    """webhooks.connect_timeout_s: a receiver that accepts and never answers the handshake is given up after it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/"
        limit = {"PENSTOCK_INFERENCE_WEBHOOKS_CONNECT_TIMEOUT_S": "0.25"}
        shown = penstock(tmp_path, "webhooks", "test", url, **ALLOWED, **limit)
    assert shown.exit_code == 1
    assert "none within 0.25 s" in shown.stdout


def test_test_waits_within_the_limit_of_the_setting(tmp_path: Path):
    """webhooks.timeout_s: a receiver that takes the event and never answers is given up after it."""
    limit = {"PENSTOCK_INFERENCE_WEBHOOKS_TIMEOUT_S": "0.5"}
    with Receiver(lambda call: HANG) as hanging:
        shown = penstock(tmp_path, "webhooks", "test", hanging.url(), **ALLOWED, **limit)
    assert shown.exit_code == 1
    assert "no answer within 0.5 s" in shown.stdout


def test_secret_is_made_and_printed(tmp_path: Path):
    """The same each time."""
    first, second = (penstock(tmp_path / "home", "webhooks", "secret") for _ in range(2))
    assert first.stdout == second.stdout
    assert first.stdout.startswith("whsec_")


def test_run_without_a_secret_is_refused(there: dict[str, str], tmp_path: Path):
    """Status 78, and one line that says where it comes from."""
    shown = penstock(tmp_path, "webhooks", "run", **there)
    assert shown.exit_code == EXIT_CONFIGURATION
    assert shown.stderr.startswith("Error: No secret signs the webhooks. Expected PENSTOCK_WEBHOOK_SECRETS")


class _Deliverer(Process):
    """`penstock webhooks run` as a process."""

    def start(self, *options: str, **environ: str) -> None:
        """Start it without waiting."""
        command = [sys.executable, "-m", "penstock", "webhooks", "run", *options]
        self._spawn(command, {"PYTHONPATH": str(ROOT), "PENSTOCK_HOME": str(self.folder), **environ})


def test_run_delivers_until_it_is_told_to_stop(
    there: dict[str, str], shared_redis: RedisServer, slot: str, tmp_path: Path
):
    """The event arrives, the metrics count it, the log has the failure without the URL, and SIGTERM ends it with 0."""

    def answer(call: Call) -> Reply:
        return Reply(500 if call.path.startswith("/bad") else 200)

    deliverer, port = _Deliverer(tmp_path), free_port()
    with Receiver(answer) as receiver:
        good, bad = (_ended(there, slot, receiver.url(path)) for path in ("/good", "/bad?token=secret"))
        deliverer.start("--metrics-port", str(port), **there, **ALLOWED)
        try:
            wait_until(lambda: len(receiver.calls) == 2, 30, "both are called")
            wait_until(lambda: _counted(port, slot, "delivered") == 1, 30, "the delivery is counted")
            wait_until(lambda: _counted(port, slot, "failed") == 1, 30, "the failure is counted")
            deliverer.terminate()
            assert deliverer.wait(180) == 0
        finally:
            if deliverer.is_running:
                deliverer.kill()
    assert {call.event["data"]["id"] for call in receiver.calls} == {good, bad}
    log = deliverer.tail(1000)
    assert "the receiver answered 500" in log
    assert "token" not in log
    assert SECRET not in log


def test_a_deliverer_is_ready_while_it_reaches_the_broker(tmp_path: Path):
    """/health/ready says 503 while the broker is away, and 200 before and afterwards."""
    server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server")).start()
    deliverer, port = _Deliverer(tmp_path), free_port()
    try:
        deliverer.start("--metrics-port", str(port), PENSTOCK_REDIS_URL=server.url, **ALLOWED)
        wait_until(lambda: _readiness(port) == 200, 60, "the deliverer is ready")
        server.kill()
        wait_until(lambda: _readiness(port) == 503, 60, "the deliverer is not ready")
        server.start()
        wait_until(lambda: _readiness(port) == 200, 60, "the deliverer is ready again")
    finally:
        deliverer.kill()
        server.stop()


def _readiness(port: int) -> int:
    """The status of /health/ready; 0 before the port listens."""
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=180).status_code
    return 0


def _counted(port: int, slot: str, outcome: str) -> float:
    """The tries of a model with this outcome, by /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=180) as answer:
        lines = answer.read().decode().splitlines()
    words = ("penstock_webhooks_total{", f'model_name="{slot}"', f'outcome="{outcome}"')
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(word in line for word in words))
