"""The parameters of a generation: unknown and contradictory ones are refused before anything is queued."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.registry.errors import InvalidInput
from penstock.registry.sampling_params import SamplingParams


def test_max_new_tokens_is_another_name():
    """ES-034: of max_tokens; both at once are refused."""
    assert SamplingParams.from_mapping({"max_new_tokens": 7}) == SamplingParams(max_tokens=7)
    with pytest.raises(InvalidInput, match="expected one of them"):
        SamplingParams.from_mapping({"max_new_tokens": 7, "max_tokens": 7})


def test_one_stop_string_may_be_given_alone():
    """It is the same as a list of it."""
    assert SamplingParams(stop="\n").stop == SamplingParams(stop=["\n"]).stop == ("\n",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "Unknown sampling field temprature, did you mean temperature"),
        ({"max_tokens": 0}, "max_tokens: found 0, expected an integer of at least 1"),
        ({"max_tokens": True}, "max_tokens: found True"),
        ({"temperature": -1}, "temperature: found -1, expected a number from 0 to 100"),
        ({"temperature": float("nan")}, "temperature: found nan"),
        ({"top_k": -1}, "top_k: found -1"),
        ({"top_p": 0}, "top_p: found 0, expected a number above 0, at most 1"),
        ({"min_p": 1.5}, "min_p: found 1.5"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": 2**64}, "seed: found"),
        ({"logprobs": 21}, "logprobs: found 21, expected an integer from 0 to 20"),
        ({"min_tokens": 200}, "min_tokens: found 200, expected at most max_tokens, 128"),
        ({"stop": [""]}, "stop: found '', expected strings of at least one character"),
        ({"stop": ["x"] * 17}, "stop: found 17 strings, expected at most 16"),
        ({"stop": 3}, "stop: found 3, expected a list"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: found 'a'"),
        ({"ignore_eos": 1}, "ignore_eos: found 1, expected true or false"),
        ({"n": 0}, "n: found 0, expected an integer from 1 to 64"),
        ({"n": 2, "temperature": 0}, "n: found 2 with temperature 0, expected a temperature above 0"),
        ({"best_of": 2, "temperature": 0}, "best_of: found 2 with temperature 0"),
        ({"n": 3, "best_of": 2}, "best_of: found 2, expected at least n, 3"),
        ({"presence_penalty": 2.5}, "presence_penalty: found 2.5, expected a number from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty: found -3, expected a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty: found 0, expected a number above 0, at most 10"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: found -1, expected an integer from 0 to 20"),
        ({"logit_bias": [1]}, "logit_bias: found of type list, expected a mapping of tokens to numbers"),
        ({"logit_bias": {"a": 1}}, "logit_bias: found 'a', expected an integer of at least 0"),
        ({"logit_bias": {"1": 101}}, "logit_bias: found 101, expected numbers from -100 to 100"),
        ({"logit_bias": dict.fromkeys(range(1_025), 1)}, "logit_bias: found 1025 tokens, expected at most 1024"),
        ({"bad_words": [""]}, "bad_words: found '', expected strings of at least one character"),
        ({"allowed_token_ids": []}, "allowed_token_ids: found an empty list, expected at least one token"),
        ({"allowed_token_ids": [1], "bad_words": ["a"]}, "Found allowed_token_ids and bad_words, expected one of both"),
        ({"timeout_s": 0}, "timeout_s: found 0, expected a number of seconds above 0"),
        ({"timeout_s": 10**400}, "timeout_s: found 1000.*, expected a number of seconds above 0"),
        ({"temperature": 10**400}, "temperature: found 1000"),
        ({"regex": "a", "choice": ["a"]}, "Found regex and choice, expected at most one of: json_schema, regex"),
        ({"regex": "a", "stop": ["b"]}, "Found regex and stop, expected one of both: the text would not be complete"),
        ({"json_schema": "{"}, "json_schema: found '{', expected a schema in JSON"),
        ({"json_schema": [1]}, "json_schema: found of type list, expected a mapping, or its JSON"),
        ({"json_schema": {"enum": [float("nan")]}}, "json_schema: found values that are no JSON"),
        ({"json_schema": {"title": "x" * 70_000}}, "json_schema: found .* characters, expected at most 65536 bytes"),
        ({"choice": []}, "choice: found of type list, expected a list of at least one text"),
        ({"choice": [""]}, "choice: found '', expected a text of at least one character"),
        ({"grammar": 3}, "grammar: found 3, expected a text"),
    ],
)
def test_wrong_fields_are_refused(options: dict[str, Any], message: str):
    """The line names the field, the value that was found, and the values that are expected."""
    with pytest.raises(InvalidInput, match=message):
        SamplingParams.from_mapping(options)


def test_json_names_tokens_with_strings():
    """The keys of an object in JSON are strings; those of the mapping are the numbers."""
    assert SamplingParams.from_mapping({"logit_bias": {"17": -100}}).logit_bias == {17: -100.0}


def test_a_schema_may_be_given_as_its_json():
    """It is the same as the mapping."""
    assert SamplingParams(json_schema='{"type": "null"}').json_schema == {"type": "null"}


@pytest.mark.parametrize("fields", [{"temperature": 10**400}, {"bad_words": ["\ud800"]}, {"stop": ["\ud800"]}])
def test_values_that_no_engine_can_hold_are_refused(fields: dict[str, Any]):
    """Integers beyond any float, and half characters."""
    with pytest.raises(InvalidInput):
        SamplingParams(**fields)
