"""The thread that owns an engine: who gets what, and who is not disturbed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from penstock.registry.errors import InvalidInput, ModelNotReady
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import runner as runners
from penstock.workers.generation.backend import Delivered, Wish
from penstock.workers.generation.outputs import RequestOutput
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.runner import EngineRunner, Ticket
from penstock.workers.generation.text_group import output
from tests.servers import wait_until
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of

PATIENCE_S = 180.0


@pytest.fixture
def runner() -> Iterator[EngineRunner]:
    runner = EngineRunner(open_engine(decoder("Llama"), kv_cache_mb=4, max_num_seqs=2))
    yield runner
    runner.stop()


def tokens_of(ticket: Ticket) -> tuple[int, ...]:
    """The whole text of a request."""
    output = ticket.next(PATIENCE_S)
    assert output is not None
    assert output.finished
    return output.outputs[0].token_ids


def test_sink_gets_every_token_once(runner: EngineRunner):
    """In order; the ticket has the last output only."""
    seen: dict[str, list[int]] = {}

    def sink(output: RequestOutput) -> bool:
        seen.setdefault(output.request_id, []).extend(output.delta_token_ids)
        return False

    wishes = [Wish(str(number), prompt, GREEDY, sink=sink) for number, prompt in enumerate(prompts_of(5, 9, 3, 7))]
    tickets = [runner.open(wish) for wish in wishes]
    assert {ticket.wish.request_id: list(tokens_of(ticket)) for ticket in tickets} == seen


def test_request_continues_behind_what_was_delivered(runner: EngineRunner):
    """From any token on, also behind the last one: the same text, and only the rest is handed out."""
    (prompt,) = prompts_of(6)
    whole = tokens_of(runner.open(Wish("whole", prompt, GREEDY)))
    for number in (1, 7, len(whole)):
        seen: list[int] = []

        def sink(output: RequestOutput, seen: list[int] = seen) -> bool:
            seen.extend(output.delta_token_ids)
            return False

        wish = Wish(f"from-{number}", prompt, GREEDY, delivered=Delivered(whole[:number]), sink=sink)
        assert tokens_of(runner.open(wish)) == whole
        assert seen == list(whole[number:])


def test_bad_request_and_bad_sink_end_alone(runner: EngineRunner):
    """Their own tickets raise; others go on."""

    def refuses(_: RequestOutput) -> bool:
        raise ValueError("no more")

    with pytest.raises(InvalidInput, match="as a token"):
        runner.open(Wish("bad", [10**6], GREEDY))
    refused = runner.open(Wish("refused", [1], GREEDY, sink=refuses))
    good = runner.open(Wish("good", [1, 2], GREEDY))
    with pytest.raises(ValueError, match="no more"):
        refused.next(PATIENCE_S)
    assert len(tokens_of(good)) == GREEDY.max_tokens


def test_failed_step_fails_the_requests_of_its_moment(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch):
    """The next request runs, and every page came back."""

    def fails() -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(runner.engine, "advance", fails)
        with pytest.raises(MemoryError, match="no room"):
            runner.open(Wish("first", [1, 2, 3], GREEDY)).next(PATIENCE_S)
    assert len(tokens_of(runner.open(Wish("second", [1, 2, 3], GREEDY)))) == GREEDY.max_tokens
    assert runner.engine.stats().pages_used == 0


def test_closed_request_leaves_the_engine(runner: EngineRunner):
    """Its seat is free, and a stopped runner takes no more."""
    runner.open(Wish("closed", [1, 2, 3], GREEDY)).close()
    assert len(tokens_of(runner.open(Wish("next", [1], GREEDY)))) == GREEDY.max_tokens
    runner.stop()
    with pytest.raises(ModelNotReady):
        runner.open(Wish("late", [1], GREEDY))


def test_a_job_that_comes_back_takes_the_place_of_its_earlier_run(runner: EngineRunner):
    """A worker may claim it again before the earlier run was closed."""
    earlier = runner.open(Wish("same", [1, 2, 3], GREEDY))
    later = runner.open(Wish("same", [1, 2, 3], GREEDY))
    with pytest.raises(ModelNotReady, match="Another run of the job"):
        earlier.next(PATIENCE_S)
    earlier.close()
    assert len(tokens_of(later)) == GREEDY.max_tokens
    assert runner.engine.stats().pages_used == 0


def test_text_that_cannot_be_decoded_ends_alone(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch):
    """The thread goes on, and so do the others."""

    def read(request: GenerationRequest) -> RequestOutput:
        if request.request_id == "bad":
            raise IndexError("no such token")
        return output(request)

    monkeypatch.setattr(runners, "output", read)
    bad, good = (runner.open(Wish(name, [1, 2, 3], GREEDY)) for name in ("bad", "good"))
    with pytest.raises(IndexError, match="no such token"):
        bad.next(PATIENCE_S)
    assert len(tokens_of(good)) == GREEDY.max_tokens
    assert runner.engine.stats().pages_used == 0


def test_outputs_that_cannot_be_delivered_come_together_later():
    """While the broker is away, the engine goes on and a few outputs wait; then every token comes once."""
    ticks = count()
    engine = open_engine(decoder("Llama"), kv_cache_mb=4, num_speculative_tokens=0)
    # By this clock, an output is due after each step.
    runner = EngineRunner(engine, clock=lambda: float(next(ticks)))
    is_open, seen, calls = threading.Event(), list[int](), list[int]()

    def sink(output: RequestOutput) -> bool:
        assert is_open.wait(PATIENCE_S)
        calls.append(len(output.delta_token_ids))
        seen.extend(output.delta_token_ids)
        return False

    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    ticket = runner.open(Wish("held", [1, 2, 3], params, sink=sink))
    wait_until(lambda: engine.stats().tokens_generated == 200, PATIENCE_S, "the engine is at the end")
    is_open.set()
    assert list(tokens_of(ticket)) == seen
    assert len(calls) <= 5
    runner.stop()


def test_outputs_that_cost_much_are_handed_over_less_often():
    """By a clock of steps, outputs are due every 3 steps, and every 13 while each costs a second of the processor."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=4, num_speculative_tokens=0)
    seconds = count()
    runner = EngineRunner(engine, clock=lambda: engine.stats().steps * 0.02, cpu_clock=lambda: float(next(seconds)))
    calls: list[int] = []

    def sink(output: RequestOutput) -> bool:
        calls.append(len(output.delta_token_ids))
        return False

    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    assert len(tokens_of(runner.open(Wish("long", [1, 2, 3], params, sink=sink)))) == 200
    assert sum(calls) == 200
    # The first output, 16 of 13 tokens, and those that left before the first one had been counted.
    assert len(calls) <= 1 + 16 + 4
    runner.stop()


