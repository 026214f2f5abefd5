"""Log probabilities on OpenAI's text routes, through OpenAI's client, against the engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack
from tests.producers.gateway.texts import Site, client_of

PROMPT = "größe, naïve"
CHAT = [{"role": "user", "content": "grüß dich"}]
CHAT_PROMPT = "user: grüß dich\nassistant:"
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
Tokens = list[tuple[bytes, float, dict[int, float]]]


@pytest.fixture
def openai(site: Site) -> Iterator[Any]:
    """OpenAI's client, without its own retries."""
    with client_of(site.gateway) as client:
        yield client


def shown(piece: bytes) -> str:
    """As OpenAI shows a token that may be a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def best(site: Site, at: dict[int, float], top: int) -> list[tuple[str, Any]]:
    """The most probable tokens in one place."""
    ordered = sorted(at.items(), key=lambda each: -each[1])[:top]
    return [(shown(site.piece(token)), pytest.approx(value, rel=1e-5)) for token, value in ordered]


def check_chat(site: Site, content: list[Any], expected: Tokens, top: int) -> None:
    """The tokens of a chat are those of the engine."""
    assert [bytes(each.bytes) for each in content] == [piece for piece, _, _ in expected]
    assert [each.token for each in content] == [shown(piece) for piece, _, _ in expected]
    assert [each.logprob for each in content] == pytest.approx([value for _, value, _ in expected], rel=1e-5)
    for each, (_, _, at) in zip(content, expected, strict=True):
        assert [(other.token, other.logprob) for other in each.top_logprobs] == best(site, at, top)


@pytest.mark.parametrize("top", [None, 0, 3])
def test_chat_has_the_engines_logprobs(openai: Any, site: Site, top: int | None):
    """Each token with its bytes, and so many of the most probable ones; a stream joins to the same list."""
    more = {} if top is None else {"top_logprobs": top}
    wish = {"model": "writer", "messages": CHAT, "max_tokens": 24, "logprobs": True, **more, **GREEDY}
    expected = site.expected_tokens(CHAT_PROMPT, top or 0)
    (choice,) = openai.chat.completions.create(**wish).choices
    check_chat(site, choice.logprobs.content, expected, top or 0)
    told = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
    assert told.decode(errors="replace") == choice.message.content
    deltas = [chunk.choices[0] for chunk in openai.chat.completions.create(**wish, stream=True)]
    streamed = [each for delta in deltas if delta.logprobs for each in delta.logprobs.content]
    check_chat(site, streamed, expected, top or 0)


def test_each_choice_has_its_own(openai: Any, site: Site):
    """n > 1, whole and as a stream."""
    wish = {"model": "writer", "messages": CHAT, "max_tokens": 8, "logprobs": True, "n": 3, "seed": 5}
    wish["extra_body"] = {"ignore_eos": True}
    answer = openai.chat.completions.create(**wish)
    streamed: list[list[Any]] = [[], [], []]
    for chunk in openai.chat.completions.create(**wish, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for index, choice in enumerate(answer.choices):
        expected = site.expected_tokens(CHAT_PROMPT, 0, temperature=1.0, seed=5 + index, max_tokens=8)
        check_chat(site, choice.logprobs.content, expected, 0)
        check_chat(site, streamed[index], expected, 0)


def test_completion_has_the_older_form(openai: Any, site: Site):
    """Four lists side by side; a stream joins to them."""
    wish = {"model": "writer", "prompt": PROMPT, "max_tokens": 24, "logprobs": 2, **GREEDY}
    expected = site.expected_tokens(PROMPT, 2)
    (choice,) = openai.completions.create(**wish).choices
    found = choice.logprobs
    assert found.tokens == [shown(piece) for piece, _, _ in expected]
    assert found.token_logprobs == pytest.approx([value for _, value, _ in expected], rel=1e-5)
    for top, (piece, value, at) in zip(found.top_logprobs, expected, strict=True):
        assert top == {**dict(best(site, at, 2)), shown(piece): pytest.approx(value, rel=1e-5)}
    parts = [chunk.choices[0] for chunk in openai.completions.create(**wish, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part.logprobs, name)] == getattr(found, name)
    # A whole token stands in the text where its offset says.
    places = zip(found.tokens, found.text_offset, strict=True)
    assert all(choice.text.startswith(token, at) for token, at in places if not token.startswith("bytes:"))
    assert found.text_offset[0] == 0


def test_tokens_behind_the_end_are_left_out(openai: Any, site: Site):
    """Those of a stop string, and the model's own end; 0 asks for no other tokens."""
    whole = site.expected(PROMPT)
    stop = whole[5:8]
    wish = {"model": "writer", "prompt": PROMPT, "max_tokens": 24, "logprobs": 0, "stop": stop, **GREEDY}
    (choice,) = openai.completions.create(**wish).choices
    found = choice.logprobs
    pieces = [piece for piece, _, _ in site.expected_tokens(PROMPT, 0)]
    assert choice.text == whole[: whole.index(stop)]
    assert found.tokens == [shown(piece) for piece in pieces[: len(found.tokens)]]
    begun = b"".join(pieces[: len(found.tokens) - 1]).decode(errors="replace")
    rest = b"".join(pieces[: len(found.tokens)]).decode(errors="replace")
    assert len(begun) < len(choice.text) <= len(rest)
    assert found.top_logprobs is None
    parts = [chunk.choices[0].logprobs for chunk in openai.completions.create(**wish, stream=True)]
    assert [token for part in parts for token in part.tokens] == found.tokens
    ended = openai.completions.create(
        model="writer", prompt=PROMPT, max_tokens=24, logprobs=1, temperature=0, extra_body={"choice": ["no", "nein"]}
    )
    assert "".join(ended.choices[0].logprobs.tokens) == ended.choices[0].text


def test_calls_of_tools_have_logprobs(openai: Any):
    """Of the whole text, also in a stream, which tells it at its end."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    wish = {"model": "writer", "messages": CHAT, "tools": [tool], "temperature": 0, "max_tokens": 120}
    wish |= {"logprobs": True, "extra_body": {"choice": [text, text + " "]}}
    (choice,) = openai.chat.completions.create(**wish).choices
    assert choice.finish_reason == "tool_calls"
    assert "".join(each.token for each in choice.logprobs.content).rstrip() == text
    last = [chunk.choices[0] for chunk in openai.chat.completions.create(**wish, stream=True)][-1]
    assert last.logprobs.content == choice.logprobs.content


def test_without_the_tokenizer_they_are_refused(stack: GatewayStack, site: Site):
    """422 that says why; the same request without them is answered."""
    body = {"model": "writer", "prompt": PROMPT, "max_tokens": 4}
    refused = httpx.post(f"{stack.gateway.url}/v1/completions", json={**body, "logprobs": 1}, timeout=180)
    assert refused.status_code == 422
    assert "the tokenizer of writer is not here" in refused.json()["error"]["message"]
    assert httpx.post(f"{stack.gateway.url}/v1/completions", json=body, timeout=180).status_code == 200
