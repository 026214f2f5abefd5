"""OpenAI's responses, through OpenAI's client: one job behind each, which is read, followed, resumed and cancelled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack
from tests.producers.gateway.texts import Site, client_of
from tests.servers import require_module, wait_until

PROMPT = "system: short\nuser: grüß dich\nassistant:"
WISH: dict[str, Any] = {"model": "writer", "instructions": "short", "input": "grüß dich", "max_output_tokens": 24}
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "ü"}}</tool_call>'
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
CALLS = {"temperature": 0, "extra_body": {"choice": [CALL, CALL + " "]}, "max_output_tokens": 120}
LONG = {**WISH, "max_output_tokens": 200, **GREEDY}
"""Steps enough to be seen while it runs."""


@pytest.fixture
def openai(site: Site) -> Iterator[Any]:
    """OpenAI's client, without its own retries."""
    with client_of(site.gateway) as client:
        yield client


def ended(openai: Any, response_id: str) -> Any:
    """The response, once it has ended."""

    def found() -> Any:
        response = openai.responses.retrieve(response_id)
        return None if response.status in ("queued", "in_progress") else response

    return wait_until(found, 60, "the response has ended")


def kinds(events: Sequence[Any]) -> list[str]:
    """The types of events, equal ones in a row once."""
    types = [event.type.removeprefix("response.") for event in events]
    return [each for at, each in enumerate(types) if not at or types[at - 1] != each]


def is_gone(site: Site, name: str) -> bool:
    """Whether there is no such response any more."""
    return httpx.get(f"{site.gateway.url}/v1/responses/{name}").status_code == 404


