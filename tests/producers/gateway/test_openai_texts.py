"""OpenAI's client, unchanged: completions of a small model with random weights, against the engine alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.texts import Site, client_of
from tests.servers import require_module, wait_until

PROMPTS = ["the stream", "größe, naïve", "日本語"]
MESSAGES = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": [{"type": "text", "text": "grüß dich"}]},
]
CHAT_PROMPT = "system: short\nuser: grüß dich\nassistant:"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "ü"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def openai(site: Site) -> Iterator[Any]:
    """OpenAI's client, without its own retries."""
    with client_of(site.gateway) as client:
        yield client


def test_completion(openai: Any, site: Site):
    """ES-042: text, reason, and the tokens that the model's tokenizer counts (ES-057)."""
    answer = openai.completions.create(model="writer", prompt=PROMPTS[0], max_tokens=24, **GREEDY)
    assert answer.choices[0].text == site.expected(PROMPTS[0])
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", "writer", "length")
    count = len(site.tokens(PROMPTS[0]))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        *(count, 24),
        count + 24,
    )


def test_completions_of_several_prompts(openai: Any, site: Site):
    """In their order, as texts and as tokens; each may be echoed."""
    texts = openai.completions.create(model="writer", prompt=PROMPTS, max_tokens=24, echo=True, **GREEDY)
    wanted = [site.expected(prompt) for prompt in PROMPTS]
    assert [each.text for each in texts.choices] == [a + b for a, b in zip(PROMPTS, wanted, strict=True)]
    tokens = openai.completions.create(
        model="writer", prompt=[site.tokens(prompt) for prompt in PROMPTS], max_tokens=24, **GREEDY
    )
    assert [each.text for each in tokens.choices] == wanted
    assert [each.index for each in tokens.choices] == [0, 1, 2]
    assert tokens.usage.prompt_tokens == sum(len(site.tokens(prompt)) for prompt in PROMPTS)


