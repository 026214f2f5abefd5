"""One claimed job in a worker's memory."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from penstock.registry.broker.base import Delivery, Held
from penstock.registry.envelope import JobHeader
from penstock.registry.queues import lane_key
from penstock.registry.tensors import Array

__all__ = ["ClaimedJob", "Route", "route_of"]

Route: TypeAlias = Literal["queue", "celery"]
"""The way by which a job came: from a client through the queue, or from Celery's `send_task`."""


def route_of(model: str, reply: str) -> Route:
    """The way by which a job with this reply address came."""
    return "celery" if reply == lane_key(model) else "queue"


class ClaimedJob(msgspec.Struct, eq=False):
    """A job that was opened and verified. It knows no model version: the part that holds the job knows that.

    `claimed` is monotonic seconds, `queue_ms` the time in the queue by the broker's clock.
    """

    delivery: Delivery
    header: JobHeader
    inputs: dict[str, Array]
    rows: int
    claimed: float
    queue_ms: float
    expires_ms: int
    """After this time, by the broker's clock, the job must not begin."""
    digest: bytes = b""
    """Equal jobs have the same digest. Empty: the job shares no answer."""
    tries: int = 1
    """Forwards that this worker has given the job or is giving it, as its retry policy allows."""
    takes_room: bool = False
    """Whether the job counts against the capacity of its version. A follower and a delayed job do not."""
    is_cancelled: bool = False
    is_lost: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether a process died while the job ran: it must run alone."""
        return self.delivery.crashes > 0

    @property
    def route(self) -> Route:
        """The way by which the job came."""
        return route_of(self.header.model, self.header.reply)

    @property
    def held(self) -> Held:
        """The job as the broker knows it."""
        delivery = self.delivery
        return Held(delivery.slot, delivery.priority, delivery.entry_id, self.header.id)

    def mark(self, lost: frozenset[Held], cancelled: frozenset[str]) -> bool:
        """Note that the lease of the job was lost, or that the job was cancelled; returns whether it must not run."""
        self.is_lost = self.is_lost or self.held in lost
        self.is_cancelled = self.is_cancelled or self.header.id in cancelled
        return self.is_lost or self.is_cancelled
