"""Prompts become tokens beside the steps of others, and what is too long is refused by its beginning."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from penstock.registry.errors import InvalidInput
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.backend import Wish
from penstock.workers.generation.prompts import PromptReader
from penstock.workers.generation.runner import EngineRunner
from tests.servers import wait_until
from tests.workers.generation.engines import byte_tokenizer, open_engine, write_model

PATIENCE_S = 180.0
STEPS = 20
LARGE = 3_000


class Watched:
    """A tokenizer that tells which texts it is about to read."""

    def __init__(self, tokenizer: Any, tell: Callable[[str], object]) -> None:
        self._tokenizer = tokenizer
        self._tell = tell

    def __call__(self, text: str, **options: Any) -> Any:
        self._tell(text)
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("text", ["the river of text " * 200_000, "日本語" * 1_000_000], ids=["words", "no spaces"])
def test_a_text_that_is_too_long_is_refused_by_its_beginning(text):
    """A few thousand characters of megabytes are read."""
    read: list[int] = []
    made = byte_tokenizer()
    reader = PromptReader(Watched(made, lambda text: read.append(len(text))), len(made), 256)
    with pytest.raises(InvalidInput, match=r"at least \d+ tokens and max_tokens 10, expected at most 256 together"):
        reader.tokens(text, 10)
    assert 0 < sum(read) < 10_000


def test_a_long_text_of_few_tokens_is_read_whole():
    """More characters than most texts have for each token are no reason to refuse it."""
    words = [f"{number:050}" for number in range(100)]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    reader = PromptReader(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 100, 101)
    assert reader.tokens(" ".join(words), 1) == list(range(100))
    with pytest.raises(InvalidInput, match="Found a prompt of 100 tokens and max_tokens 2, expected at most 101"):
        reader.tokens(" ".join(words), 2)


def test_token_ids_that_are_too_many_are_not_looked_at():
    """Their number is enough."""
    with pytest.raises(InvalidInput, match="a prompt of 257 tokens"):
        PromptReader(None, 97, 256).tokens([-1] * 257, 1)


def test_steps_go_on_while_a_prompt_is_read(tmp_path):
    """The tokenizer of a large prompt ends only after so many steps of the stream beside it."""
    made, ends = byte_tokenizer(), threading.Event()
    counted: list[int] = []

    def wait(text: str) -> None:
        if len(text) >= LARGE:
            begun = runner.turns
            wait_until(lambda: runner.turns >= begun + STEPS, PATIENCE_S, "steps beside a prompt that is read")
            counted.append(runner.turns - begun)
            ends.set()

    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path, max_position_embeddings=8_192)).eval()
    runner = EngineRunner(open_engine(model, Watched(made, wait), kv_cache_mb=64))
    long, short = (SamplingParams(max_tokens=most, temperature=0, ignore_eos=True) for most in (8_000, 2))
    try:
        stream = runner.open(Wish("stream", "the stream", long))
        large = runner.open(Wish("large", "x" * LARGE, short))
        assert ends.is_set()
        assert counted[0] >= STEPS
        output = large.next(PATIENCE_S)
        assert output is not None
        assert len(output.prompt_token_ids) == LARGE
        stream.close()
    finally:
        runner.stop()
