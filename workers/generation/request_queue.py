"""Waiting requests, by priority and then by arrival. Pure: the step's number is the clock.

A request rises by one priority each time `ageing_steps` steps have passed since it came. Inside of one priority the
first is the oldest, so only the heads of the priorities are compared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["PriorityRequestQueue", "Prioritised", "level_at", "order_at"]


class Prioritised(Protocol):
    """priority: lower comes first. arrival: a serial number. since_step: the step at which it came."""

    @property
    def priority(self) -> int: ...
    @property
    def arrival(self) -> int: ...
    @property
    def since_step(self) -> int: ...


Request = TypeVar("Request", bound=Prioritised)


def level_at(request: Prioritised, step: int, ageing_steps: int) -> int:
    """The priority with the request's age in it; 0 is the highest that age gives."""
    aged = request.priority - (step - request.since_step) // ageing_steps
    return max(aged, min(request.priority, 0))


def order_at(request: Prioritised, step: int, ageing_steps: int) -> tuple[int, int]:
    """Requests are served in the order of this."""
    return level_at(request, step, ageing_steps), request.arrival


class PriorityRequestQueue(Generic[Request]):
    """First the lowest number of priority, and inside of one priority first come, first served.

    A request that comes back keeps its place: `arrival` orders, not the time of the push.
    """

    def __init__(self, ageing_steps: int) -> None:
        self._ageing_steps: Final = ageing_steps
        self._levels: dict[int, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Request]:
        for level in sorted(self._levels):
            yield from self._levels[level]

    def push(self, request: Request) -> None:
        """Adds a request at its place."""
        insort(self._levels.setdefault(request.priority, []), request, key=_arrival)

    def peek(self, step: int) -> Request | None:
        """The request that is next; None where none waits."""
        heads = (level[0] for level in self._levels.values() if level)
        return min(heads, key=lambda head: order_at(head, step, self._ageing_steps), default=None)

    def pop(self, step: int) -> Request:
        """Takes the next request. Raises IndexError where none waits."""
        if (head := self.peek(step)) is None:
            raise IndexError("No request waits")
        self._levels[head.priority].pop(0)
        return head

    def remove(self, request: Request) -> None:
        """Takes this request out. It must wait here."""
        level = self._levels[request.priority]
        del level[bisect_left(level, request.arrival, key=_arrival)]


def _arrival(request: Prioritised) -> int:
    return request.arrival
