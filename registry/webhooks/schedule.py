"""What follows a try of a webhook: delivered, another try later, or dead. Pure: randomness and time are arguments.

try      1    2      3      4       5     6     7     8      9      10     11
pause      5 s  1 min  5 min  30 min  2 h   5 h   10 h  14 h   20 h   24 h    then dead, after 3 to 4 days
"""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

__all__ = ["PAUSES_S", "Answer", "Delivered", "Failed", "pause_s", "retry_after_s", "verdict"]

PAUSES_S: Final = (5, 60, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""The pauses after the first, second, ... failed try."""
_JITTER: Final = 0.2
"""A pause is longer by up to this share of it, so that webhooks that failed together do not return together."""
_LONGEST_RETRY_AFTER_S: Final = 86_400
_BUSY: Final = (429, 503)
_GONE: Final = 410


class Answer(NamedTuple):
    """What a receiver answered: the HTTP status, and its Retry-After header; empty without one."""

    status: int
    retry_after: str = ""


class Delivered(NamedTuple):
    """The receiver took the event."""


class Failed(NamedTuple):
    """A try without success, in words. is_final: no other try will be any better. least_pause_s: the receiver asked
    for this pause."""

    error: str
    is_final: bool = False
    least_pause_s: float = 0.0


def verdict(answer: Answer, now_s: float) -> Delivered | Failed:
    """What an answer means. now_s: unix seconds, for a Retry-After that is a date."""
    status = answer.status
    if 200 <= status < 300:
        return Delivered()
    if status == _GONE:
        return Failed("the receiver answered 410: gone", is_final=True)
    if 300 <= status < 400:
        return Failed(f"the receiver answered {status}: redirects are not followed")
    pause = retry_after_s(answer.retry_after, now_s) if status in _BUSY else 0.0
    return Failed(f"the receiver answered {status}", least_pause_s=pause)


def pause_s(failures: int, jitter: float, least_s: float = 0.0) -> float | None:
    """The pause in seconds after so many failed tries; None: there is no further one.

    A try that ended with its deliverer is none of them. jitter: in [0, 1). least_s: the pause that the receiver asked
    for.

    >>> [pause_s(failures, jitter=0) for failures in (1, 2, 10, 11)]
    [5.0, 60.0, 86400.0, None]
    >>> pause_s(1, jitter=0.5, least_s=120)
    132.0
    """
    if failures > len(PAUSES_S):
        return None
    return max(PAUSES_S[failures - 1], least_s) * (1 + _JITTER * jitter)


def retry_after_s(text: str, now_s: float) -> float:
    """The seconds of a Retry-After header, at most a day; 0 for an unreadable one.

    >>> retry_after_s("120", 0), retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 10), retry_after_s("soon", 0)
    (120.0, 50.0, 0.0)
    """
    if text.isascii() and text.isdecimal():
        return float(min(int(text[:9]), _LONGEST_RETRY_AFTER_S))
    try:
        at = parsedate_to_datetime(text)
        if at.tzinfo is None:
            at = at.replace(tzinfo=UTC)
        wait_s = at.timestamp() - datetime.fromtimestamp(now_s, UTC).timestamp()
    except (ValueError, OverflowError, OSError, TypeError):
        return 0.0
    return min(max(0.0, wait_s), float(_LONGEST_RETRY_AFTER_S))
