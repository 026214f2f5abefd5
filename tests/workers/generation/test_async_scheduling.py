"""Steps that are launched before the tokens of the last one are read: the same texts, and the device has work always.

On a CPU the option changes nothing but the order of things, which is what these tests look at.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.config import SchedulerConfig
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.launched_step import LaunchedStep
from penstock.workers.generation.pages import PagePool
from penstock.workers.generation.scheduler import Chunk, Scheduler, Sequence
from penstock.workers.generation.speculation import PromptLookup
from penstock.workers.runtime.torch_device import TorchDevice
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import (
    GREEDY,
    byte_tokenizer,
    engine_with_pages,
    open_engine,
    prompts_of,
    token_ids,
)
from tests.workers.generation.test_fuzz import run
from tests.workers.generation.test_structure import model_for

PROMPTS = prompts_of(3, 17, 40, 9, 1)
ON: dict[str, Any] = {"async_scheduling": "on", "kv_cache_mb": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 7},
    "filtered": {"seed": 7, "top_k": 9, "top_p": 0.9},
    "filtered, of all tokens": {"seed": 7, "top_p": 0.9},
    "penalties": {"seed": 7, "repetition_penalty": 1.3},
    "log probabilities": {"seed": 7, "logprobs": 2},
    "several texts": {"seed": 7, "n": 2},
}
LAUNCHED = {"greedy", "drawn", "filtered", "filtered, of all tokens", "several texts"}
"""The vocabulary is so small that filters are always decided."""


class Log:
    """What a launched step does, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        made, read = LaunchedStep.__init__, LaunchedStep.read

        def launched(step: LaunchedStep, *arguments: Any) -> None:
            self.events.append("launched")
            made(step, *arguments)

        def was_read(step: LaunchedStep) -> Any:
            self.events.append("read")
            return read(step)

        monkeypatch.setattr(LaunchedStep, "__init__", launched)
        monkeypatch.setattr(LaunchedStep, "read", was_read)


@pytest.mark.parametrize("setting", SETTINGS)
def test_texts_are_the_same(setting, monkeypatch):
    """A step is launched before the last one is read, unless a token depends on more than the model and its place."""
    params = SamplingParams(max_tokens=12, **SETTINGS[setting])
    expected = open_engine(decoder("Llama"), kv_cache_mb=4).generate(PROMPTS, params)
    engine, log = open_engine(decoder("Llama"), **ON), Log(monkeypatch)
    found = engine.generate(PROMPTS, params)
    assert [[one.token_ids for one in each.outputs] for each in found] == [
        [one.token_ids for one in each.outputs] for each in expected
    ]
    if setting in LAUNCHED:
        assert log.events.count("launched") == log.events.count("read")
        assert log.events[:4] == ["launched", "launched", "read", "launched"]
    else:
        assert not log.events
    assert engine.stats().pages_used == 0


def test_a_long_text_is_one_row_of_launches(monkeypatch):
    """Each step but the first is launched while the one before it is not read. None computes beyond max_tokens."""
    engine, log = open_engine(decoder("Llama"), num_speculative_tokens=0, **ON), Log(monkeypatch)
    engine.generate(PROMPTS[:1], GREEDY)
    # The prompt's step chooses the first token.
    steps = GREEDY.max_tokens - 1
    assert log.events == ["launched", *["launched", "read"] * (steps - 1), "read"]
    assert engine.stats().steps == GREEDY.max_tokens


def test_one_row_is_guessed_instead(monkeypatch):
    """Guesses need the tokens before them."""
    log = Log(monkeypatch)
    open_engine(decoder("Llama"), **ON).generate(PROMPTS[:1], GREEDY)
    assert not log.events


def test_a_drawn_row_is_launched(monkeypatch):
    """Nothing is guessed for it, although guesses are on and it runs alone."""
    params = SamplingParams(max_tokens=12, seed=7)
    expected = token_ids(open_engine(decoder("Llama"), kv_cache_mb=4).generate(PROMPTS[:1], params))
    engine, log = open_engine(decoder("Llama"), **ON), Log(monkeypatch)
    assert engine.config.scheduler.num_speculative_tokens > 0
    assert token_ids(engine.generate(PROMPTS[:1], params)) == expected
    assert log.events.count("launched") == params.max_tokens - 1


