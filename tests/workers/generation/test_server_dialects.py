"""vLLM and TGI behind `runtime_url`: each obeys what is sent to it, and what it does not obey is never sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError, InvalidInput, ModelError
from penstock.registry.generation_inputs import checked
from penstock.registry.package import ModelSpec
from penstock.registry.package.generation import Generation, with_signature
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.backend import Delivered, Wish
from penstock.workers.generation.chat import ChatPrompt
from penstock.workers.generation.outputs import RequestOutput, Usage
from penstock.workers.generation.prompts import Prompt
from penstock.workers.generation.server_backend import ServerBackend
from penstock.workers.generation.tool_calls import ToolCall
from tests.workers.generation.text_dialects import FORM, TEXT, tgi, vllm
from tests.workers.generation.text_servers import Asked, Reply, TextServer, chat_event, usage

WHOLE = "".join(TEXT)
CHAT = ChatPrompt([{"role": "user", "content": "a"}], [])
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
FORMS: list[dict[str, Any]] = [
    {"json_schema": {"type": "object"}},
    {"regex": "[ab]+"},
    {"choice": ["a", "b"]},
    {"grammar": "start: /a+/"},
]
VALUES: dict[str, Any] = {
    "max_tokens": 7,
    "n": 2,
    "best_of": 2,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 2,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {3: 1.0},
    "bad_words": ["b"],
    "allowed_token_ids": [3, 4],
    "timeout_s": 30.0,
    "json_schema": {"type": "object"},
    "regex": "[ab]+",
    "choice": ["a", "b"],
    "grammar": "start: /a+/",
}
"""Each sampling field with a value that is not its default."""
VLLM_REFUSES = {"best_of", "logprobs", "prompt_logprobs", "bad_words"}
TGI_CHAT_OBEYS = {"max_tokens", "temperature", "top_p", "seed", "stop", "timeout_s", "json_schema", "regex"}


@contextmanager
def serving(answer: Callable[[Asked], Reply], **options: Any) -> Iterator[tuple[TextServer, ServerBackend]]:
    with TextServer(answer) as server:
        yield server, ServerBackend(Generation(runtime_url=server.url, **options), "writer", (), {})


def read(
    backend: ServerBackend, prompt: Prompt | ChatPrompt = "a", deltas: list[str] | None = None, **wish: Any
) -> RequestOutput:
    """The last output. deltas: where what a subscriber gets is kept."""

    def sink(output: RequestOutput) -> bool:
        if deltas is not None:
            deltas.append(output.delta_text)
        return False

    params = SamplingParams(**wish.pop("params", {}))
    answer = backend.open(Wish("job", prompt, params, sink=sink, **wish))
    try:
        while (found := answer.next(1.0)) is None or not found.finished:
            pass
        return found
    finally:
        answer.close()


@pytest.mark.parametrize("is_old", [False, True], ids=["structured_outputs", "guided"])
@pytest.mark.parametrize("prompt", ["a", [1, 2], CHAT], ids=["prompt", "token ids", "chat"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_vllm_obeys_each_form(form: dict[str, Any], prompt: Any, is_old: bool):
    """It ignores names that it does not know: by a wrong name the text would be any text."""
    with serving(vllm(is_old=is_old), runtime_kind="vllm") as (_, backend):
        assert read(backend, prompt, params=form).outputs[0].text == FORM
        assert read(backend, prompt).outputs[0].text == WHOLE


def test_form_in_openais_names_is_no_form_for_vllm():
    """The control: the same server behind `runtime_kind: openai` writes any text, which is why the kinds exist."""
    with serving(vllm(), runtime_fields=("regex",)) as (_, backend):
        assert read(backend, params={"regex": "[ab]+"}).outputs[0].text == WHOLE


def test_vllm_gets_each_field_that_the_model_might_fill_in():
    """It takes those that are left out from the model's generation_config.json: the text would be another one."""
    with serving(vllm(), runtime_kind="vllm") as (server, backend):
        read(backend, params={"temperature": 0})
        read(backend, params={"top_k": 5, "top_p": 0.5})
        first, second = (each.body for each in server.asked)
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    assert [first[name] for name in names] == [1, -1, 0, 1]
    assert [second[name] for name in names] == [0.5, 5, 0, 1]


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
@pytest.mark.parametrize("is_chat", [False, True], ids=["prompt", "chat"])
@pytest.mark.parametrize("kind", ["vllm", "tgi"])
def test_each_field_is_sent_or_refused_by_name(kind: Any, is_chat: bool, name: str):
    """None is dropped on the way, and nothing is asked with a field that the server does not obey."""
    obeyed = TGI_CHAT_OBEYS | (set() if is_chat else {"top_k", "repetition_penalty"})
    is_obeyed = name not in VLLM_REFUSES if kind == "vllm" else name in obeyed
    with serving(vllm() if kind == "vllm" else tgi, runtime_kind=kind) as (server, backend):
        prompt = CHAT if is_chat else "a"
        if not is_obeyed:
            with pytest.raises(InvalidInput, match=f"^{name}: found a value, expected none: the server of this"):
                read(backend, prompt, params={name: VALUES[name]})
            assert server.asked == []
            return
        if name == "n":
            answer = backend.open(Wish("job", prompt, SamplingParams(n=2)))
            answer.next(1.0)
            answer.close()
        else:
            read(backend, prompt, params={name: VALUES[name]})
            read(backend, prompt)
        if name != "timeout_s":
            assert len({json.dumps(asked.body) for asked in server.asked}) == len(server.asked)


