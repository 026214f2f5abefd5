"""Stop strings in a text that grows: where it ends, and how much of its end may still become one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["first_stop", "held_back"]


def first_stop(text: str, stops: Sequence[str], start: int = 0, behind: int = 0) -> tuple[int, str] | None:
    """(place, stop string) of the first one that begins at `start` or later, and ends behind a place; None: there is
    none."""
    found = [(text.find(stop, max(start, behind - len(stop) + 1)), stop) for stop in stops]
    return min((each for each in found if each[0] >= 0), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text that a stop string begins with."""
    most = min(max(map(len, stops), default=1) - 1, len(text))
    for length in range(most, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
