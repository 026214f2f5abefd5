"""Lines of chats and completions in OpenAI's batches, through OpenAI's client, against the engine alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.producers.gateway.test_openai_batches import answers, create, ended
from tests.producers.gateway.texts import Site, client_of

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GREEDY = {"model": "writer", "temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture
def openai(site: Site) -> Iterator[Any]:
    """OpenAI's client, without its own retries."""
    with client_of(site.gateway) as client:
        yield client


def line(custom_id: str, url: str, **body: Any) -> str:
    """A line with the fields of every request."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {**GREEDY, **body}})


def chat(text: str) -> list[dict[str, str]]:
    """One message."""
    return [{"role": "user", "content": text}]


def test_lines_of_chats(openai: Any, site: Site):
    """Each line has the answer of its chat, with its tokens; broken lines fail alone, with a reason."""
    texts = {f"chat-{number}": f"text {number}" for number in range(12)}
    lines = [line(name, CHATS, messages=chat(text)) for name, text in texts.items()]
    bad = {
        "role": line("role", CHATS, messages=[{"role": "robot", "content": "a"}]),
        "stream": line("stream", CHATS, messages=chat("a"), stream=True),
        "priority": line("priority", CHATS, messages=chat("a"), priority="high"),
        "model": line("model", CHATS, messages=chat("a"), model="nothing"),
        "double": line("double", CHATS, messages=chat("a"), model="double"),
        "url": line("url", COMPLETIONS, prompt="a"),
        "long": line("long", CHATS, messages=chat("日本" * 200)),
        "greedy": line("greedy", CHATS, messages=chat("a"), n=2),
        "huge": line("huge", CHATS, messages=chat("a"), n=1 << 62, temperature=1, logprobs=True),
    }
    for place, text in enumerate(bad.values()):
        lines.insert(2 * place, text)
    lines.append(
        line("several", CHATS, messages=chat("a"), n=3, seed=5, temperature=1, logprobs=True, max_completion_tokens=8)
    )
    batch = ended(openai, create(openai, lines, CHATS).id)
    found, failed = answers(openai, batch.output_file_id), answers(openai, batch.error_file_id)
    assert batch.status == "completed"
    assert found.keys() == {*texts, "several"}
    assert failed.keys() == bad.keys()
    assert all("xpected" in json.dumps(entry) for entry in failed.values())
    for name, text in texts.items():
        prompt, response = f"user: {text}\nassistant:", found[name]["response"]
        body = response["body"]
        assert body["choices"][0]["message"]["content"] == site.expected(prompt, 12)
        assert (body["object"], body["model"]) == ("chat.completion", "writer")
        assert body["id"] == f"chatcmpl-{response['request_id']}"
        count = len(site.tokens(prompt))
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (count, 12, count + 12)
    several = found["several"]["response"]["body"]
    wanted = [site.expected("user: a\nassistant:", 8, temperature=1.0, seed=5 + index) for index in range(3)]
    assert [choice["message"]["content"] for choice in several["choices"]] == wanted
    assert [len(choice["logprobs"]["content"]) for choice in several["choices"]] == [8, 8, 8]
    assert several["usage"]["completion_tokens"] == 24


def test_lines_of_completions(openai: Any, site: Site):
    """A text or a list of tokens; several prompts are several lines."""
    lines = [
        line("text", COMPLETIONS, prompt="the stream", echo=True),
        line("tokens", COMPLETIONS, prompt=site.tokens("the stream")),
        line("two", COMPLETIONS, prompt=["a", "b"]),
        line("cut", COMPLETIONS, prompt="a")[:-9],
    ]
    batch = ended(openai, create(openai, lines, COMPLETIONS).id)
    found, failed = answers(openai, batch.output_file_id), answers(openai, batch.error_file_id)
    expected = site.expected("the stream", 12)
    choices = {name: entry["response"]["body"]["choices"] for name, entry in found.items()}
    assert {name: [each["text"] for each in every] for name, every in choices.items()} == {
        "text": ["the stream" + expected],
        "tokens": [expected],
    }
    assert failed["two"]["response"]["status_code"] == 422
    assert "a line of the batch for each" in failed["two"]["response"]["body"]["error"]["message"]
    assert failed["cut"]["error"]["code"] == "invalid_request"