def test_tgi_writes_prompts_by_its_own_route():
    """Without OpenAI's names, and without temperature 0, which it refuses. The end is no text."""
    deltas: list[str] = []
    with serving(tgi, runtime_kind="tgi") as (server, backend):
        params = {"max_tokens": 9, "temperature": 0.5, "top_k": 4, "seed": 2**64 - 1, "repetition_penalty": 1.1}
        found = read(backend, "größe", deltas, params=params)
        read(backend, params={"temperature": 0})
    assert "".join(deltas) == found.outputs[0].text == WHOLE
    assert (found.outputs[0].finish_reason, found.usage) == ("stop", Usage(3, 6, 0))
    assert (server.asked[0].path, server.asked[0].body) == (
        "/generate_stream",
        {
            "inputs": "größe",
            "parameters": {
                "max_new_tokens": 9,
                "details": True,
                "do_sample": True,
                "temperature": 0.5,
                "seed": 2**63 - 1,
                "top_k": 4,
                "repetition_penalty": 1.1,
            },
        },
    )
    assert server.asked[1].body["parameters"] == {"max_new_tokens": 128, "details": True, "do_sample": False}


@pytest.mark.parametrize("prompt", ["a", CHAT], ids=["prompt", "chat"])
@pytest.mark.parametrize("form", FORMS[:2], ids=lambda form: next(iter(form)))
def test_tgi_obeys_its_forms(form: dict[str, Any], prompt: Any):
    """A schema and a regular expression."""
    with serving(tgi, runtime_kind="tgi") as (_, backend):
        assert read(backend, prompt, params=form).outputs[0].text == FORM


@pytest.mark.parametrize("prompt", ["a", CHAT], ids=["prompt", "chat"])
@pytest.mark.parametrize(("stop", "text"), [("ee.", "one two thr"), ("two thr", "one "), ("ree", "one two th")])
def test_stop_string_is_cut_that_tgi_leaves_in_the_text(prompt: Any, stop: str, text: str):
    """Also one that ends inside a token, or spans several. Nothing of it is delivered."""
    deltas: list[str] = []
    with serving(tgi, runtime_kind="tgi") as (_, backend):
        found = read(backend, prompt, deltas, params={"stop": [stop]})
    assert "".join(deltas) == found.outputs[0].text == text
    assert found.outputs[0].finish_reason == "stop"


def test_end_that_was_no_stop_string_is_delivered():
    """It is held back while it may become one."""
    deltas: list[str] = []
    with serving(tgi, runtime_kind="tgi") as (_, backend):
        found = read(backend, "a", deltas, params={"stop": [" fourteen"]})
    assert " four" in deltas
    assert "".join(deltas) == found.outputs[0].text == WHOLE


