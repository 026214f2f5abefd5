"""The alert hooks of a process: webhooks of the settings, and callbacks of installed distributions.

    settings safety.alert_webhooks ------> alert_webhook, one for each URL --.
    entry points `penstock.alert_hooks` --> a function of the alert ---------+--> BackgroundHook --> Alerts
    a program: opened.alerts.register("name", function) ------------------------------------------> Alerts

Each hook has a thread of its own, so that a slow receiver delays neither a gate nor another hook.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.settings import Settings
from penstock.registry.webhook_target import checked_url
from penstock.registry.webhooks.schedule import Failed, pause_s, verdict
from penstock.registry.webhooks.sending import keys_of, requests_of
from penstock.registry.webhooks.signing import body_of, headers_of
from penstock.safety.alerts import Alert, AlertHook, Alerts, BackgroundHook, Outcome, alert_event

__all__ = ["ENTRY_POINTS", "OpenedAlerts", "alert_webhook", "open_alerts"]

ENTRY_POINTS: Final = "penstock.alert_hooks"
"""The group of entry points: each is a plain function of the alert."""


@dataclass(frozen=True, slots=True)
class OpenedAlerts:
    """The alerts of a process, and the hooks that have threads."""

    alerts: Alerts
    hooks: tuple[BackgroundHook, ...] = ()

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what waits, for a moment, and take no more alerts."""
        until = time.monotonic() + timeout_s
        for hook in self.hooks:
            hook.close(max(0.0, until - time.monotonic()))


def open_alerts(
    settings: Settings,
    on_outcome: Callable[[str, Outcome], None] = lambda name, outcome: None,
    found: Iterable[EntryPoint] | None = None,
) -> OpenedAlerts:
    """The hooks of the settings and of installed distributions. `close` it last.

    on_outcome: is told (name of the hook, outcome). found: None for the group of ENTRY_POINTS. Raises
    ConfigurationError for a webhook without a secret, and for an entry point that cannot be used.
    """
    named: dict[str, AlertHook] = {}
    for number, url in enumerate(settings.inference.safety.alert_webhooks, 1):
        named[f"webhook {number}"] = alert_webhook(settings, url)
    for entry in entry_points(group=ENTRY_POINTS) if found is None else found:
        named[entry.name] = _loaded(entry)
    alerts, hooks = Alerts(on_outcome=on_outcome), []
    for name, hook in named.items():
        hooks.append(BackgroundHook(hook, on_failure=lambda _, name=name: on_outcome(name, "failed")))  # type: ignore[misc]
        alerts.register(name, hooks[-1])
    return OpenedAlerts(alerts, tuple(hooks))


def _loaded(entry: EntryPoint) -> AlertHook:
    place, expected = f"The entry point {entry.name!r:.80} of {ENTRY_POINTS}", "Expected a plain function of the alert"
    try:
        hook: AlertHook = entry.load()
    except Exception as error:  # a distribution's code may raise anything
        raise ConfigurationError(f"{place} cannot be loaded ({type(error).__name__}). {expected}") from error
    try:
        Alerts().register(entry.name, hook)
    except InvalidInput as problem:
        raise ConfigurationError(f"{place}: {problem}") from None
    return hook


def alert_webhook(
    settings: Settings, url: str, *, tries: int = 3, pause: Callable[[float], object] = time.sleep
) -> AlertHook:
    """A hook for Alerts that posts each alert to this URL, signed as webhooks of jobs are. It blocks for its tries.

    Put it into a BackgroundHook. The event has the same id at each try. The hook raises ConnectionError after the last
    one. Raises InvalidInput for an unusable URL, and ConfigurationError without a secret.
    """
    keys, requests = keys_of(settings), requests_of(settings)
    checked_url(url)

    def post(alert: Alert) -> None:
        event = alert_event(alert)
        body = body_of(event)
        for number in range(1, tries + 1):
            now_s = time.time()
            answer = asyncio.run(requests.post(url, headers_of(event["id"], body, keys, now_s), body))
            result = answer if isinstance(answer, Failed) else verdict(answer, now_s)
            if not isinstance(result, Failed):
                return
            wait_s = pause_s(number, random.random(), result.least_pause_s)  # noqa: S311 - spreads tries, no secret
            if result.is_final or number == tries or wait_s is None:
                raise ConnectionError(result.error)
            pause(wait_s)

    return post