def test_stream_is_the_whole_text(openai: Any, site: Site):
    """ES-041: the chunks of each prompt join to its text; the last chunk has the usage, where it is asked for."""
    chunks = list(
        openai.completions.create(
            model="default",
            prompt=PROMPTS,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    last = chunks.pop()
    assert (last.choices, last.usage.completion_tokens) == ([], 72)
    assert {chunk.usage for chunk in chunks} == {None}
    texts = ["", "", ""]
    reasons: list[list[str]] = [[], [], []]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [site.expected(prompt) for prompt in PROMPTS]
    assert reasons == [["length"]] * 3
    assert len(chunks) > 6


@pytest.mark.parametrize("wish", [None, {}, {"include_usage": None}])
def test_stream_options_may_be_null(site: Site, wish: Any):
    """Null is the same as a missing field: programs write the fields that they do not use as null."""
    body = {"model": "writer", "prompt": "a", "max_tokens": 2, "stream": True, "stream_options": wish}
    answer = httpx.post(f"{site.gateway.url}/v1/completions", json=body, timeout=180)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    assert {json.loads(line)["usage"] for line in lines} == {None}


def test_a_text_that_fails_takes_those_beside_it_along(site: Site, stack: GatewayStack):
    """The request has failed, so that no client gets them: they are cancelled, and do not keep the engine."""
    prompts = ["日本" * 200, *(f"{number}" for number in range(60))]
    body = {"model": "writer", "prompt": prompts, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    with stack.server.client() as redis, httpx.Client(base_url=site.gateway.url, timeout=180) as http:
        before = {*redis.scan_iter("{writer}:job:*")}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 422, answer.text
        assert "max_model_len" in answer.json()["error"]["message"]
        others = {f"writer.{key.decode().split(':')[2]}" for key in {*redis.scan_iter("{writer}:job:*")} - before}

        def states() -> list[str]:
            return [http.get(f"/v1/jobs/{name}").json()["status"] for name in others]

        wait_until(lambda: not {"queued", "running"} & {*states()}, 60, "all of them have ended")
        assert len(others) == 61
        assert "cancelled" in states()


def test_choices_differ_and_can_be_repeated(openai: Any, site: Site):
    """Each of n texts has a seed of its own; the prompt counts once."""
    wish = {"model": "writer", "prompt": PROMPTS[0], "max_tokens": 12, "n": 3, "seed": 5}
    first, again = (openai.completions.create(**wish, extra_body={"ignore_eos": True}) for _ in range(2))
    texts = [each.text for each in first.choices]
    assert texts == [each.text for each in again.choices]
    assert texts == [site.expected(PROMPTS[0], 12, temperature=1.0, seed=5 + choice) for choice in range(3)]
    assert len(set(texts)) == 3
    assert first.usage.prompt_tokens == len(site.tokens(PROMPTS[0]))


def test_stop_ends_the_text_before_it(openai: Any, site: Site):
    """As a text and as a stream."""
    whole = site.expected(PROMPTS[0])
    stop = whole[5:8]
    wish = {"model": "writer", "prompt": PROMPTS[0], "max_tokens": 24, "stop": [stop, "never"], **GREEDY}
    answer = openai.completions.create(**wish)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    streamed = "".join(chunk.choices[0].text for chunk in openai.completions.create(**wish, stream=True))
    assert streamed == answer.choices[0].text


def test_a_conversation_goes_on_turn_by_turn(openai: Any):
    """ES-058: each answer is streamed, ends at a stop text at the latest, and is part of the next question."""
    wish = {"model": "writer", "max_tokens": 12, "stop": ["</s>", "\n\nYou:"], **GREEDY}
    conversation = [{"role": "system", "content": "You answer."}]
    for question in ("one", "two"):
        conversation.append({"role": "user", "content": question})
        stream = openai.chat.completions.create(messages=conversation, stream=True, **wish)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        conversation.append({"role": "assistant", "content": text})
    whole = openai.chat.completions.create(messages=conversation[:-1], **wish)
    assert whole.choices[0].message.content == conversation[-1]["content"] != ""


def test_job_is_the_same_in_every_protocol(site: Site):
    """The id of an answer is that of its job, which the other routes show; a repeated key gives the same one."""
    body = {"model": "writer", "prompt": "a", "max_tokens": 4}
    with httpx.Client(base_url=site.gateway.url) as http:
        answers = [
            http.post("/v1/completions", json=body, headers={"Idempotency-Key": "texts-1"}, timeout=180)
            for _ in range(2)
        ]
        job_id = answers[0].headers["penstock-job-id"]
        assert [answer.json()["id"] for answer in answers] == [f"cmpl-{job_id}"] * 2
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "completed"


def test_a_text_that_runs_out_of_time_ends_as_it_is(openai: Any):
    """OpenAI has no word for that: its clients read `length`."""
    body = {"ignore_eos": True, "timeout_s": 0.001}
    answer = openai.completions.create(model="writer", prompt="a", max_tokens=200, temperature=0, extra_body=body)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens < 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": ""}, "prompt: found none, an empty one"),
        ({"prompt": []}, "prompt: found none, an empty one"),
        ({"prompt": ["a", [1]]}, "a mixture"),
        ({"prompt": "a", "n": 0}, "n is 0. Expected 1 or more"),
        ({"prompt": "a", "n": 129}, "Found 129 texts in one request. Expected 1 to 128"),
        ({"prompt": "a", "n": 1 << 62, "logprobs": 1}, "texts in one request. Expected 1 to 128"),
        ({"prompt": ["a"] * 129}, "Found 129 texts in one request. Expected 1 to 128"),
        ({"prompt": "a", "top_p": 0}, "top_p: found 0"),
        ({"prompt": "a", "suffix": "b"}, "suffix: found a text"),
        ({"prompt": "a", "logprobs": 21}, "logprobs: found 21, expected an integer from 0 to 20"),
        ({"prompt": "a", "logprobs": 2, "echo": True}, "logprobs: found a number beside echo"),
        ({"prompt": "a", "best_of": 2}, "best_of is 2"),
        ({"prompt": [1], "echo": True}, "echo: found true beside tokens"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: found 'x', expected an integer"),
        ({"prompt": "a", "max_tokens": 256}, "Expected at most 256 together"),
        ({"prompt": "a", "model": "double"}, "double generates no text"),
    ],
)
def test_bad_requests_are_refused(site: Site, fields: dict[str, Any], expected: str):
    """422 in OpenAI's shape, with what was expected; also of a stream."""
    for stream in (False, True):
        body = {"model": "writer", "stream": stream, **fields}
        answer = httpx.post(f"{site.gateway.url}/v1/completions", json=body, timeout=180)
        assert answer.status_code == 422, answer.text
        assert expected in answer.json()["error"]["message"]


def test_error_of_a_running_job_is_told_in_its_stream(openai: Any):
    """Only the worker counts the tokens of a text: its refusal is the error of the request."""
    module = require_module("openai")
    with pytest.raises(module.APIError, match="max_model_len"):
        list(openai.completions.create(model="writer", prompt="日本" * 200, max_tokens=10, stream=True))
    with pytest.raises(module.APIStatusError, match="max_model_len"):
        openai.completions.create(model="writer", prompt="日本" * 200, max_tokens=10)


def test_a_stream_of_a_gateway_that_stops_is_an_error(site: Site, start_gateway: StartGateway):
    """Its text is not whole, and clients would take an end without an error for the end of the text."""
    module = require_module("openai")
    gateway = start_gateway()
    site.worker.freeze()
    try:
        with client_of(gateway) as client:
            chunks = client.chat.completions.create(model="writer", messages=MESSAGES, stream=True)
            assert next(chunks).choices[0].delta.role == "assistant"
            gateway.terminate()
            with pytest.raises(module.APIError, match=r"This process stops\. Expected a retry"):
                list(chunks)
    finally:
        site.worker.thaw()


def test_chat(openai: Any, site: Site):
    """ES-041: the model's own template makes the prompt; the stream joins to the same answer."""
    wish = {"model": "writer", "messages": MESSAGES, "max_completion_tokens": 24, **GREEDY}
    answer = openai.chat.completions.create(**wish)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", site.expected(CHAT_PROMPT))
    assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 24)
    chunks = list(openai.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], answer.usage.total_tokens)
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[0].delta.role == "assistant"
    assert "".join(each.delta.content or "" for each in deltas) == choice.message.content
    assert [each.finish_reason for each in deltas if each.finish_reason] == ["length"]


