"""Models that raise, and memory that ends: only the request at fault fails, and no token is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from penstock.registry.errors import OutOfMemory
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation import Engine
from penstock.workers.generation.backend import Wish
from penstock.workers.generation.outputs import RequestOutput
from penstock.workers.generation.runner import EngineRunner
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import (
    GREEDY,
    byte_tokenizer,
    engine_with_pages,
    open_engine,
    prompts_of,
    token_ids,
)
from tests.workers.generation.test_structure import model_for

POISON = 96
PATIENCE_S = 180.0
EXHAUSTED: list[Callable[[], BaseException]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    lambda: MemoryError(),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
]


class Guard:
    """Before each forward of a model: raises where there are more tokens than `most`, or a token that is `poison`."""

    def __init__(self, model: Any, error: Callable[[], BaseException], most: float = float("inf")) -> None:
        self.error = error
        self.most = most
        self.poison: int | None = None
        self.sizes: list[int] = []
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"]
        self.sizes.append(ids.numel())
        if ids.numel() > self.most or (self.poison is not None and bool((ids == self.poison).any())):
            raise self.error()


def guarded(error: Callable[[], BaseException], **options: Any) -> tuple[Engine, Guard]:
    """An engine of 16 seats whose model has a guard, which is off."""
    model = decoder("Llama")
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_speculative_tokens": 3, **options}
    return engine_with_pages(model, 80, 4, **options), Guard(model, error)


@pytest.mark.parametrize("error", EXHAUSTED, ids=["device", "python", "allocator"])
def test_step_that_does_not_fit_is_cut(error: Callable[[], BaseException]):
    """Down to fewer rows, and to a part of a prompt: every text is the same. Later steps are small from the start."""
    engine, guard = guarded(error)
    prompts = prompts_of(30, 3, 17, 40, 9, 1, 12, 5)
    expected = token_ids(engine.generate(prompts, GREEDY))
    guard.most, guard.sizes = 5, []
    assert token_ids(engine.generate(prompts, GREEDY)) == expected
    refused = sum(size > 5 for size in guard.sizes)
    assert 0 < refused < 40
    guard.sizes = []
    assert token_ids(engine.generate(prompts, GREEDY)) == expected
    assert max(guard.sizes) <= 5
    assert engine.stats().pages_used == 0


def test_forwards_grow_again_when_memory_is_free():
    """A neighbour on the device may have needed it for a while only."""
    engine, guard = guarded(EXHAUSTED[0])
    prompts = prompts_of(30, 30)
    guard.most = 5
    engine.generate(prompts, GREEDY)
    guard.most = float("inf")
    while True:
        guard.sizes = []
        engine.generate(prompts, SamplingParams(max_tokens=150, temperature=0))
        if max(guard.sizes) >= 30:
            return


def test_request_that_never_fits_fails_alone():
    """One token is too much for the device: there is nothing left to cut."""
    engine, guard = guarded(EXHAUSTED[0])
    guard.poison = POISON
    _check_alone(engine, OutOfMemory)


def test_request_that_never_fits_leaves_the_steps_of_others_whole():
    """Its own forwards are cut down to one token; those of the others are not, from the next step on."""
    engine, guard = guarded(EXHAUSTED[0])
    guard.poison = POISON
    with torch.no_grad():
        engine.decoder.model.lm_head.weight[POISON] = 0
    sound = [[token % POISON for token in prompt] for prompt in prompts_of(9, 9, 9, 9)]
    with pytest.raises(OutOfMemory):
        engine.generate([[POISON] * 5], GREEDY)
    guard.sizes = []
    engine.generate(sound, GREEDY)
    assert max(guard.sizes) == 4 * 9


@pytest.mark.parametrize("kind", [ValueError, IndexError, AssertionError, RuntimeError])
def test_request_for_which_the_model_raises_fails_alone(kind: type[Exception]):
    """The others write what they write alone, from the same step on, and every page comes back."""
    engine, guard = guarded(lambda: kind("a token that is not right"))
    guard.poison = POISON
    _check_alone(engine, kind)


def _check_alone(engine: Engine, kind: type[BaseException]) -> None:
    model = engine.decoder.model
    with torch.no_grad():
        # No text writes the token itself.
        model.lm_head.weight[POISON] = 0
    *sound, sick = prompts_of(9, 30, 14, 20)
    sound = [[token % POISON for token in prompt] for prompt in sound]
    sick[7] = POISON
    expected = token_ids(engine.generate(sound, GREEDY))
    with pytest.raises(kind):
        engine.generate([sound[0], sick, *sound[1:]], GREEDY)
    with pytest.raises(kind):
        list(engine.stream(sick, GREEDY))
    for name, prompt in enumerate([sick, *sound]):
        engine.add_request(str(name), prompt, GREEDY)
    engine.add_request("several", sick, SamplingParams(n=3, seed=1))
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert [list(ended[str(at + 1)].outputs[0].token_ids) for at in range(len(sound))] == expected
    assert [one.finish_reason for one in ended["several"].outputs] == ["error"] * 3
    assert engine.stats().pages_used == 0


class PickyTokenizer(PreTrainedTokenizerFast):
    """Decodes no text that begins with the token `bad`."""

    bad: int | None = None

    def _decode(self, token_ids: Any, *args: Any, **options: Any) -> str:
        if token_ids[:1] == [self.bad]:
            raise OverflowError("no such token")
        text: str = super()._decode(token_ids, *args, **options)
        return text


def test_text_that_the_tokenizer_cannot_decode_fails_alone():
    """With a stop string, text is decoded within the step."""
    plain = byte_tokenizer()
    tokenizer = PickyTokenizer(tokenizer_object=plain.backend_tokenizer, eos_token=plain.eos_token)
    engine = open_engine(model_for(tokenizer), tokenizer, kv_cache_mb=4)
    params = SamplingParams(max_tokens=20, seed=1, stop=["zzz"], ignore_eos=True)
    expected = [output.outputs[0].text for output in engine.generate(["one", "two"], params)]
    tokenizer.bad = engine.generate("bad", params)[0].outputs[0].token_ids[0]
    for name, prompt in (("1", "one"), ("bad", "bad"), ("2", "two")):
        engine.add_request(name, prompt, params)
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        ended |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    assert [ended["1"].text, ended["2"].text] == expected
    assert ended["bad"].finish_reason == "error"
    assert engine.stats().pages_used == 0


def test_job_gets_what_the_model_raised():
    """The runner hands it to the job's own thread; the others end as they would."""
    engine, guard = guarded(lambda: ValueError("a token that is not right"))
    guard.poison = POISON
    runner = EngineRunner(engine)
    try:
        sick = runner.open(Wish("sick", [1, POISON], GREEDY))
        sound = runner.open(Wish("sound", [1, 2, 3], SamplingParams(max_tokens=3, allowed_token_ids=[4, 5])))
        with pytest.raises(ValueError, match="a token that is not right"):
            sick.next(PATIENCE_S)
        output = sound.next(PATIENCE_S)
        assert output is not None
        assert len(output.outputs[0].token_ids) == 3
    finally:
        runner.stop()


