"""For how many requests the pages of an engine have room: a worker claims no more jobs than that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.backend import Wish
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.engine_times import EngineTimes
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.runner import EngineRunner
from tests.servers import wait_until
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import engine_with_pages, prompts_of

PATIENCE_S = 180.0
PAGES = 20
PARAMS = SamplingParams(temperature=0, max_tokens=17)
"""With a prompt of 16 tokens, four pages of 8: the last token is never computed."""


@pytest.fixture(scope="module")
def model() -> object:
    return decoder("Llama")


@pytest.fixture
def engine(model: object) -> Engine:
    return engine_with_pages(model, PAGES, 8, max_num_seqs=16, num_speculative_tokens=0, enable_prefix_caching=True)


class Counted:
    """The requests of an engine, and the room that its times say."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times = EngineTimes(engine.config.scheduler)
        self.open: list[GenerationRequest] = []

    def add(self, prompt: list[int]) -> GenerationRequest:
        request = self.engine.prepare(str(len(self.open)), prompt, PARAMS)
        self.engine.admit(request)
        self.open.append(request)
        return request

    @property
    def room(self) -> int:
        return self.times.room(self.engine.pages, self.open, self.engine.most_tokens)


def test_an_engine_that_has_run_nothing_expects_the_longest_texts(engine: Engine):
    """One request may take all pages of this pool, so there is room for one."""
    assert engine.most_tokens == PAGES * 8 + 1
    assert Counted(engine).room == 1


def test_pages_of_their_ends_are_kept_for_the_texts_that_run(engine: Engine):
    """Each takes four of 20 pages at its end; as it grows, the room stays as it is."""
    counted = Counted(engine)
    for prompt in prompts_of(16, 16):
        counted.add(prompt)
    rooms = set()
    while any(one.finish_reason is None for one in counted.open):
        engine.advance()
        rooms.add(counted.room)
    assert rooms == {5}


def test_texts_that_wait_take_the_room_of_later_ones(engine: Engine):
    """Seven texts for which there are pages of five: no more than five have room, and they count."""
    counted = Counted(engine)
    for prompt in prompts_of(*[16] * 7):
        counted.add(prompt)
    engine.advance()
    assert counted.room == 5


def test_a_shared_beginning_takes_room_once(engine: Engine):
    """Of five pages at the end of a text, two are those of the first one: five texts have room, not four."""
    counted = Counted(engine)
    (prompt,) = prompts_of(17)
    counted.add(prompt)
    engine.advance()
    for _ in range(4):
        counted.add(prompt)
    engine.advance()
    assert [one.sequence.num_cached for one in counted.open] == [0, 16, 16, 16, 16]
    assert counted.room == 5


def test_texts_that_end_early_leave_room(engine: Engine):
    """The lengths of late are expected of later texts."""
    counted = Counted(engine)
    ended = counted.add(prompts_of(16)[0])
    for _ in range(2):
        engine.advance()
    engine.abort(ended.request_id)
    ended.finish_reason = "stop"
    counted.times.ended(ended)
    counted.add(prompts_of(16, seed=1)[0])
    engine.advance()
    # Three pages each: a prompt, and a few tokens.
    assert counted.room == 6


@pytest.fixture
def runner(engine: Engine) -> Iterator[EngineRunner]:
    runner = EngineRunner(engine)
    yield runner
    runner.stop()


def test_the_runner_follows_what_comes_and_goes(runner: EngineRunner):
    """Room for one at first, for five while texts of four pages run, and after them."""
    assert runner.room == 1
    ticket = runner.open(Wish("one", prompts_of(16)[0], PARAMS))
    wait_until(lambda: runner.room == 5, PATIENCE_S, "the length of the text is known")
    output = ticket.next(PATIENCE_S)
    assert output is not None
    assert output.finished
    wait_until(lambda: runner.engine.stats().running == 0, PATIENCE_S, "the text has ended")
    assert runner.room == 5
