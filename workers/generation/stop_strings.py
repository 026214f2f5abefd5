"""Stop strings in a text that grows: where it ends, and how much of its end may still become one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["first_stop", "held_back"]


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """(place, stop string) of the first one that begins at `start` or behind it; None: there is none."""
    return min(((place, stop) for stop in stops if (place := text.find(stop, start)) >= 0), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text that a stop string begins with."""
    most = min(max(map(len, stops), default=1) - 1, len(text))
    for length in range(most, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