class _Listener:
    """Knows whether an output came."""

    def __init__(self) -> None:
        self.has_heard = threading.Event()

    def __call__(self, _: RequestOutput) -> bool:
        self.has_heard.set()
        return False


def test_a_thousand_cancels_of_threads_give_all_pages_back():
    """Eight threads open requests and close them at random moments, while others write."""
    runner = EngineRunner(engine_with_pages(decoder("Llama"), 40, 4, max_num_seqs=6, max_num_batched_tokens=32))
    prompts = prompts_of(5, 20, 33)
    whole = runner.open(Wish("whole", prompts[0], GREEDY)).next(PATIENCE_S)
    assert whole is not None
    errors: list[BaseException] = []

    def cancel(number: int) -> None:
        chosen = random.Random(number)
        try:
            for turn in range(125):
                listener = _Listener()
                wish = Wish(
                    f"{number}-{turn}",
                    chosen.choice(prompts),
                    SamplingParams(max_tokens=60, seed=turn, n=chosen.choice([1, 1, 2])),
                    priority=chosen.choice(["high", "normal", "low"]),
                    sink=listener,
                )
                ticket = runner.open(wish)
                # At once, or between any two of its outputs.
                if chosen.random() < 0.5:
                    assert listener.has_heard.wait(PATIENCE_S)
                ticket.close()
                if turn % 25 == 0:
                    output = runner.open(Wish(f"{number}-{turn}-whole", prompts[0], GREEDY)).next(PATIENCE_S)
                    assert output is not None
                    assert output.outputs[0].token_ids == whole.outputs[0].token_ids
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=cancel, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    output = runner.open(Wish("last", prompts[0], GREEDY)).next(PATIENCE_S)
    assert output is not None
    runner.stop()
    stats = runner.engine.stats()
    assert (stats.pages_used, stats.waiting, stats.running) == (0, 0, 0)
