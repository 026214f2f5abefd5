"""The alert hooks of a process: webhooks of the settings, callbacks of distributions and of programs. AR-068."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.registry.webhook_secrets import new_secret
from penstock.safety.alert_hooks import ENTRY_POINTS, open_alerts
from penstock.safety.alerts import Alert
from tests.receiver import Receiver, verify

ALERT = Alert("breaker minilm/2:int8 1", "breaker", "minilm", "drift: y.min_cosine", 1_763_650_000.7, "2", "int8")
HEARD: list[str] = []


def hear(alert: Alert) -> None:
    """A callback that a distribution could name."""
    HEARD.append(alert.id)


def break_down(alert: Alert) -> None:
    """One that fails."""
    raise RuntimeError("the pager is gone")


async def hear_later(alert: Alert) -> None:
    """One that nobody would wait for."""


def _settings(home: Path, secret: str = "", *urls: str) -> Settings:
    environ = (
        {"PENSTOCK_HOME": str(home), "PENSTOCK_WEBHOOK_SECRETS": secret} if secret else {"PENSTOCK_HOME": str(home)}
    )
    overrides = {"safety": {"alert_webhooks": urls}, "webhooks": {"allow": ["127.0.0.1"]}}
    return Settings.load(environ=environ, overrides=overrides)


def _entry(name: str, function: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{function}", ENTRY_POINTS)


def test_each_hook_hears_of_each_alert_once(tmp_path: Path):
    """A signed webhook, a callback of a distribution, one that fails, and one of the program."""
    secret, told, own = new_secret(), Counter[tuple[str, str]](), list[str]()
    HEARD.clear()
    with Receiver() as receiver:
        opened = open_alerts(
            _settings(tmp_path, secret, receiver.url("/pager")),
            lambda name, outcome: told.update([(name, outcome)]),
            [_entry("log", "hear"), _entry("broken", "break_down")],
        )
        opened.alerts.register("program", lambda alert: own.append(alert.id))
        assert [opened.alerts.notify(ALERT) for _ in range(3)] == [True, False, False]
        opened.close(60)
        (call,) = receiver.calls
    assert verify(call, secret)
    assert (call.path, call.event["type"], call.event["data"]["reason"]) == ("/pager", "safety.breaker", ALERT.reason)
    assert own == HEARD == [ALERT.id]
    assert told == {
        ("webhook 1", "sent"): 1,
        ("log", "sent"): 1,
        ("broken", "sent"): 1,
        ("broken", "failed"): 1,
        ("program", "sent"): 1,
    }


def test_webhook_without_a_secret_is_refused(tmp_path: Path):
    """Nobody could tell a forged alert from ours."""
    with pytest.raises(ConfigurationError, match="No secret signs the webhooks"):
        open_alerts(_settings(tmp_path, "", "https://example.com/"))


@pytest.mark.parametrize("url", ["http://example.com/", "ftp://example.com/", "https://a:b@example.com/"])
def test_unusable_url_is_refused_with_the_settings(tmp_path: Path, url: str):
    """The message does not repeat the URL, which may hold a secret."""
    with pytest.raises(ConfigurationError, match="Expected https://host/path") as refused:
        _settings(tmp_path, "", url)
    assert url not in str(refused.value)


@pytest.mark.parametrize("function", ["hear_later", "absent", "ENTRY_POINTS"])
def test_entry_point_that_is_no_function_of_the_alert_is_refused(tmp_path: Path, function: str):
    """An async function, one that is not there, and a string."""
    with pytest.raises(ConfigurationError, match=r"The entry point 'pager' of penstock\.alert_hooks"):
        open_alerts(_settings(tmp_path), found=[_entry("pager", function)])
