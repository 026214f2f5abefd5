"""The webhook of an ended job as its receiver gets it: OpenAI's event shape. registry/webhooks/signing.py signs it."""

from __future__ import annotations

from typing import Any, Final

from penstock.registry.broker.base import State
from penstock.registry.broker.webhooks import Webhook

__all__ = ["event_of"]

_STATUSES: Final = {
    State.COMPLETED: "completed",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.EXPIRED: "expired",
    State.DEAD: "dead",
}


def event_of(webhook: Webhook) -> dict[str, Any]:
    """The event, ready for JSON. It names the job and its end, and holds no inputs, outputs or error."""
    status = _STATUSES[webhook.state]
    return {
        "id": webhook.id,
        "object": "event",
        "type": f"job.{status}",
        "created_at": webhook.ended_ms // 1000,
        "data": {"id": webhook.job_id, "model": webhook.slot, "status": status},
    }
