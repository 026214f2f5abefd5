"""Calls that come one by one are let through in groups, so that their jobs travel to the broker together.

    calls of a model -> pass_through: at once for a call that runs alone; else when all running calls wait here, or
                        after a moment
                     -> jobs in one round trip

grpc.aio hands over one call in a turn of the event loop, where HTTP hands over all that have come. Without groups each
job travels alone, which costs the gateway, the broker and the worker more for each, and keeps further calls from being
taken. A busy process then works on few calls at a time while many wait to be taken: their number does not tell.
"""

from __future__ import annotations

import asyncio
from typing import Final

__all__ = ["Turn", "Turns"]

_LONGEST_S: Final = 0.006
"""Against the tens of milliseconds that a call takes while many wait to be taken."""


class Turns:
    """The calls of one process that submit jobs. Those of a fast model do not wait for those of a slow one."""

    def __init__(self) -> None:
        self._by_model: dict[str, Turn] = {}

    def begin(self, model: str) -> Turn:
        """A call of this model begins. Its `end` must follow."""
        turn = self._by_model.get(model)
        if turn is None:
            turn = self._by_model[model] = Turn()
        turn.running += 1
        return turn

    def end(self, model: str) -> None:
        """A call of this model has ended."""
        turn = self._by_model[model]
        turn.leave()
        if not turn.running:
            # Callers name models: what they have named must not stay.
            del self._by_model[model]


class Turn:
    """The calls of one model. running: those that have begun and not ended."""

    def __init__(self) -> None:
        self.running = 0
        self._group: asyncio.Future[None] | None = None
        self._size = 0

    def leave(self) -> None:
        """A running call has ended. If it was the last one whose job is out, those that wait need not wait longer."""
        self.running -= 1
        if self._group is not None and self._size >= self.running:
            self._open(self._group)

    async def pass_through(self) -> None:
        """Returns at once for a call that runs alone; else with the group that this call belongs to."""
        if self.running <= 1:
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
