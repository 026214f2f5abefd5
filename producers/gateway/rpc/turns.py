"""Calls that come one by one are let through in groups, so that their jobs travel to the broker together.

    calls -> pass_through: at once while few run; else when all running calls wait here, or after a moment
          -> jobs in one round trip

grpc.aio hands over one call in a turn of the event loop, where HTTP hands over all that have come. Without groups each
job travels alone, which costs the gateway and the broker more for each, and keeps further calls from being taken.
"""

from __future__ import annotations

import asyncio
from typing import Final

__all__ = ["FEW", "Turns"]

FEW: Final = 8
"""Fewer running calls wait for nobody."""
_LONGEST_S: Final = 0.003
"""Against the tens of milliseconds that a call takes when many run."""


class Turns:
    """The calls of one process that begin. running: those that have begun and not ended."""

    def __init__(self) -> None:
        self.running = 0
        self._group: asyncio.Future[None] | None = None
        self._size = 0

    async def pass_through(self) -> None:
        """Returns at once while few calls run; else with the group that this call belongs to."""
        if self.running < FEW:
            return
        if self._group is None:
            loop = asyncio.get_running_loop()
            self._group, self._size = loop.create_future(), 0
            timer = loop.call_later(_LONGEST_S, self._open, self._group)
            self._group.add_done_callback(lambda _: timer.cancel())
        group = self._group
        self._size += 1
        if self._size >= self.running:
            self._open(group)
        else:
            # A call that is cancelled leaves the others their group.
            await asyncio.shield(group)

    def _open(self, group: asyncio.Future[None]) -> None:
        if not group.done():
            group.set_result(None)
        if self._group is group:
            self._group = None
