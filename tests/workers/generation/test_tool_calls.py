"""Calls of tools in a text, in the forms that models write; a text that is no call stays as it is."""

from __future__ import annotations

import json
import random

import pytest

from penstock.registry.errors import InvalidInput
from penstock.workers.generation.tool_calls import ParsedText, ToolCall, parse_tool_calls, parser_of_template

TOOLS = ["weather", "add"]
ARGUMENTS = {"city": "Zürich </tool_call>", "days": [1, {"x": None}]}


def written(parser: str, calls: list[tuple[str, dict]]) -> str:
    """How a model of this form writes the calls."""
    if parser == "hermes":
        values = [json.dumps({"name": name, "arguments": each}, ensure_ascii=False) for name, each in calls]
        return "\n".join(f"<tool_call>\n{value}\n</tool_call>" for value in values)
    if parser == "mistral":
        return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": each} for name, each in calls])
    return "; ".join(json.dumps({"name": name, "parameters": each}) for name, each in calls)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("number", [1, 3])
def test_calls_come_back(parser, number):
    """ES-056: names and arguments round trip, also where the arguments have the signs of the form in them."""
    calls = [(TOOLS[at % 2], {**ARGUMENTS, "at": at}) for at in range(number)]
    found = parse_tool_calls(written(parser, calls), parser, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == calls
    assert found.content == ""


def test_content_around_calls_is_kept():
    """Hermes and Mistral write a sentence before a call."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    expected = (ToolCall("add", '{"a": 1}'),)
    assert parse_tool_calls(f"Let me see.\n{call}", "hermes", TOOLS) == ParsedText("Let me see.", expected)
    assert parse_tool_calls(call.removesuffix("</tool_call>"), "hermes", TOOLS) == ParsedText("", expected)
    text = 'I add. [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    assert parse_tool_calls(text, "mistral", TOOLS) == ParsedText("I add.", expected)


def test_signs_that_decoding_dropped_are_not_needed():
    """Llama's and Mistral's are special tokens, which a decoded text has not."""
    expected = (ToolCall("add", '{"a": 1}'),)
    for text in ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ' {"name": "add", "parameters": {"a": 1}}'):
        assert parse_tool_calls(text, "llama3_json", TOOLS).tool_calls == expected
    text = '[{"name": "add", "arguments": "{\\"a\\": 1}"}]'
    assert parse_tool_calls(text, "mistral", TOOLS).tool_calls == expected


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "no call <tool_call> at all"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": </tool_call>'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("llama3_json", '{"name": "add", "parameters": {}} and a sentence'),
        ("llama3_json", '{"title": "add"}'),
        ("llama3_json", "plain words"),
        ("llama3_json", ""),
        ("mistral", "plain words [TOOL_CALLS]"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}, 3]'),
        ("mistral", "[TOOL_CALLS]" + "[" * 100_000),
    ],
)
def test_what_is_no_call_stays_content(parser, text):
    """The caller sees what the model wrote."""
    assert parse_tool_calls(text, parser, TOOLS) == ParsedText(text)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
def test_torn_calls_raise_nothing(parser):
    """Whatever is left of a text: a call, or content."""
    chosen = random.Random(0)
    whole = written(parser, [("add", {"a": 1}), ("weather", ARGUMENTS)])
    for _ in range(300):
        text = list(whole)
        for _ in range(chosen.randrange(1, 4)):
            del text[chosen.randrange(len(text)) :][: chosen.randrange(9)]
            text.insert(chosen.randrange(len(text) + 1), chosen.choice('{}[]",;<a'))
        found = parse_tool_calls("".join(text), parser, TOOLS)
        assert all(isinstance(json.loads(call.arguments), dict) for call in found.tool_calls)


def test_the_template_names_the_parser():
    """By the sign that it writes into the prompt."""
    assert parser_of_template("{{ '<tool_call>' }}") == "hermes"
    assert parser_of_template("[TOOL_CALLS]") == "mistral"
    assert parser_of_template("<|python_tag|>") == "llama3_json"
    assert parser_of_template("{{ messages }}") is None
    with pytest.raises(InvalidInput, match="Tool parser: found 'xml', expected one of: hermes, llama3_json, mistral"):
        parse_tool_calls("", "xml", TOOLS)


@pytest.mark.parametrize("arguments", [r'{"x": "\ud83d hi"}', '{"x": 1e999}'])
def test_a_call_that_nobody_could_read_stays_content(arguments: str):
    """Half a character, and a number that JSON has not."""
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    assert parse_tool_calls(text, "hermes", ["look"]) == ParsedText(text)