def test_a_row_is_launched_whose_guesses_were_wrong(monkeypatch):
    """From the step on at which they are switched off, and not before."""
    expected = token_ids(open_engine(decoder("Llama"), kv_cache_mb=4).generate(PROMPTS[:1], GREEDY))
    engine, log = open_engine(decoder("Llama"), **ON), Log(monkeypatch)

    def wrong(lookup: PromptLookup, tokens: Any, most: int) -> list[int]:
        log.events.append("guessed")
        return [next(token for token in range(1, 9) if token not in expected[0])][:most]

    monkeypatch.setattr(PromptLookup, "guess", wrong)
    assert token_ids(engine.generate(PROMPTS[:1], GREEDY)) == expected
    guessed = log.events.count("guessed")
    assert log.events[:guessed] == ["guessed"] * guessed
    assert 0 < guessed < GREEDY.max_tokens - 2
    # The prompt's step and each guessed one choose a token.
    assert log.events.count("launched") == GREEDY.max_tokens - 1 - guessed


def test_texts_end_where_they_end_alone():
    """By a token, by a string that only the text shows, and by their length, at different steps of one batch."""
    tokenizer = byte_tokenizer()
    model = model_for(tokenizer)
    plain = open_engine(model, tokenizer, kv_cache_mb=4)
    prompts = prompts_of(4, 9, 2, 13, 6, seed=5)
    (first, *_) = plain.generate(prompts[:1], GREEDY)[0].outputs
    asked = [
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[first.token_ids[5]]),
        SamplingParams(temperature=0, max_tokens=30, stop=["e", "a", "t", " "]),
        *(SamplingParams(temperature=0, max_tokens=number) for number in (1, 2, 9)),
    ]
    expected = [plain.generate([prompt], params)[0].outputs[0] for prompt, params in zip(prompts, asked, strict=True)]
    engine = open_engine(model, tokenizer, **ON)
    names = [engine.add_request(None, prompt, params) for prompt, params in zip(prompts, asked, strict=True)]
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        ended |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    assert [ended[name] for name in names] == expected
    assert {one.finish_reason for one in ended.values()} == {"stop", "length"}
    assert engine.stats().pages_used == 0


def test_requests_that_take_each_others_pages_write_the_same():
    """Preempted while their last token is not read yet: it is kept, and computed again with the others."""
    expected = token_ids(open_engine(decoder("Llama"), kv_cache_mb=4).generate(PROMPTS, GREEDY))
    engine = engine_with_pages(
        decoder("Llama"), 16, 4, async_scheduling="on", num_speculative_tokens=0, max_num_batched_tokens=64
    )
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats().preemptions > 0
    assert engine.stats().pages_used == 0


def test_the_last_page_is_enough():
    """A request that fits into the pool alone, to its last token, is never asked for one place more."""
    engine = engine_with_pages(decoder("Llama"), 5, 4, async_scheduling="on", num_speculative_tokens=0)
    (output,) = engine.generate(prompts_of(5), SamplingParams(temperature=0, max_tokens=16))
    assert len(output.outputs[0].token_ids) == 16
    assert engine.stats().preemptions == 0


def test_prefixes_that_are_kept_are_those_of_known_tokens():
    """Texts that were written while steps ran ahead are found again as prompts, page by page."""
    plain = open_engine(decoder("Llama"), kv_cache_mb=4, page_size=4)
    engine = open_engine(decoder("Llama"), page_size=4, num_speculative_tokens=0, **ON)
    prompt = prompts_of(9)[0]
    for each in (plain, engine):
        (written,) = each.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
        again = [*prompt, *written.outputs[0].token_ids]
        each.generate([again], GREEDY)
    assert engine.stats().prefix_tokens_found == plain.stats().prefix_tokens_found > 20


def test_abort_and_a_new_request_of_the_same_name():
    """What the launched step chooses for a request that has gone is given to nobody."""
    tokenizer = byte_tokenizer()
    model = model_for(tokenizer)
    engine = open_engine(model, tokenizer, num_speculative_tokens=0, **ON)
    plain = open_engine(model, tokenizer, kv_cache_mb=4)
    one, other, third = prompts_of(7, 12, 5, seed=3)
    second = engine.prepare("b", other, GREEDY)
    for request in (engine.prepare("a", one, GREEDY), second):
        engine.admit(request)
    for _ in range(5):
        engine.advance()
    engine.abort("a")
    again = engine.prepare("a", third, GREEDY)
    engine.admit(again)
    while None in (again.finish_reason, second.finish_reason):
        engine.advance()
    expected = plain.generate([third, other], GREEDY)
    assert [list(again.token_ids), list(second.token_ids)] == token_ids(expected)
    assert [each.completion(0).text for each in (again, second)] == [output.outputs[0].text for output in expected]


