"""The secret of a home, and a deliverer as a process: `penstock up` runs one where a secret exists."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from penstock.compose.stack.fleet import Device
from penstock.compose.stack.local import LocalStack
from penstock.compose.webhooks import deliverer_of, made_secret
from penstock.registry import stack_file
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.broker.webhooks import WebhookCounts
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.settings import Settings
from penstock.registry.webhook_secrets import new_secret
from penstock.registry.webhooks.sending import secret_of
from penstock.safety.alert_hooks import alert_webhook
from penstock.safety.alerts import Alert, Alerts, BackgroundHook, alert_event
from tests.conformance.jobs import ROOMY, claim, commit_of, publication, settle
from tests.packages import write_double
from tests.receiver import Call, Receiver, Reply, verify
from tests.servers import ROOT, wait_until


@pytest.fixture
def home() -> Iterator[Path]:
    """Not pytest's tmp_path: the path of a unix socket ends at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        yield Path(folder) / "home"


def _settings(home: Path, **more: str) -> Settings:
    return Settings.load(environ={"PENSTOCK_HOME": str(home), **more})


def test_secret_of_a_home_is_made_once(home: Path):
    """Only its user may read it; the setting takes its place."""
    settings = _settings(home)
    assert secret_of(settings) == ""
    made = made_secret(settings)
    assert made == made_secret(settings) == secret_of(settings)
    assert (home / "webhook-secret").stat().st_mode & 0o777 == 0o600
    own = new_secret()
    assert made_secret(_settings(home, PENSTOCK_WEBHOOK_SECRETS=own)) == own


def test_bad_secret_stops_the_start():
    """Of the settings: one line that does not show it."""
    with pytest.raises(ConfigurationError, match="PENSTOCK_WEBHOOK_SECRETS") as refused:
        Settings.load(environ={"PENSTOCK_WEBHOOK_SECRETS": "whsec_short"})
    assert "whsec_short" not in str(refused.value)


class Unheard:
    """Listens to nothing."""

    def webhook_tried(self, model: str, outcome: str) -> None:
        pass

    def webhooks_counted(self, model: str, counts: WebhookCounts) -> None:
        pass


@pytest.mark.parametrize(("limit", "tries"), [({}, 4), ({"PER_HOST": "2"}, 2), ({"IN_FLIGHT": "3"}, 3)])
def test_tries_at_a_time_are_those_of_the_settings(home: Path, limit: dict[str, str], tries: int):
    """webhooks.per_host and webhooks.in_flight bound the tries of one turn; by default a receiver gets four."""
    named = {f"PENSTOCK_INFERENCE_WEBHOOKS_{name}": value for name, value in limit.items()}
    allowed = {"PENSTOCK_WEBHOOK_SECRETS": new_secret(), "PENSTOCK_INFERENCE_WEBHOOKS_ALLOW": "127.0.0.1"}
    broker = MemoryBroker(time.time)
    with Receiver() as receiver:
        jobs = [publication("double", webhook=receiver.url()) for _ in range(6)]
        broker.publish("double", jobs, ROOMY)
        settle(broker, "w", *map(commit_of, claim(broker, "w", "double")))

        async def turn() -> None:
            deliverer = deliverer_of(_settings(home, **allowed, **named), broker, Unheard())
            await deliverer.turn()
            await deliverer.join()
            over = asyncio.Event()
            over.set()
            await deliverer.run(over)

        asyncio.run(turn())
        assert len(receiver.calls) == tries


def test_a_refused_candidate_is_posted_once(home: Path):
    """The receiver gets one signed event per failure, also when its first answer is an error. AR-068."""
    secret, paused = new_secret(), list[float]()
    settings = _settings(home, PENSTOCK_WEBHOOK_SECRETS=secret, PENSTOCK_INFERENCE_WEBHOOKS_ALLOW="127.0.0.1")
    alert = Alert("gate minilm/2:int8 1", "gate", "minilm", "min_cosine 0.88", 1_763_650_000, "2", "int8")

    def answer(call: Call) -> Reply:
        return Reply(503) if len(receiver.calls) == 1 else Reply()

    with Receiver(answer) as receiver:
        hook, alerts = BackgroundHook(alert_webhook(settings, receiver.url(), pause=paused.append)), Alerts()
        alerts.register("webhook", hook)
        assert [alerts.notify(alert) for _ in range(5)] == [True, False, False, False, False]
        assert hook.close(60)
        first, second = receiver.calls
    assert first.event == second.event == alert_event(alert)
    assert first.id == second.id == first.event["id"]
    assert verify(second, secret)
    assert (len(paused), hook.failures) == (1, 0)


def test_a_receiver_that_refuses_for_good_is_told_so(home: Path):
    """The hook fails, which Alerts or its BackgroundHook counts; an unusable URL is refused at once."""
    settings = _settings(home, PENSTOCK_WEBHOOK_SECRETS=new_secret(), PENSTOCK_INFERENCE_WEBHOOKS_ALLOW="127.0.0.1")
    alert = Alert("a", "drift", "minilm", "drift: cosine", 1)
    with Receiver(lambda call: Reply(410)) as gone, Receiver(lambda call: Reply(500)) as broken:
        with pytest.raises(ConnectionError, match="410"):
            alert_webhook(settings, gone.url())(alert)
        with pytest.raises(ConnectionError, match="500"):
            alert_webhook(settings, broken.url(), pause=lambda _: None)(alert)
        assert (len(gone.calls), len(broken.calls)) == (1, 3)
    with pytest.raises(InvalidInput, match="Expected https"):
        alert_webhook(settings, "ftp://example.com/")
    with pytest.raises(ConfigurationError, match="No secret signs"):
        alert_webhook(_settings(home), "https://example.com/")


def test_stack_delivers_with_the_secret_of_its_home(home: Path):
    """A program submits with a webhook, and its receiver gets the signed event. No other program was started."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as models, Receiver() as receiver:
        write_double(Path(models))
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_HOME": str(home),
            "PENSTOCK_INFERENCE_REPO_ROOT": models,
            "PENSTOCK_INFERENCE_DEVICE": "cpu",
            "PENSTOCK_METRICS_PORT": "0",
            "PENSTOCK_INFERENCE_WEBHOOKS_ALLOW": "127.0.0.1",
        }
        settings = Settings.load(environ=environ)
        secret = made_secret(settings)
        stack = LocalStack(settings, [Device("cpu", 0)], environ=environ, with_flower=False)
        with stack, Client.from_env(settings=_settings(home)) as client:
            assert set(stack.pids()) == {"redis", "cpu0", "webhooks"}
            job = client.submit("double", {"x": np.ones((1, 4), np.float32)}, webhook=receiver.url())
            job.result(180)
            wait_until(lambda: receiver.calls, 30, "the webhook comes")
        (call,) = receiver.calls
        assert verify(call, secret)
        assert call.event["data"]["id"] == job.id
        log = (home / "logs" / "webhooks.log").read_text()
        assert secret not in log
        assert stack_file.read(home) is None
