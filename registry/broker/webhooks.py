"""The seam between the deliverers of webhooks and a broker.

    publish(webhook) -> record -- the script that ends the job --> waiting, due now
                                                                     |  take_webhooks: due again after the lease
                                              webhook_delivered <----+----> postpone_webhook: due later
                                                  (gone)             `----> give_up_webhook: dead --> replay_webhook

Rules that every broker keeps, and that tests/conformance checks:
  * The step that ends a job with a webhook queues exactly one. A commit without effect queues none.
  * A taken webhook belongs to its deliverer for a lease by the broker's clock; then it is due again, as another try.
  * A delivery counts at any time. Postponing and giving up have no effect once another try has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from penstock.registry.broker.base import Broker, State

__all__ = ["DEAD_WEBHOOKS_CAP", "BrokerOfWebhooks", "Webhook", "WebhookCounts", "WebhookEnd"]

DEAD_WEBHOOKS_CAP: Final = 10_000
"""Dead webhooks that one slot keeps. The oldest are deleted first."""


class Webhook(msgspec.Struct, frozen=True, gc=False):
    """The call that tells of one job's end. `id` is the same at each try. `target` is the URL as the record has it, see
    registry/webhook_target.py. `tries` counts those that have begun, and `failures` those that were seen to fail: the
    others ended with their deliverer. `error` is why the last one failed. `due_ms` is filled in by `list_webhooks` for
    those that wait. Times are the broker's, in ms since the epoch."""

    slot: str
    id: str
    job_id: str
    state: State
    ended_ms: int
    target: str
    tries: int = 0
    failures: int = 0
    error: str = ""
    due_ms: int = 0


class WebhookCounts(NamedTuple):
    """The webhooks of one slot, and the time since the job of the oldest waiting one ended."""

    waiting: int
    dead: int
    oldest_s: float


class WebhookEnd(Protocol):
    """The calls of deliverers. Each raises BrokerUnavailable when the broker does not answer in time."""

    def webhook_slots(self) -> Sequence[str]:
        """The models whose jobs have had a webhook."""

    def take_webhooks(self, slot: str, count: int, lease_ms: int) -> list[Webhook]:
        """Up to `count` webhooks that are due, longest due first. Each begins another try."""

    def webhook_delivered(self, webhook: Webhook) -> bool:
        """Delete a webhook, also when it is dead or another deliverer has it. Returns whether it was there."""

    def postpone_webhook(self, webhook: Webhook, delay_ms: int, error: str, *, counts: bool = True) -> bool:
        """Have a taken webhook due again after `delay_ms`. counts: False takes back the try, which did not begin."""

    def give_up_webhook(self, webhook: Webhook, error: str) -> bool:
        """Make a taken webhook a dead one."""

    def replay_webhook(self, slot: str, event_id: str) -> bool:
        """Make a dead webhook due now, with all its tries. Returns False when there is no such dead webhook."""

    def list_webhooks(self, slot: str, *, dead: bool, after: int = 0, count: int = 100) -> list[Webhook]:
        """Up to `count` webhooks that wait, or dead ones, oldest first, without the first `after`."""

    def count_webhooks(self, slot: str) -> WebhookCounts:
        """How many webhooks of the slot wait, and how many are dead."""


class BrokerOfWebhooks(Broker, WebhookEnd, Protocol):
    """All four ends."""