@pytest.mark.parametrize("kind", ["raises", "not finite"])
def test_a_request_fails_alone(kind):
    """The others go on, with the same tokens, and nothing is left in the pages."""
    expected = token_ids(open_engine(decoder("Llama"), kv_cache_mb=4).generate(PROMPTS, GREEDY))
    engine = open_engine(decoder("Llama"), num_speculative_tokens=0, **ON)
    names = [engine.add_request(None, prompt, GREEDY) for prompt in PROMPTS]
    forward = engine.decoder.forward
    bad = expected[2][6]

    def failing(batch: Any, pools: Any) -> Any:
        logits, calls = forward(batch, pools)
        # The third request alone has this token at this place.
        hits = (batch.input_ids[0] == bad) & (batch.position_ids[0] == len(PROMPTS[2]) + 6)
        if bool(hits.any()):
            if kind == "raises":
                raise ValueError("this row")
            logits[hits] = float("nan")
        return logits, calls

    engine.forwards.decoder = _Forwarding(engine, failing)  # type: ignore[assignment]
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        ended |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    for at, name in enumerate(names):
        if at == 2:
            assert ended[name].finish_reason == "error"
            assert list(ended[name].token_ids) == expected[2][:7]
        else:
            assert list(ended[name].token_ids) == expected[at]
    assert engine.stats().pages_used == 0


class _Forwarding:
    """A decoder with another forward."""

    def __init__(self, engine: Engine, forward: Any) -> None:
        self._decoder = engine.decoder
        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


@pytest.mark.parametrize("guesses", [0, 3])
def test_random_requests_write_what_they_write_alone(guesses, caplog, monkeypatch):
    """Requests come, end, are aborted and take each other's pages while steps are launched. No forward fails."""
    tokenizer = byte_tokenizer()
    model = model_for(tokenizer)
    log = Log(monkeypatch)
    tight = {"page_size": 4, "kv_cache_mb": 0.12, "max_num_seqs": 6, "max_num_batched_tokens": 24, "ageing_steps": 9}
    engines = (
        open_engine(model, tokenizer, kv_cache_mb=8, enable_prefix_caching=False, num_speculative_tokens=0),
        open_engine(model, tokenizer, async_scheduling="on", num_speculative_tokens=guesses, **tight),
    )
    kinds: list[dict[str, Any]] = [
        *({"temperature": 0} for _ in range(3)),
        {"n": 3},
        {"top_k": 9},
        {"stop": ["e"]},
        {"logprobs": 1},
    ]
    for seed in range(100, 112):
        run(engines, seed, kinds)
    assert not caplog.records
    assert engines[1].stats().preemptions > 0
    assert log.events.count("launched") > 100


def test_tokens_go_to_the_rows_of_their_requests():
    """Requests change their order, and some have ended: each of the others gets its own token."""
    rows = [Sequence(str(row), [1], 1) for row in range(4)]
    chunks = [Chunk(one, 0, 1) for one in rows]
    step = LaunchedStep(chunks, torch.tensor([[5, 6, 7, 8], [1, 1, 1, 0]]), TorchDevice("cpu", 1))
    assert step.tokens_of(chunks).tolist() == [5, 6, 7, 8]
    assert step.tokens_of([chunks[2], chunks[0]]).tolist() == [7, 5]
    assert step.tokens_of([chunks[at] for at in (3, 1, 0, 2)]).tolist() == [8, 6, 5, 7]
    assert step.read() == ([5, 6, 7, 8], [1, 1, 1, 0])


def test_pages_of_a_launched_step_are_cleared():
    """It may write NaN into them, and its logits were not read when the request went."""
    scheduler = Scheduler(SchedulerConfig(), PagePool(8, 4, None))
    sequence = Sequence("one", [1, 2, 3], 3)
    scheduler.add(sequence)
    chunks = scheduler.plan().chunks
    scheduler.record(chunks, {"one": 4})
    scheduler.launch(scheduler.plan().chunks)
    (page,) = sequence.pages
    scheduler.remove(sequence)
    assert scheduler.take_unverified_pages() == [page]


def test_a_read_waits_for_its_own_step_only():
    """A copy to the host is begun with the step; on a CPU it is the tensor itself."""
    device = TorchDevice("cpu", 1)
    assert device.start_download(torch.tensor([1, 2]))().tolist() == [1, 2]