def test_tgi_takes_no_token_ids():
    """Refused by name, before it is sent, as is a form beside tools."""
    with serving(tgi, runtime_kind="tgi") as (server, backend):
        with pytest.raises(InvalidInput, match="prompt_token_ids: found some, expected prompt: the server of this mod"):
            read(backend, [1, 2])
        with pytest.raises(InvalidInput, match="regex: found beside tools, expected one of both"):
            read(backend, ChatPrompt(CHAT.messages, TOOLS), params={"regex": "a"})
        assert server.asked == []


def test_what_a_server_does_not_obey_is_refused_before_it_is_queued():
    """A client knows the kind from the spec."""
    generate = {"runtime_url": "http://127.0.0.1:1", "runtime_kind": "tgi"}
    spec = ModelSpec.model_validate(
        with_signature({"name": "relay", "version": "1", "format": "generate", "generate": generate})
    )
    for inputs, expected in (
        ({"prompt": "a", "sampling_params": {"n": 2}}, "n: found a value"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids: found some"),
        (
            {"messages": CHAT.messages, "tools": TOOLS, "sampling_params": {"regex": "a"}},
            "regex: found beside tools",
        ),
    ):
        with pytest.raises(InvalidInput, match=expected):
            checked(spec, inputs)
    assert checked(spec, {"prompt": "a", "sampling_params": {"top_k": 4}})["prompt"] == ["a"]


@pytest.mark.parametrize("is_list", [False, True])
def test_call_of_a_tool_comes_alone_or_in_a_list(is_list: bool):
    """TGI before 3 sends one; later versions and others send a list."""
    call = {"index": 0, "id": "x", "function": {"name": "weather", "arguments": "{}"}}
    events = [chat_event("stop", tool_calls=[call] if is_list else call), usage(), "[DONE]"]
    prompt = ChatPrompt(CHAT.messages, TOOLS)
    with serving(lambda _: Reply(events), runtime_kind="tgi") as (_, backend):
        (message,) = backend.messages(read(backend, prompt), prompt)
    assert message.tool_calls == (ToolCall("weather", "{}"),)


def test_tgi_that_breaks_off_is_asked_again():
    """Its answers have no [DONE]: one without the last token's details is not whole."""
    replies: list[Reply] = []

    def answer(asked: Asked) -> Reply:
        whole = tgi(asked)
        replies.append(whole)
        return Reply(list(whole.events)[:2]) if len(replies) == 1 else whole

    deltas: list[str] = []
    with serving(answer, runtime_kind="tgi") as (_, backend):
        found = read(backend, "a", deltas, delivered=Delivered((), "on"))
    assert found.outputs[0].text == WHOLE
    assert "".join(deltas) == WHOLE.removeprefix("on")
    assert len(replies) == 2


def test_event_of_another_server_is_a_clear_error():
    """A server with OpenAI's events under the name of TGI, and an error in the stream."""
    with (
        serving(lambda _: Reply([json.dumps({"choices": []})]), runtime_kind="tgi") as (_, backend),
        pytest.raises(ModelError, match=r"none of a text\. Expected TGI's form"),
    ):
        read(backend)
    failed = json.dumps({"error": "Request failed during generation", "error_type": "generation"})
    with (
        serving(lambda _: Reply([failed]), runtime_kind="tgi") as (_, backend),
        pytest.raises(ModelError, match="The text server failed: Request failed during generation"),
    ):
        read(backend)


def test_refusal_of_tgi_is_told():
    """The job fails with its reason, which is not that of OpenAI's form."""
    with (
        serving(lambda _: Reply(status=422, body='{"error": "too long", "error_type": "validation"}')) as (_, backend),
        pytest.raises(InvalidInput, match=r"refused the request \(422\): too long"),
    ):
        read(backend)


def test_kind_needs_a_server_and_tgi_needs_no_fields():
    """Refused when the package is read."""
    with pytest.raises(ValueError, match="runtime_kind: found without runtime_url"):
        Generation(runtime_kind="vllm")
    with pytest.raises(ValueError, match="runtime_fields: found some beside runtime_kind tgi, expected none"):
        Generation(runtime_url="http://a:1", runtime_kind="tgi", runtime_fields=("top_k",))
    with pytest.raises(ConfigurationError):
        ServerBackend(Generation(runtime_kind="openai"), "writer", (), {})
