"""One claimed job in a worker's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.registry.broker.base import Delivery, Held
from penstock.registry.envelope import JobHeader
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    from penstock.workers.versions.version import ServedVersion

__all__ = ["ClaimedJob"]


class ClaimedJob(msgspec.Struct, eq=False):
    """A job that was opened and verified. `claimed` is monotonic seconds, `queue_ms` by the broker's clock."""

    delivery: Delivery
    header: JobHeader
    inputs: dict[str, Array]
    rows: int
    claimed: float
    queue_ms: float
    expires_ms: int
    """When it is too late to begin, by the broker's clock."""
    version: ServedVersion | None = None
    """What answers it, from its admission on."""
    digest: bytes = b""
    """What equal jobs share; empty where each runs by itself."""
    followers: list[ClaimedJob] | None = None
    """Equal jobs that get this one's answer."""
    tries: int = 1
    """Forwards that this worker has given it or is giving it, as its retry policy allows."""
    takes_room: bool = False
    """Whether it counts against what its model may have in memory; a job that follows or rests does not."""
    is_cancelled: bool = False
    is_lost: bool = False

    @property
    def label(self) -> str:
        """The label of the version that answers it; empty while that is open."""
        return self.version.label if self.version is not None else ""

    @property
    def is_suspect(self) -> bool:
        """Whether a process died while it ran: it must run alone."""
        return self.delivery.crashes > 0

    @property
    def held(self) -> Held:
        """The job as the broker knows it."""
        delivery = self.delivery
        return Held(delivery.slot, delivery.priority, delivery.entry_id, self.header.id)
