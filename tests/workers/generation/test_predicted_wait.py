"""The predicted wait for a seat: by what is ahead, and by measured times of steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.workers.generation.engine import Engine
from penstock.workers.generation.engine_times import EngineTimes
from penstock.workers.generation.predicted_wait import (
    EngineLoad,
    TextAhead,
    predicted_wait_s,
    queue_share,
    steps_to_seat,
)
from penstock.workers.generation.request import GenerationRequest
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of

STEP_S = 0.5
"""Of a clock that the test moves on: no step takes so long."""


def load(
    running: Sequence[TextAhead], waiting: Sequence[TextAhead] = (), *, seats: int = 2, pages: int = 100
) -> EngineLoad:
    return EngineLoad(running, waiting, seats, pages, tokens_per_step=100)


@pytest.mark.parametrize(
    ("ahead", "steps"),
    [
        (load([]), 0),
        (load([TextAhead(1, 9, 1)]), 0),
        (load([TextAhead(1, 9, 1), TextAhead(1, 4, 1)]), 4),
        # Its prompt takes two more steps.
        (load([TextAhead(1, 9, 1), TextAhead(201, 4, 1)]), 6),
        # The first seat goes to the text that waits, which ends after the other.
        (load([TextAhead(1, 9, 1), TextAhead(1, 4, 1)], [TextAhead(150, 19, 1)]), 9),
        # A seat is free, and no page is before the text with the pages ends.
        (load([TextAhead(1, 7, 100)]), 7),
        # The text that waits needs the pages of both.
        (load([TextAhead(1, 3, 50), TextAhead(1, 9, 50)], [TextAhead(1, 5, 100)]), 14),
    ],
    ids=["idle", "free seat", "full", "prompt", "behind one", "no page", "large text"],
)
def test_a_seat_is_free_after_so_many_steps(ahead: EngineLoad, steps: int):
    """Seats and pages come back when the texts ahead end, first the shortest."""
    assert steps_to_seat(ahead) == steps


def test_more_work_never_shortens_the_wait():
    """Another text ahead, a longer one or a seat less: the prediction stays or grows."""
    chosen = random.Random(5)

    def text() -> TextAhead:
        return TextAhead(chosen.randrange(1, 300), chosen.randrange(1, 60), chosen.randrange(1, 20))

    for _ in range(300):
        running, waiting = [text() for _ in range(4)], [text() for _ in range(chosen.randrange(5))]
        plain = steps_to_seat(load(running, waiting, seats=4))
        assert plain <= steps_to_seat(load(running, [*waiting, text()], seats=4))
        longer = [TextAhead(each.prefill, each.left + 5, each.pages) for each in waiting]
        assert plain <= steps_to_seat(load(running, longer, seats=4))


def test_jobs_of_the_queue_wait_too():
    """In proportion to what runs here; unknown lengths make the wait unknown, and a free seat needs none."""
    assert queue_share(0, running_here=0, running=0, seats=4) == 0
    assert queue_share(30, running_here=4, running=12, seats=4) == 10
    # An idle worker will take what its seats can.
    assert queue_share(30, running_here=0, running=8, seats=4) == 15
    assert predicted_wait_s(1.0, 3.0, seats=4, queued=8) == 7.0
    assert predicted_wait_s(0.0, None, seats=4, queued=0) == 0.0
    assert predicted_wait_s(0.0, None, seats=4, queued=1) is None
    assert predicted_wait_s(None, 3.0, seats=4, queued=0) is None


class Played:
    """An engine whose steps take STEP_S each, by the clock of the test."""

    def __init__(self) -> None:
        self.engine: Engine = open_engine(decoder("Llama"), kv_cache_mb=4, max_num_seqs=2, num_speculative_tokens=0)
        self.times = EngineTimes(self.engine.config.scheduler)
        self.open: list[GenerationRequest] = []
        self.now = 0.0

    def add(self, name: str) -> None:
        (prompt,) = prompts_of(5)
        request = self.engine.prepare(name, prompt, GREEDY)
        self.engine.admit(request)
        self.open.append(request)

    def step(self) -> None:
        self.engine.advance()
        self.now += STEP_S
        self.times.stepped(STEP_S)
        for ended in [each for each in self.open if each.finish_reason is not None]:
            self.open.remove(ended)
            self.times.ended(ended)
        self.times.measure(self.engine.scheduler, self.open, self.now)

    def steps_until_seated(self, name: str) -> int:
        for steps in range(1, 100):
            self.step()
            if any(one.request_id == name for one in self.engine.scheduler.running):
                return steps
        raise AssertionError("no seat")


@pytest.mark.parametrize("waiting", [0, 1, 3])
def test_an_engine_keeps_its_prediction(waiting: int):
    """All texts write their 16 tokens: the text that comes last has its seat after the predicted steps."""
    played = Played()
    for number in range(2 + waiting):
        played.add(str(number))
    played.step()
    seat_s = played.times.measured.seat_s
    assert seat_s is not None
    played.add("late")
    # The step that ends a text is followed by the one that seats the next.
    assert played.steps_until_seated("late") == seat_s / STEP_S + 1


def test_an_idle_engine_has_a_seat_at_once():
    """The time of a step and of a usual text are known from what ended, and so is that of all steps."""
    played = Played()
    played.add("first")
    while played.open:
        played.step()
    measured = played.times.measured
    assert (measured.seat_s, measured.step_s, measured.text_s) == (0.0, STEP_S, STEP_S * GREEDY.max_tokens)
    assert played.times.compute_s == pytest.approx(played.now)


def test_lengths_of_late_are_expected_of_later_texts():
    """A text that ended after half of its max_tokens halves the prediction."""
    played = Played()
    short = played.engine.prepare("short", prompts_of(5)[0], GREEDY)
    played.engine.admit(short)
    for _ in range(GREEDY.max_tokens // 2):
        played.engine.advance()
    played.engine.abort("short")
    short.finish_reason = "stop"
    played.times.ended(short)
    for name in ("one", "two"):
        played.add(name)
    played.step()
    half = GREEDY.max_tokens // 2
    assert played.times.measured.text_s == STEP_S * half
    # Each of them has written one token.
    assert played.times.measured.seat_s == STEP_S * (half - 1)


def test_aborted_texts_say_nothing_about_lengths():
    """A cancelled text would make the others look short."""
    played = Played()
    played.add("cancelled")
    played.step()
    played.engine.abort("cancelled")
    played.step()
    assert played.times.measured.text_s is None


def test_before_any_step_a_full_engine_knows_no_wait():
    """A figure that was not measured is none."""
    played = Played()
    for name in ("one", "two", "three"):
        played.add(name)
    played.engine.scheduler.plan()
    played.times.measure(played.engine.scheduler, played.open, 0.0)
    assert played.times.measured.seat_s is None
