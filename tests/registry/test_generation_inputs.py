"""What a text can never have room for is refused where it is submitted, whatever form its tokens have."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.registry.errors import InvalidInput
from penstock.registry.generation_inputs import checked, with_limit
from penstock.registry.package import ModelSpec
from penstock.registry.sampling_params import SamplingParams

LIMIT = 256
TOKENS = 200


def spec(max_model_len: int | None = LIMIT) -> ModelSpec:
    """As workers announce it."""
    fields = {"name": "writer", "version": "1", "format": "generate", "source": {}}
    return ModelSpec.model_validate({**fields, "generate": {"max_model_len": max_model_len}})


FORMS = {
    "list": [1] * TOKENS,
    "rows": [[1] * TOKENS],
    "tuple": (1,) * TOKENS,
    "range": range(TOKENS),
    "numbers of NumPy": [np.int64(1)] * TOKENS,
    "array": np.ones(TOKENS, np.int64),
    "array of rows": np.ones((1, TOKENS), np.int64),
    "list of an array": [np.ones(TOKENS, np.int64)],
}
SAMPLING = {
    "mapping": {"max_tokens": 57},
    "object": SamplingParams(max_tokens=57),
    "text": '{"max_tokens": 57}',
    "list": ['{"max_new_tokens": 57}'],
}


@pytest.mark.parametrize("tokens", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_tokens_of_every_form_are_counted(tokens: Any, sampling: Any):
    """One token less fits, and is one row of tokens then."""
    with pytest.raises(InvalidInput, match=f"at least {TOKENS} tokens and max_tokens 57. Expected at most {LIMIT}"):
        checked(spec(), {"prompt_token_ids": tokens, "sampling_params": sampling})
    fitting = checked(spec(LIMIT + 1), {"prompt_token_ids": tokens, "sampling_params": sampling})
    assert spec().signature.check(fitting)["prompt_token_ids"].shape == (1, TOKENS)


@pytest.mark.parametrize(
    "inputs", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"prompt": ["a"]}]
)
def test_max_tokens_alone_may_be_too_many(inputs: dict[str, Any]):
    """A text has one token at least; its own tokens are counted by the worker."""
    with pytest.raises(InvalidInput, match=f"at least 1 tokens and max_tokens {LIMIT}"):
        checked(spec(), {**inputs, "sampling_params": {"max_tokens": LIMIT}})
    checked(spec(), {**inputs, "sampling_params": {"max_tokens": LIMIT - 1}})


def test_max_tokens_has_its_default():
    """Also where no sampling parameters are given."""
    with pytest.raises(InvalidInput, match="at least 129 tokens and max_tokens 128"):
        checked(spec(), {"prompt_token_ids": [1] * 129})


@pytest.mark.parametrize("tokens", [[], [[]], 5, np.array(5), "abc", ["a"], [[1.5]], np.ones((1, 0), np.int64)])
def test_what_is_no_row_of_tokens_is_refused(tokens: Any):
    """By the signature, in one line."""
    with pytest.raises(InvalidInput, match="prompt_token_ids: "):
        spec().signature.check(checked(spec(), {"prompt_token_ids": tokens}))


def test_the_limit_of_engines_travels_with_the_spec():
    """It takes the place of what the package says, also where it is that of an engine with more room."""
    assert with_limit(spec(256), 256) == spec(256)
    for found in (with_limit(spec(256), 100), with_limit(spec(None), 100), with_limit(spec(50), 100)):
        again = ModelSpec.from_json(found.to_json())
        assert again.generate is not None
        assert again.generate.max_model_len == 100
        with pytest.raises(InvalidInput, match="Expected at most 100 together"):
            checked(again, {"prompt_token_ids": [1] * 90, "sampling_params": json.dumps({"max_tokens": 11})})
