"""The webhooks of the broker in memory: the rules of webhooks.py by the clock that is passed in."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from msgspec import structs

from penstock.registry.broker.base import State
from penstock.registry.broker.webhooks import DEAD_WEBHOOKS_CAP, Webhook, WebhookCounts
from penstock.registry.queues import slot_of

__all__ = ["MemoryWebhookEnd", "MemoryWebhooks"]


class MemoryWebhooks:
    """Waiting and dead webhooks by slot and id. The caller holds the broker's lock during every method."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms: Final = now_ms
        self.waiting: Final[defaultdict[str, dict[str, Webhook]]] = defaultdict(dict)
        self.dead: Final[defaultdict[str, dict[str, Webhook]]] = defaultdict(dict)

    def __deepcopy__(self, memo: dict[int, object]) -> MemoryWebhooks:
        """A copy on the same clock."""
        copied = MemoryWebhooks(self._now_ms)
        copied.waiting.update(copy.deepcopy(self.waiting, memo))
        copied.dead.update(copy.deepcopy(self.dead, memo))
        return copied

    def add(self, job_id: str, state: State, target: str) -> None:
        """Queue the webhook of a job that has ended, due now."""
        slot, now_ms = slot_of(job_id), int(self._now_ms())
        event_id = f"evt_{job_id.rpartition('.')[2]}_{now_ms}"
        self.waiting[slot][event_id] = Webhook(slot, event_id, job_id, state, now_ms, target, due_ms=now_ms)

    def take(self, slot: str, count: int, lease_ms: int) -> list[Webhook]:
        """See WebhookEnd.take_webhooks."""
        now_ms = int(self._now_ms())
        due = sorted((each.due_ms, each.id) for each in self.waiting[slot].values() if each.due_ms <= now_ms)
        taken = []
        for _, event_id in due[:count]:
            webhook = self.waiting[slot][event_id]
            webhook = structs.replace(webhook, tries=webhook.tries + 1, due_ms=now_ms + lease_ms)
            self.waiting[slot][event_id] = webhook
            taken.append(structs.replace(webhook, error="", due_ms=0))
        return taken

    def delivered(self, webhook: Webhook) -> bool:
        """See WebhookEnd.webhook_delivered."""
        found = [kept[webhook.slot].pop(webhook.id, None) for kept in (self.waiting, self.dead)]
        return any(each is not None for each in found)

    def postpone(self, webhook: Webhook, delay_ms: int, error: str, counts: bool) -> bool:
        """See WebhookEnd.postpone_webhook."""
        if (current := self._current(webhook)) is None:
            return False
        self.waiting[webhook.slot][webhook.id] = structs.replace(
            current,
            tries=current.tries - (not counts),
            failures=current.failures + counts,
            error=error,
            due_ms=int(self._now_ms()) + delay_ms,
        )
        return True

    def give_up(self, webhook: Webhook, error: str) -> bool:
        """See WebhookEnd.give_up_webhook."""
        if (current := self._current(webhook)) is None:
            return False
        dead = self.dead[webhook.slot]
        del self.waiting[webhook.slot][webhook.id]
        dead[webhook.id] = structs.replace(current, error=error, due_ms=0)
        while len(dead) > DEAD_WEBHOOKS_CAP:
            del dead[next(iter(dead))]
        return True

    def replay(self, slot: str, event_id: str) -> bool:
        """See WebhookEnd.replay_webhook."""
        webhook = self.dead[slot].pop(event_id, None)
        if webhook is None:
            return False
        self.waiting[slot][event_id] = structs.replace(webhook, tries=0, failures=0, due_ms=int(self._now_ms()))
        return True

    def counts(self, slot: str) -> WebhookCounts:
        """See WebhookEnd.count_webhooks."""
        waiting = self.waiting[slot].values()
        oldest_ms = min((each.ended_ms for each in waiting), default=int(self._now_ms()))
        return WebhookCounts(len(waiting), len(self.dead[slot]), max(0.0, self._now_ms() - oldest_ms) / 1000)

    def _current(self, webhook: Webhook) -> Webhook | None:
        """The webhook as it waits, unless another try has begun."""
        current = self.waiting[webhook.slot].get(webhook.id)
        return current if current is not None and current.tries == webhook.tries else None


class _HasWebhooks(Protocol):
    webhooks: MemoryWebhooks


class MemoryWebhookEnd:
    """WebhookEnd of a connection to a broker in memory."""

    _state: _HasWebhooks
    _lock: AbstractContextManager[bool]

    def webhook_slots(self) -> Sequence[str]:
        """See WebhookEnd.webhook_slots."""
        with self._lock:
            webhooks = self._state.webhooks
            return sorted(slot for slot in {*webhooks.waiting, *webhooks.dead})

    def take_webhooks(self, slot: str, count: int, lease_ms: int) -> list[Webhook]:
        """See WebhookEnd.take_webhooks."""
        with self._lock:
            return self._state.webhooks.take(slot, count, lease_ms)

    def webhook_delivered(self, webhook: Webhook) -> bool:
        """See WebhookEnd.webhook_delivered."""
        with self._lock:
            return self._state.webhooks.delivered(webhook)

    def postpone_webhook(self, webhook: Webhook, delay_ms: int, error: str, *, counts: bool = True) -> bool:
        """See WebhookEnd.postpone_webhook."""
        with self._lock:
            return self._state.webhooks.postpone(webhook, delay_ms, error, counts)

    def give_up_webhook(self, webhook: Webhook, error: str) -> bool:
        """See WebhookEnd.give_up_webhook."""
        with self._lock:
            return self._state.webhooks.give_up(webhook, error)

    def replay_webhook(self, slot: str, event_id: str) -> bool:
        """See WebhookEnd.replay_webhook."""
        with self._lock:
            return self._state.webhooks.replay(slot, event_id)

    def list_webhooks(self, slot: str, *, dead: bool, after: int = 0, count: int = 100) -> list[Webhook]:
        """See WebhookEnd.list_webhooks."""
        with self._lock:
            webhooks = self._state.webhooks
            kept = webhooks.dead[slot] if dead else webhooks.waiting[slot]
            found = kept.values() if dead else sorted(kept.values(), key=lambda each: (each.ended_ms, each.id))
            return list(found)[after : after + count]

    def count_webhooks(self, slot: str) -> WebhookCounts:
        """See WebhookEnd.count_webhooks."""
        with self._lock:
            return self._state.webhooks.counts(slot)
