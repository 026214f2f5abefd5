"""Times and lengths of late of one engine: the runner's thread notes them, the thread that reports takes them.

step, first token, later tokens, end of a text --> EngineTimes --> times of tokens since the last report
                                                               |-> seconds until a seat is free: predicted_wait
                                                               '-> requests for which the pages have room
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.workers.generation.config import SchedulerConfig
from penstock.workers.generation.pages import PagePool
from penstock.workers.generation.predicted_wait import EngineLoad, TextAhead, steps_to_seat
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.scheduler import Scheduler, Sequence
from penstock.workers.generation.text_group import is_finished, members

__all__ = ["EngineTimes", "Measured"]

_MOST_TIMES: Final = 4096
"""That wait to be reported."""
_STEPS: Final = 64
_TEXTS: Final = 64
"""Of late: what is older says nothing about the next ones."""
_MEASURE_S: Final = 0.25
"""A report comes once a second."""


@dataclass(frozen=True, slots=True)
class Measured:
    """step_s: the mean of late. seat_s, text_s: see predicted_wait. None: not known yet."""

    step_s: float | None = None
    seat_s: float | None = 0.0
    text_s: float | None = None


class EngineTimes:
    """For one thread that notes, and one that takes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.measured = Measured()
        """At most a quarter of a second old while the engine computes."""
        self.compute_s = 0.0
        """Of all steps."""
        self._config: Final = config
        self._first_token_s: Final[deque[float]] = deque(maxlen=_MOST_TIMES)
        self._inter_token_s: Final[deque[float]] = deque(maxlen=_MOST_TIMES)
        self._step_s: Final[deque[float]] = deque(maxlen=_STEPS)
        self._text_steps: Final[deque[int]] = deque(maxlen=_TEXTS)
        self._written: Final[deque[float]] = deque(maxlen=_TEXTS)
        """Of each text that has ended: the share of its max_tokens."""
        self._usual_pages = 0.0
        """That a request of late took, without those of the prefix cache; 0: none has run yet."""
        self._measure_at = 0.0

    def stepped(self, seconds: float) -> None:
        """A step has ended."""
        self._step_s.append(seconds)
        self.compute_s += seconds

    def first_token(self, seconds: float) -> None:
        """The first token of a text was handed over so long after its beginning."""
        self._first_token_s.append(seconds)

    def later_tokens(self, seconds: float, number: int) -> None:
        """So many more tokens were handed over together, so long after those before."""
        self._inter_token_s.append(seconds / number)

    def ended(self, request: GenerationRequest) -> None:
        """A request has ended. An aborted one says nothing about the lengths of texts."""
        if request.finish_reason not in ("stop", "length"):
            return
        for text in members(request):
            prefill = math.ceil(text.sequence.num_prompt / self._config.max_num_batched_tokens)
            self._text_steps.append(prefill - 1 + text.num_generated)
            self._written.append(text.num_generated / text.params.max_tokens)

    def measure(self, scheduler: Scheduler, requests: Iterable[GenerationRequest], now: float) -> None:
        """Predicts again, where the last prediction is old, or nothing is left to compute. For the runner's thread."""
        if now < self._measure_at and scheduler.has_work:
            return
        self._measure_at = now + _MEASURE_S
        step_s = _mean(self._step_s)
        share = _mean(self._written)
        steps = steps_to_seat(_load(scheduler, requests, 1.0 if share is None else share))
        text_steps = _mean(self._text_steps)
        self.measured = Measured(
            step_s,
            0.0 if not steps else None if step_s is None else steps * step_s,
            None if step_s is None or text_steps is None else text_steps * step_s,
        )

    def room(self, pages: PagePool, requests: Iterable[GenerationRequest], most_tokens: int) -> int:
        """For how many requests the pages have room at a time, these included; at least one.

        Pages that requests share count once. most_tokens: of a request, for an engine that has run none yet.
        """
        share = _mean(self._written) or 1.0
        number, missing, needs = 0, 0, list[int]()
        for request in requests:
            if is_finished(request):
                continue
            number += 1
            texts = [text for text in members(request) if text.finish_reason is None]
            ends = [pages.pages_for(text.sequence.num_prompt + _length(text, share) - 1) for text in texts]
            missing += sum(max(0, end - len(text.sequence.pages)) for text, end in zip(texts, ends, strict=True))
            if texts[0].sequence.pages:
                cached = sum(text.sequence.num_cached for text in texts) // pages.page_size
                needs.append(max(1, sum(ends) - cached))
        if needs:
            self._usual_pages = sum(needs) / len(needs)
        usual = self._usual_pages or pages.pages_for(most_tokens)
        return max(1, number + math.floor((pages.num_available - missing) / usual))

    def take(self) -> tuple[list[float], list[float]]:
        """Seconds to first tokens, and between later ones, since the last call. For the thread that reports."""
        first, between = self._first_token_s, self._inter_token_s
        return [first.popleft() for _ in range(len(first))], [between.popleft() for _ in range(len(between))]


def _load(scheduler: Scheduler, requests: Iterable[GenerationRequest], share: float) -> EngineLoad:
    pages = scheduler.pages
    texts = {text.request_id: text for request in requests for text in members(request)}

    def ahead(sequence: Sequence) -> TextAhead:
        text = texts[sequence.request_id]
        written = text.num_generated
        length = _length(text, share)
        return TextAhead(sequence.num_left, length - written, pages.pages_for(sequence.num_prompt + length - 1))

    return EngineLoad(
        [ahead(each) for each in scheduler.running if each.request_id in texts],
        [ahead(each) for each in scheduler.waiting if each.request_id in texts],
        scheduler.config.max_num_seqs,
        pages.num_usable,
        scheduler.config.max_num_batched_tokens,
    )


def _length(text: GenerationRequest, share: float) -> int:
    """Tokens of the text at its end, if it writes this share of its most."""
    most = text.params.max_tokens
    # A text that is longer than most writes one more token at least.
    return min(most, max(text.num_generated + 1, math.ceil(share * most)))


def _mean(values: deque[float] | deque[int]) -> float | None:
    return sum(values) / len(values) if values else None
