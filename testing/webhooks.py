"""The webhooks of a client in memory: what a deliverer would send. Nothing is sent."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.producers.async_client import AsyncClient
from penstock.producers.client import Client
from penstock.producers.webhooks.event import event_of
from penstock.testing.worker import InMemoryWorker

__all__ = ["QueuedWebhook", "queued_webhooks"]


class QueuedWebhook(NamedTuple):
    """The URL that a job was submitted with, and the event that tells of the job's end."""

    url: str
    event: dict[str, Any]


def queued_webhooks(client: Client | AsyncClient) -> list[QueuedWebhook]:
    """The webhooks of the jobs that have ended so far, oldest first.

    client: one of `in_memory`. Raises TypeError for any other.
    """
    worker = getattr(client, "_worker", None)
    if not isinstance(worker, InMemoryWorker):
        raise TypeError(f"The client is a {type(client).__name__}. Expected one of Client.in_memory")
    return [QueuedWebhook(each.target.partition(" ")[0], event_of(each)) for each in worker.webhooks()]