def plain(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Events as values."""
    return [event.to_dict() for event in events]


def test_response(openai: Any, site: Site):
    """Instructions and a text; what ends at its length is incomplete."""
    answer = openai.responses.create(**WISH, **GREEDY)
    assert answer.output_text == site.expected(PROMPT)
    assert (answer.object, answer.model, answer.status) == ("response", "writer", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    count = len(site.tokens(PROMPT))
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (count, 24, count + 24)
    assert openai.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    whole = openai.responses.create(**WISH, temperature=0, extra_body={"choice": ["yes", "no"]})
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    assert whole.output_text in ("yes", "no")


def test_items_are_the_messages_of_a_chat(openai: Any, site: Site):
    """Messages with parts, and the output of an earlier response as it is."""
    first = openai.responses.create(**WISH, **GREEDY)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "grüß "}, {"type": "input_text", "text": "dich"}]},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": "more"},
    ]
    second = openai.responses.create(**{**WISH, "input": items}, **GREEDY)
    prompt = f"system: short\nuser: grüß dich\nassistant: {first.output_text}\nuser: more\nassistant:"
    assert second.output_text == site.expected(prompt)


def test_stream(openai: Any, site: Site):
    """Numbers without gap, the beginning and the end of each part, and the whole response at the end."""
    events = list(openai.responses.create(**WISH, **GREEDY, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    text = site.expected(PROMPT)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.text for event in events if event.type == "response.output_text.done"] == [text]
    last = events[-1].response
    assert last.to_dict() == openai.responses.retrieve(last.id).to_dict()
    assert events[0].response.id == last.id


def test_stream_is_resumed_behind_any_number(openai: Any, stack: GatewayStack, site: Site):
    """By another gateway process, too: the events behind the number, as they were, and no other."""
    with openai.responses.create(**LONG, background=True, stream=True) as stream:
        seen = [next(stream) for _ in range(6)]
    name = seen[0].response.id
    assert [event.sequence_number for event in seen] == list(range(6))
    with client_of(stack.gateway) as other:
        rest = list(other.responses.retrieve(name, stream=True, starting_after=5))
    whole = list(openai.responses.retrieve(name, stream=True))
    assert plain(whole) == plain([*seen, *rest])
    assert whole[-1].response.output_text == site.expected(PROMPT, 200)
    for number in (0, 3, len(whole) - 2, len(whole) - 1):
        later = list(openai.responses.retrieve(name, stream=True, starting_after=number))
        assert plain(later) == plain(whole[number + 1 :])
    with pytest.raises(require_module("openai").APIStatusError, match="Expected starting_after below that"):
        list(openai.responses.retrieve(name, stream=True, starting_after=len(whole)))


def test_background_goes_on_without_its_client(openai: Any, site: Site):
    """It is queued at once, and read later; its job is the one of its id."""
    begun = openai.responses.create(**WISH, **GREEDY, background=True)
    assert (begun.status, begun.output, begun.usage) == ("queued", [], None)
    answer = ended(openai, begun.id)
    assert (answer.output_text, answer.created_at) == (site.expected(PROMPT), begun.created_at)
    job = httpx.get(f"{site.gateway.url}/v1/jobs/{begun.id.removeprefix('resp_')}").json()
    assert job["status"] == "completed"


def test_cancel(openai: Any):
    """A response that runs ends; one that has ended stays as it is."""
    with openai.responses.create(**LONG, background=True, stream=True) as stream:
        name = next(stream).response.id
        openai.responses.cancel(name)
        found = ended(openai, name)
        # A fast machine may have written it all.
        assert found.status in ("cancelled", "incomplete")
        last = list(stream)[-1]
    assert last.type == ("response.failed" if found.status == "cancelled" else "response.incomplete")
    assert last.response.status == found.status
    assert openai.responses.cancel(name).status == found.status


def test_a_waiting_response_is_cancelled(openai: Any, site: Site):
    """One whose turn has not come never runs."""
    names = [openai.responses.create(**LONG, background=True).id for _ in range(24)]
    openai.responses.cancel(names[-1])
    found = ended(openai, names[-1])
    assert (found.status, found.output) == ("cancelled", [])
    for name in names:
        openai.responses.cancel(name)


def test_delete(openai: Any, site: Site):
    """Its result is gone in every protocol; `store: false` does the same after the answer."""
    module = require_module("openai")
    answers = [
        openai.responses.create(**WISH, **GREEDY),
        openai.responses.create(**WISH, **GREEDY, store=False),
        list(openai.responses.create(**WISH, **GREEDY, store=False, stream=True))[-1].response,
    ]
    openai.responses.delete(answers[0].id)
    for answer in answers:
        assert answer.output_text == site.expected(PROMPT)

        # With `store: false` the answer comes before the deletion.
        wait_until(partial(is_gone, site, answer.id), 30, "the result is deleted")
        with pytest.raises(module.NotFoundError):
            openai.responses.retrieve(answer.id)
        assert httpx.get(f"{site.gateway.url}/v1/jobs/{answer.id.removeprefix('resp_')}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_functions(openai: Any, stream: bool):
    """In the flat form; their outputs go back as items."""
    wish = {"model": "writer", "input": "look", "tools": [TOOL], **CALLS}
    answer = openai.responses.create(**wish, stream=stream)
    if stream:
        events = list(answer)
        assert kinds(events) == [
            *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
        answer = events[-1].response
        assert plain(list(openai.responses.retrieve(answer.id, stream=True))) == plain(events)
    (call,) = answer.output
    assert (answer.status, call.type, call.name, json.loads(call.arguments)) == (
        *("completed", "function_call", "look"),
        {"at": "ü"},
    )
    assert openai.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a river"}
    items = [{"role": "user", "content": "look"}, call.to_dict(), output]
    again = openai.responses.create(**{**wish, "input": items}, tool_choice="none")
    # Nothing was to be called: the text is content.
    assert again.output_text.rstrip() == CALL


def test_json_of_a_schema(openai: Any):
    """`text.format`: the text is JSON of the schema."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    answer = openai.responses.create(**{**WISH, "max_output_tokens": 100}, temperature=0, text=text)
    assert set(json.loads(answer.output_text)) == {"ok"}


def test_a_failed_response_says_why(openai: Any):
    """Only the worker counts tokens: at once as an error, in the background and in a stream as a failed response."""
    module = require_module("openai")
    wish = {"model": "writer", "input": "日本" * 200}
    with pytest.raises(module.APIStatusError, match="max_model_len"):
        openai.responses.create(**wish)
    found = ended(openai, openai.responses.create(**wish, background=True).id)
    assert (found.status, found.error.code) == ("failed", "invalid_prompt")
    assert "max_model_len" in found.error.message
    last = list(openai.responses.create(**wish, stream=True))[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "invalid_prompt")


def test_a_client_that_goes_takes_its_response_along(site: Site):
    """Without `background`."""
    body = {**WISH, "max_output_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=site.gateway.url, timeout=180) as http:
        with http.stream("POST", "/v1/responses", json=body) as answer:
            assert next(answer.iter_lines()) == "event: response.created"
            job_id = answer.headers["penstock-job-id"]
        assert http.get(f"/v1/jobs/{job_id}?wait=60").json()["status"] in ("cancelled", "completed")


def test_a_repeated_key_is_the_same_response(site: Site):
    """As on every route."""
    body = {**WISH, "background": True}
    answers = [
        httpx.post(
            f"{site.gateway.url}/v1/responses", json=body, headers={"Idempotency-Key": "response-1"}, timeout=180
        )
        for _ in range(2)
    ]
    assert len({answer.json()["id"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("fields", "status", "expected"),
    [
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id: found one. Expected the whole conversation"),
        ({"conversation": "conv_1"}, 400, "conversation: found one. Expected the whole conversation"),
        ({"prompt": {"id": "p"}}, 422, "prompt: found a template"),
        ({"input": []}, 422, "input: found an empty list"),
        ({"input": [{"role": "robot", "content": "a"}]}, 422, "role: found 'robot'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 422, "expected parts of type input_text"),
        ({"input": [{"type": "reasoning", "summary": []}]}, 422, "input[0].type: found 'reasoning', expected messages"),
        ({"input": [{"type": "function_call"}]}, 422, "input[0]: found a call without a name"),
        ({"tools": [{"type": "web_search"}]}, 422, "tools[0]: found another form. Expected type function"),
        ({"tools": [TOOL], "tool_choice": "required"}, 422, "tool_choice: found another value"),
        ({"text": {"format": {"type": "xml"}}}, 422, "text.format: found another form"),
        ({"n": 2}, 422, "n is 2. Expected none"),
        ({"top_logprobs": 2}, 422, "top_logprobs: found a number"),
        ({"truncation": "auto"}, 422, "truncation: found another value"),
        ({"store": False, "background": True}, 422, "store: found false beside background"),
        ({"model": "double"}, 422, "double generates no text"),
        ({"model": "nothing"}, 404, "nothing"),
        ({"max_output_tokens": 0}, 422, "max_tokens: found 0"),
    ],
)
def test_bad_requests_are_refused(site: Site, fields: dict[str, Any], status: int, expected: str):
    """In OpenAI's shape, with what was expected."""
    answer = httpx.post(f"{site.gateway.url}/v1/responses", json={**WISH, **fields}, timeout=180)
    assert answer.status_code == status, answer.text
    assert expected in answer.json()["error"]["message"]


def test_unknown_responses(openai: Any, site: Site, http: httpx.Client):
    """404: an id of another form, one of no job, and a job that has no text, or several."""
    module = require_module("openai")
    accepted = http.post("/v1/jobs", json={"model": "double", "inputs": {"x": [[1, 2, 3, 4]]}}).json()
    for name in ("nothing", "resp_writer.0", f"resp_{accepted['id']}"):
        for call in (openai.responses.retrieve, openai.responses.cancel, openai.responses.delete):
            with pytest.raises(module.NotFoundError):
                call(name)
    for query in ("stream=maybe", "stream=true&starting_after=-1", "stream=true&starting_after=x"):
        begun = openai.responses.create(**WISH, background=True)
        assert httpx.get(f"{site.gateway.url}/v1/responses/{begun.id}?{query}").status_code == 422


@pytest.mark.parametrize("wishes", [{"outputs": ["text"]}, {"options": {"n": 2, "temperature": 1.0}}])
def test_a_job_of_another_form_is_no_response(site: Site, wishes: dict[str, Any]):
    """One with some of its outputs only, and one with several texts: 404, and no event but the error in a stream."""
    params = {"max_tokens": 4, **wishes.get("options", {})}
    job = {"model": "writer", "inputs": {"prompt": ["a"], "sampling_params": [json.dumps(params)]}}
    with httpx.Client(base_url=site.gateway.url, timeout=180) as http:
        document = {**job, **({"outputs": wishes["outputs"]} if "outputs" in wishes else {})}
        made = http.post("/v1/jobs", json=document, headers={"Prefer": "wait=60"})
        assert made.status_code == 200, made.text
        name = f"/v1/responses/resp_{made.json()['id']}"
        assert http.get(name).status_code == 404
        streamed = http.get(name, params={"stream": "true"})
        assert streamed.status_code == 404 or "event: error" in streamed.text
