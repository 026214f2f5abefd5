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
        ({"n": 2}, "Unknown sampling field n"),
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
    ],
)
def test_wrong_fields_are_refused(options: dict[str, Any], message: str):
    """The line names the field, the value that was found, and the values that are expected."""
    with pytest.raises(InvalidInput, match=message):
        SamplingParams.from_mapping(options)
