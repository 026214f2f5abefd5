"""Webhooks on this machine: the secret that signs them, and a deliverer until a signal stops it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from penstock.compose.terminal import stop_signals
from penstock.producers.webhooks.delivery import Deliverer, DelivererLimits, DeliveryListener
from penstock.registry import stack_file
from penstock.registry.broker.webhooks import Webhook, WebhookEnd
from penstock.registry.errors import InvalidInput
from penstock.registry.settings import Settings
from penstock.registry.webhook_secrets import new_secret
from penstock.registry.webhook_target import checked_url
from penstock.registry.webhooks.request import host_of
from penstock.registry.webhooks.schedule import Answer, Failed
from penstock.registry.webhooks.sending import WEBHOOK_FILE, keys_of, requests_of, secret_of
from penstock.registry.webhooks.signing import body_of, headers_of

__all__ = ["deliver", "deliverer_of", "described", "find_all", "made_secret", "send_test"]

_PAGE: Final = 200


def made_secret(settings: Settings) -> str:
    """The same; the first call for a home makes its secret, which only this user may read."""
    if not (secret := secret_of(settings)):
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = new_secret()
        stack_file.write_private(settings.home / WEBHOOK_FILE, secret)
    return secret


def deliver(deliverer: Deliverer) -> None:
    """Deliver webhooks until SIGTERM, SIGINT or SIGHUP."""

    async def run() -> None:
        stopping = asyncio.Event()
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        await deliverer.run(stopping)

    asyncio.run(run())


def deliverer_of(settings: Settings, broker: WebhookEnd, listener: DeliveryListener) -> Deliverer:
    """The deliverer of these settings. Raises ConfigurationError without a secret."""
    webhooks, keys = settings.inference.webhooks, keys_of(settings)
    limits, requests = DelivererLimits(webhooks.in_flight, webhooks.per_host), requests_of(settings)
    return Deliverer(broker, requests, keyring=settings.keyring, keys=keys, listener=listener, limits=limits)


def send_test(settings: Settings, url: str, event_id: str, now_s: float) -> Answer | Failed:
    """Send one signed event of the type `webhook.test`. Raises InvalidInput for an unusable URL."""
    keys = keys_of(settings)
    event = {"id": event_id, "object": "event", "type": "webhook.test", "created_at": int(now_s), "data": {}}
    body = body_of(event)
    return asyncio.run(requests_of(settings).post(checked_url(url), headers_of(event_id, body, keys, now_s), body))


def described(webhook: Webhook, status: str) -> dict[str, Any]:
    """A webhook ready for JSON. Of its URL only the receiver: path and query may hold a secret."""
    try:
        receiver = host_of(checked_url(webhook.target.partition(" ")[0]))
    except InvalidInput:
        receiver = ""
    return {
        "id": webhook.id,
        "job_id": webhook.job_id,
        "model": webhook.slot,
        "receiver": receiver,
        "state": webhook.state.name.lower(),
        "status": status,
        "ended_ms": webhook.ended_ms,
        "due_ms": webhook.due_ms,
        "tries": webhook.tries,
        "error": webhook.error,
    }


def find_all(broker: WebhookEnd, slot: str, *, dead: bool) -> list[Webhook]:
    """All webhooks of a model that wait, or all dead ones, oldest first."""
    found: list[Webhook] = []
    while page := broker.list_webhooks(slot, dead=dead, after=len(found), count=_PAGE):
        found += page
    return found
