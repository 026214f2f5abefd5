"""The end of deliverers of webhooks in Redis: scripts that take, settle, replay and list webhooks.

Another program may write to the keys of webhooks. One that cannot be read is removed when it is taken: its deliverer
would meet it again after each lease.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import State
from penstock.registry.broker.redis_connection import RedisConnection
from penstock.registry.broker.webhooks import DEAD_WEBHOOKS_CAP, Webhook, WebhookCounts
from penstock.registry.queues import WEBHOOKS_KEY, webhook_key, webhook_keys

__all__ = ["RedisWebhooks"]

_MOST_ERROR: Final = 200
"""Characters of an error that are kept."""
_MOST_TRIES: Final = str(2**63 - 1).encode()
"""The largest integer of Redis, as it stands in a hash. Only another program writes it."""
logger = logging.getLogger("penstock.registry")


class RedisWebhooks(RedisConnection):
    """WebhookEnd on one Redis. Thread-safe."""

    def webhook_slots(self) -> Sequence[str]:
        """See WebhookEnd.webhook_slots."""
        return sorted(name.decode(errors="replace") for name in self._run(["SMEMBERS", WEBHOOKS_KEY]))

    def take_webhooks(self, slot: str, count: int, lease_ms: int) -> list[Webhook]:
        """See WebhookEnd.take_webhooks."""
        waiting, due, _ = webhook_keys(slot)
        taken = self._run(_call("take_webhooks", [waiting, due], [count, lease_ms, webhook_key(slot, "")]))
        found = []
        for fields in taken:
            if (webhook := _webhook(slot, fields)) is not None:
                found.append(webhook)
            else:
                event_id = fields[0].decode(errors="replace")
                logger.warning("a webhook that cannot be read was removed", extra={"webhook": event_id, "model": slot})
                self._removed(slot, event_id)
        return found

    def webhook_delivered(self, webhook: Webhook) -> bool:
        """See WebhookEnd.webhook_delivered."""
        return self._removed(webhook.slot, webhook.id)

    def postpone_webhook(self, webhook: Webhook, delay_ms: int, error: str, *, counts: bool = True) -> bool:
        """See WebhookEnd.postpone_webhook."""
        tries, failures = webhook.tries - (not counts), webhook.failures + counts
        return self._written(webhook, "later", tries, failures, delay_ms, error)

    def give_up_webhook(self, webhook: Webhook, error: str) -> bool:
        """See WebhookEnd.give_up_webhook."""
        return self._written(webhook, "dead", webhook.tries, webhook.failures, 0, error)

    def replay_webhook(self, slot: str, event_id: str) -> bool:
        """See WebhookEnd.replay_webhook."""
        return bool(self._run(_call("replay_webhook", [*webhook_keys(slot), webhook_key(slot, event_id)], [event_id])))

    def list_webhooks(self, slot: str, *, dead: bool, after: int = 0, count: int = 100) -> list[Webhook]:
        """See WebhookEnd.list_webhooks."""
        waiting, due, gone = webhook_keys(slot)
        call = _call("list_webhooks", [gone if dead else waiting, due], [after, count, webhook_key(slot, "")])
        return [found for fields in self._run(call) if (found := _webhook(slot, fields)) is not None]

    def count_webhooks(self, slot: str) -> WebhookCounts:
        """See WebhookEnd.count_webhooks."""
        waiting, _, dead = webhook_keys(slot)
        waiting_count, dead_count, age_ms = self._run(_call("count_webhooks", [waiting, dead], []))
        return WebhookCounts(waiting_count, dead_count, age_ms / 1000)

    def _written(self, webhook: Webhook, outcome: str, tries: int, failures: int, delay_ms: int, error: str) -> bool:
        args = (webhook.tries, outcome, tries, failures, delay_ms, error[:_MOST_ERROR])
        return self._settled(webhook.slot, webhook.id, args)

    def _removed(self, slot: str, event_id: str) -> bool:
        return self._settled(slot, event_id, (0, "delivered", 0, 0, 0, ""))

    def _settled(self, slot: str, event_id: str, args: Sequence[str | int]) -> bool:
        keys = [*webhook_keys(slot), webhook_key(slot, event_id)]
        return bool(
            self._run(_call("settle_webhook", keys, [event_id, *args, DEAD_WEBHOOKS_CAP, webhook_key(slot, "")]))
        )


def _call(name: str, keys: Sequence[str], args: Sequence[Any]) -> scripts.Call:
    return ["EVALSHA", scripts.sha_of(name), len(keys), *keys, *args]


def _webhook(slot: str, fields: Sequence[Any]) -> Webhook | None:
    """None for one that another program has changed."""
    if None in fields:
        return None
    event_id, local, state, ended, target, tries, failures, *more = fields
    if tries == _MOST_TRIES:
        # No further try can be counted: the next deliverer removes it.
        return None
    error, due = more or (b"", b"")
    try:
        return Webhook(
            slot,
            event_id.decode(),
            f"{slot}.{local.decode()}",
            State(state.decode()),
            int(ended),
            target.decode(errors="replace"),
            int(tries),
            max(0, int(failures)),
            error.decode(errors="replace"),
            int(float(due or 0)),
        )
    except ValueError:
        return None