def test_the_asyncio_client_streams(site: Site):
    """`AsyncOpenAI`: streams at a time, each of which joins to the text of the engine."""

    async def text(client: Any) -> str:
        wish = {"model": "writer", "messages": MESSAGES, "max_completion_tokens": 24, **GREEDY}
        chunks = await client.chat.completions.create(**wish, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask() -> list[str]:
        module = require_module("openai")
        address = f"{site.gateway.url}/v1"
        async with module.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(text(client) for _ in range(3)))

    assert asyncio.run(ask()) == [site.expected(CHAT_PROMPT)] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(openai: Any, stream: bool):
    """ES-056: the output is parsed; a regular expression makes a model with random weights write a call."""
    pattern = CALL.replace("{", r"\{").replace("}", r"\}")
    wish = {
        "model": "writer",
        "messages": MESSAGES,
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 120,
        "stream": stream,
        "extra_body": {"regex": pattern},
    }
    answer = openai.chat.completions.create(**wish)
    if stream:
        last = [chunk.choices[0] for chunk in answer][-1]
        message, reason = last.delta, last.finish_reason
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
    (call,) = message.tool_calls
    assert (reason, message.content) == ("tool_calls", None)
    assert (call.type, call.function.name, call.function.arguments) == ("function", "look", '{"at": "ü"}')
    assert call.id.startswith("call_")


@pytest.mark.parametrize("choice", [{}, {"function_call": "auto"}])
def test_calls_of_functions(openai: Any, choice: dict[str, str]):
    """ES-056: the older form of the same; its answers go back as messages of the older form."""
    pattern = CALL.replace("{", r"\{").replace("}", r"\}")
    wish = {"model": "writer", "temperature": 0, "max_tokens": 120, "extra_body": {"regex": pattern}}
    first = openai.chat.completions.create(**wish, **choice, messages=MESSAGES, functions=[TOOL["function"]])
    assert first.choices[0].finish_reason == "function_call"
    message = first.choices[0].message
    assert (message.content, message.function_call.name) == (None, "look")
    answered = [
        *MESSAGES,
        message.model_dump(exclude_none=True),
        {"role": "function", "name": "look", "content": "a river"},
    ]
    second = openai.chat.completions.create(
        **wish, messages=answered, functions=[TOOL["function"]], function_call="none"
    )
    # Nothing was to be called: the text is content.
    assert second.choices[0].message.content == CALL


def test_json_of_a_schema(openai: Any):
    """`response_format`: the content is JSON of the schema."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = openai.chat.completions.create(
        model="writer",
        messages=MESSAGES,
        temperature=0,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": []}, "messages: found an empty list"),
        ({"n": 129}, "Found 129 texts in one request. Expected 1 to 128"),
        ({"n": 1 << 62, "logprobs": True}, "texts in one request. Expected 1 to 128"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role: found 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "expected parts of type text"),
        ({"tools": [{"type": "x"}]}, "tools[0]: found"),
        ({"tools": [TOOL], "functions": [TOOL["function"]]}, "Found tools and functions"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice: found another value"),
        ({"functions": [TOOL["function"]], "function_call": {"name": "look"}}, "function_call: found another value"),
        ({"response_format": {"type": "xml"}}, "response_format: found another form"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21. Expected 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs: found a number without logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "json_schema"),
    ],
)
def test_bad_chats_are_refused(site: Site, fields: dict[str, Any], expected: str):
    """422 in OpenAI's shape, with what was expected."""
    body = {"model": "writer", "messages": MESSAGES, **fields}
    answer = httpx.post(f"{site.gateway.url}/v1/chat/completions", json=body, timeout=180)
    assert answer.status_code == 422, answer.text
    assert expected in answer.json()["error"]["message"]
