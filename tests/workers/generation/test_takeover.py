"""Another engine goes on with a text, from any token on: one text, whatever chooses and ends its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.backend import Delivered
from penstock.workers.generation.chat import ChatPrompt
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.prompts import Prompt
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.text_group import has_news, output
from tests.workers.generation.packages import write_writer

SEEDED: dict[str, Any] = {"max_tokens": 48, "temperature": 0.9, "seed": 7, "ignore_eos": True}
CHAT = ChatPrompt(
    [{"role": "user", "content": "größe"}], (), "{% for one in messages %}{{ one.content }}:{% endfor %}", None
)


@pytest.fixture(scope="module")
def open_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Engine]:
    package = write_writer(tmp_path_factory.mktemp("takeover"))
    return lambda: Engine.from_pretrained(package, kv_cache_mb=4, packed_linears="off")


class Written(NamedTuple):
    """A text, with the chunks that were delivered of it, one for each token at most."""

    request: GenerationRequest
    chunks: list[tuple[list[int], str]]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.chunks)

    @property
    def tokens(self) -> list[int]:
        return [token for tokens, _ in self.chunks for token in tokens]


def _write(engine: Engine, name: str, prompt: Prompt | ChatPrompt, params: SamplingParams, *earlier: Any) -> Written:
    request = engine.prepare(name, prompt, params, *earlier)
    engine.admit(request)
    chunks: list[tuple[list[int], str]] = []
    while has_news(request) or request.finish_reason is None:
        if request.finish_reason is None:
            engine.advance()
        if has_news(request):
            found = output(request)
            chunks.append((list(found.delta_token_ids), found.delta_text))
    assert request.failure is None
    return Written(request, chunks)


def _stop_in(engine: Engine) -> str:
    """Six characters of the text that come late, and not before."""
    text = _write(engine, "without", "a river", SamplingParams.from_mapping(SEEDED)).text
    return next(text[at : at + 6] for at in range(len(text) * 2 // 3, len(text)) if text.find(text[at : at + 6]) == at)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 3},
    "form": {"regex": "([a-z]{3,5} ){9}end", "ignore_eos": False},
    "half characters": {"regex": "[日本語ßé]{14}", "ignore_eos": False},
    "words": {"bad_words": ["a", "river"], "min_tokens": 40, "logit_bias": {"70": 2.0}},
}


QUICK = {"seeded", "stop strings", "form"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in [*KINDS, "stop strings", "chat"]],
)
def test_a_text_goes_on_behind_any_token(kind: str, open_engine: Callable[[], Engine]):
    """What was delivered and what comes are the whole text, without gap or repeat, and so are the tokens."""
    engine = open_engine()
    prompt: Prompt | ChatPrompt = CHAT if kind == "chat" else "a river"
    own = {"stop": [_stop_in(engine)]} if kind == "stop strings" else KINDS.get(kind, {})
    params = SamplingParams.from_mapping({**SEEDED, **own})
    whole = _write(engine, "whole", prompt, params)
    end = whole.request.finish_reason
    assert end == ("stop" if kind in ("stop strings", "form", "half characters") else "length")
    other, held = open_engine(), 0
    for number in range(1, len(whole.chunks)):
        before = Written(whole.request, whole.chunks[:number])
        logprobs = whole.request.logprobs[: len(before.tokens)]
        rest = _write(other, str(number), prompt, params, Delivered(before.tokens, before.text, logprobs))
        assert before.text + rest.text == whole.text
        assert before.tokens + rest.tokens == whole.tokens
        assert rest.request.finish_reason == end
        assert [*map(set, rest.request.logprobs)] == [*map(set, whole.request.logprobs)]
        assert [at and set(at) for at in rest.request.prompt_logprobs] == [
            at and set(at) for at in whole.request.prompt_logprobs
        ]
        held += whole.request.stream is not None and len(before.text) < len(_decoded(engine, before.tokens))
    if kind == "half characters":
        assert held > len(whole.chunks) // 2


def _decoded(engine: Engine, tokens: list[int]) -> str:
    """With a mark for each byte of a character that is not whole."""
    return str(engine.decoder.tokenizer.decode(tokens))
