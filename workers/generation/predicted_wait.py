"""How long a text that comes now waits for a seat, by what is ahead of it. Pure: counts, and the time of a step.

    texts that run and wait -> steps until one more has a seat and a page -> times the measured seconds of a step
    jobs in the broker      -> those that this worker will take           -> times the steps of a usual text, by seats

What it assumes:

- A step takes as long as the steps of late, whether it computes prompts or not.
- A text writes that share of its max_tokens which the texts of late have written.
- The new text comes behind all others: a more urgent one waits less, and later ones that are more urgent do not come.
- A text holds the pages of its end from its beginning on, and shares none.
- Guesses save no steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EngineLoad", "TextAhead", "predicted_wait_s", "queue_share", "steps_to_seat"]


@dataclass(frozen=True, slots=True)
class TextAhead:
    """prefill: tokens to compute for the next one, at least one. left: tokens to be written. pages: at its end."""

    prefill: int
    left: int
    pages: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do, and what it has for that. waiting: in the order in which they are served."""

    running: Sequence[TextAhead]
    waiting: Sequence[TextAhead]
    seats: int
    pages: int
    tokens_per_step: int


def steps_to_seat(load: EngineLoad) -> int:
    """Steps until one more text has a seat and a page, behind those that wait.

    >>> running = [TextAhead(1, 10, 2), TextAhead(1, 4, 2)]
    >>> steps_to_seat(EngineLoad(running, [], seats=3, pages=100, tokens_per_step=512))
    0
    >>> steps_to_seat(EngineLoad(running, [TextAhead(512, 20, 2)], seats=2, pages=100, tokens_per_step=512))
    10
    """
    free = load.pages - sum(each.pages for each in load.running)
    ends = [(_steps(each, load), each.pages) for each in load.running]
    heapq.heapify(ends)
    now = 0
    for text in (*load.waiting, TextAhead(1, 1, 1)):
        while ends and (len(ends) >= load.seats or free < text.pages):
            now, pages = heapq.heappop(ends)
            free += pages
        free -= text.pages
        heapq.heappush(ends, (now + _steps(text, load), text.pages))
    return now


def predicted_wait_s(seat_s: float | None, text_s: float | None, seats: int, queued: float) -> float | None:
    """seat_s: until a seat is free in the engine. text_s: that a usual text holds a seat. queued: jobs before it that
    no engine has yet. None: not known, because no step was measured.

    >>> predicted_wait_s(2.0, 8.0, seats=4, queued=10)
    22.0
    """
    if seat_s is None or (queued and text_s is None):
        return None
    return seat_s + queued * (text_s or 0.0) / seats


def queue_share(queued: int, running_here: int, running: int, seats: int) -> float:
    """How many of the queued jobs this worker will take: in proportion to the jobs that run here and everywhere.

    >>> queue_share(30, running_here=4, running=12, seats=4)
    10.0
    """
    here = running_here or seats
    return queued * here / max(here, running)


def _steps(text: TextAhead, load: EngineLoad) -> int:
    # The step that computes the last token of a prompt writes the first one of the text.
    return math.ceil(text.prefill / load.tokens_per_step) - 1 + text.left
