"""Messages become the prompt of the model's template; a template that raises refuses the request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.registry.errors import InvalidInput
from penstock.workers.generation import Engine
from penstock.workers.generation.chat import ChatPrompt, chat_output, chat_prompt
from penstock.workers.generation.outputs import CompletionOutput, Delta, FinishReason, RequestOutput, Usage
from penstock.workers.generation.prompts import PromptReader
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, byte_tokenizer, open_engine, write_model

TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'developer' %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HELLO = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """With a template of its own."""
    made = byte_tokenizer()
    made.chat_template = template
    return made


def test_the_template_of_the_tokenizer_writes_the_prompt(tmp_path):
    """It comes with the folder; the answer is that of its tokens, where nothing is added to them."""
    tokenizer().save_pretrained(write_model(tmp_path))
    engine = Engine.from_pretrained(tmp_path, kv_cache_mb=2, packed_linears="off")
    text = "<system>Be short.\n<user>Hello\n<assistant>"
    assert chat_prompt(engine.decoder.tokenizer, HELLO) == text
    answer = engine.chat(HELLO, GREEDY)
    (expected,) = engine.generate(text, GREEDY)
    assert answer.output.outputs == expected.outputs
    assert answer.messages[0].content == expected.outputs[0].text
    assert answer.messages[0].tool_calls == ()


def test_another_template_may_be_given():
    """That of a package, or of a request, in place of the tokenizer's."""
    assert chat_prompt(tokenizer(), HELLO, template="{{ messages[1].content }}!") == "Hello!"
    assert chat_prompt(tokenizer(None), HELLO, template="{{ messages[1].content }}!") == "Hello!"


def test_tools_and_their_calls_are_written():
    """Arguments that a client sends as JSON are values in the template; parts of a content are joined."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    expected = f"tools: {json.dumps(TOOL)}\n<tool_call>\n<user>Weather?\n<assistant>Zürich\n<tool>rain\n<assistant>"
    assert chat_prompt(tokenizer(), messages, [TOOL]) == expected
    made = tokenizer()
    tokens = PromptReader(made, len(made), 1_000).tokens(ChatPrompt(messages, [TOOL]), 1)
    assert made.decode(tokens) == expected


@pytest.mark.parametrize(("reason", "shown"), [("stop", "tool_calls"), ("length", "length")])
def test_calls_of_an_answer_are_parsed(reason: FinishReason, shown: str):
    """ES-057: the reason is tool_calls where the text ended by itself. Without tools all text is content."""
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    completion = CompletionOutput(0, text, (1,), reason, None, None)
    output = RequestOutput("1", None, (1,), (completion,), True, Usage(1, 1, 0), (Delta("", (1,)),))
    (message,) = chat_output(output, "hermes", ["weather"]).messages
    assert (message.content, message.finish_reason) == ("", shown)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("weather", {"city": "Bern"})]
    (plain,) = chat_output(output, "hermes", []).messages
    assert (plain.content, plain.tool_calls, plain.finish_reason) == (text, (), reason)


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([], [], "messages: found an empty list, expected at least one message"),
        ("Hello", [], "messages: found 'Hello', expected a list"),
        (["Hello"], [], r"messages\[0\]: found 'Hello', expected a mapping with role and content"),
        ([{"role": "me", "content": ""}], [], r"messages\[0\].role: found 'me', expected one of: system, developer"),
        ([{"role": "user"}], [], r"messages\[0\].content: found None, expected a text or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [],
            r"messages\[0\].content: found a part 'image_url', expected parts of type text",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            [],
            r"messages\[0\].tool_calls\[0\].function.arguments: found '{', expected JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
            [],
            r"messages\[0\].tool_calls\[0\]: found of type dict, expected a function with name and arguments",
        ),
        (HELLO, [{"name": "weather"}], r"tools\[0\]: found of type dict, expected type function"),
        ([{"role": "developer", "content": ""}], [], "The chat template refused the messages: Conversation roles must"),
    ],
)
def test_wrong_messages_are_refused(messages, tools, message):
    """One line says what was found and what is expected."""
    with pytest.raises(InvalidInput, match=message):
        chat_prompt(tokenizer(), messages, tools)


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ messages.nothing.at_all }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", ""]
)
def test_a_template_that_fails_refuses_the_request(template):
    """Whatever its mistake is; the sandbox lets it reach no class of Python."""
    with pytest.raises(InvalidInput, match="The chat template"):
        chat_prompt(tokenizer(), HELLO, template=template)


def test_a_chat_needs_a_template_and_a_form_of_calls():
    """Both are told before anything is computed."""
    bare = open_engine(decoder("Llama"), kv_cache_mb=2)
    with pytest.raises(InvalidInput, match="for a model without a tokenizer"):
        bare.chat(HELLO)
    plain = open_engine(decoder("Llama"), tokenizer(None), kv_cache_mb=2)
    with pytest.raises(InvalidInput, match="for a model without a chat template"):
        plain.chat(HELLO)
    with pytest.raises(InvalidInput, match="expected a tool_parser: hermes, llama3_json, mistral"):
        plain.chat(HELLO, tools=[TOOL], chat_template="{{ messages[1].content }}")
    assert not plain.has_unfinished_requests