@pytest.mark.parametrize(("step_s", "handed_together"), [(1.0, 1), (0.02, 3)])
def test_times_of_tokens_are_those_of_the_clock(step_s: float, handed_together: int):
    """By a clock of steps: one text writes at once, the other waits for its seat. Each token after the first took one
    step, also where several were handed over together.
    """
    engine = open_engine(decoder("Llama"), kv_cache_mb=4, max_num_seqs=1, num_speculative_tokens=0)
    may_begin = threading.Event()

    def begin() -> None:
        may_begin.wait(PATIENCE_S)

    runner = EngineRunner(engine, begin, clock=lambda: engine.stats().steps * step_s)
    calls: dict[str, int] = {"first": 0, "second": 0}

    def sink(output: RequestOutput) -> bool:
        calls[output.request_id] += 1
        return False

    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    tickets = [runner.open(Wish(name, [1, 2, 3], params, sink=sink)) for name in calls]
    may_begin.set()
    for ticket in tickets:
        tokens_of(ticket)
    figures = runner.take_figures()
    # The second text begins with the step after the last one of the first text.
    assert figures.first_token_s == pytest.approx([step_s, 17 * step_s])
    assert figures.inter_token_s == pytest.approx([step_s] * len(figures.inter_token_s))
    assert len(figures.inter_token_s) + 2 == sum(calls.values())
    assert max(calls.values()) <= 1 + -(-15 // handed_together) + 1
    assert figures.generated_tokens == 32
    again = runner.take_figures()
    assert (again.first_token_s, again.inter_token_s) == ([], [])
    runner.stop()
