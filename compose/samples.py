"""Inputs made from a model's declaration: random ones to measure with, Python source and a request to paste.

ModelSpec -> random_jobs   -> arrays of one row, for `penstock bench`
          -> first_call    -> lines of a program, for the output of `penstock up`
          -> first_request -> a request of the gateway, and the line of curl that makes it
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.registry.package import ModelSpec
from penstock.registry.package.generation import PROMPT
from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import DTYPES, STRING, Array

__all__ = ["SampleRequest", "first_call", "first_request", "random_jobs"]

_SENTENCE: Final = "a sentence"
_WRITTEN_ELEMENTS: Final = 8
"""A larger array is written as a call of NumPy, not as a list."""
_LENGTH: Final = 16
"""Of texts, in words, and of symbolic dimensions."""
_WORDS: Final = ("valve", "river", "turbine", "reservoir", "gate", "pressure", "flow", "dam", "pipe", "head")


class SampleRequest(NamedTuple):
    """A POST of a JSON document."""

    url: str
    body: str

    @property
    def as_curl(self) -> str:
        """A line for a shell."""
        # Names and inputs of samples hold no quotes of a shell.
        return f"curl {self.url} -H 'Content-Type: application/json' -d '{self.body}'"


def random_jobs(spec: ModelSpec, count: int, random: np.random.Generator) -> Iterator[dict[str, Array]]:
    """The inputs of `count` jobs of one row; they differ, unless the declaration allows too few values."""
    # The declaration's own example has extents within its limits.
    example = _example(spec, _LENGTH)
    tensors = [tensor for tensor in spec.inputs if tensor.name in example]
    for number in range(count):
        yield {tensor.name: _random(tensor, example[tensor.name], number, random) for tensor in tensors}


def first_call(spec: ModelSpec) -> list[str]:
    """A program of a few lines that submits one job of `spec` to the running stack and prints how it ends."""
    example = _example(spec, len(_SENTENCE))
    inputs = ", ".join(f'"{name}": {_source(array)}' for name, array in example.items())
    imports = ["import numpy as np"] if "np." in inputs else []
    submit = f'client.submit("{spec.name}", {{{inputs}}})'
    if spec.streams:
        # The loop ends with an empty line: a prompt of Python needs it.
        calls = [f"for event in {submit}.stream():", "    print(event.type, event.data)", ""]
    else:
        calls = [f"print({submit}.result(timeout=60))"]
    return [*imports, "from penstock import Client", "client = Client.from_env()", *calls]


def first_request(spec: ModelSpec, gateway_url: str) -> SampleRequest:
    """The request that runs `spec` once and waits for its outputs."""
    example = _example(spec, len(_SENTENCE))
    inputs = {name: _shown(array).tolist() for name, array in example.items()}
    return SampleRequest(f"{gateway_url}/v1/models/{spec.name}:predict", json.dumps({"inputs": inputs}))


def _example(spec: ModelSpec, length: int) -> dict[str, Array]:
    """The declaration's own example. A model that generates text needs one of its inputs, which are all optional."""
    example = dict(spec.signature.example(1, length))
    if spec.generate is not None:
        example[PROMPT] = np.full(1, "x" * length, dtype=object)
    return example


def _random(tensor: TensorSpec, example: Array, number: int, random: np.random.Generator) -> Array:
    if tensor.dtype == STRING:
        longest = len(example.flat[0]) if example.size else 0
        text = f"{number} {' '.join(random.choice(_WORDS, 12))}"
        return np.full(example.shape, text if longest == _LENGTH else text[:longest], dtype=object)
    dtype = DTYPES[tensor.dtype]
    if dtype.kind == "b":
        return random.integers(0, 1, example.shape, endpoint=True).astype(dtype)
    low, high = _range(tensor)
    if dtype.kind == "f":
        return random.uniform(low, high, example.shape).astype(dtype)
    return random.integers(int(low), int(high), example.shape, endpoint=True).astype(dtype)


def _range(tensor: TensorSpec) -> tuple[float, float]:
    """A part of the declared range, 1 wide for floats and 100 for integers; it begins at 0 where that is allowed."""
    dtype = DTYPES[tensor.dtype]
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    width = 1 if dtype.kind == "f" else 100
    lowest = limits.min if tensor.min is None else tensor.min
    highest = limits.max if tensor.max is None else tensor.max
    low = max(lowest, 0) if highest >= 0 else max(lowest, highest - width)
    return low, min(highest, low + width)


def _shown(array: Array) -> Array:
    """The array with a text that reads well in place of an example's."""
    return np.full(array.shape, _SENTENCE[: len(array.flat[0])], dtype=object) if array.dtype.kind == "O" else array


def _source(array: Array) -> str:
    """Python source that gives the array, or lists that the declaration accepts in its place."""
    array = _shown(array)
    if array.size <= _WRITTEN_ELEMENTS:
        return _quoted(array.tolist())
    value = array.flat[0]
    if array.dtype.kind == "O":
        return f"np.full({array.shape}, {_quoted(value)}, object)"
    if not value:
        return f'np.zeros({array.shape}, "{array.dtype}")'
    return f'np.full({array.shape}, {value.item()!r}, "{array.dtype}")'


def _quoted(value: Any) -> str:
    """As repr, with double quotes: the samples hold no quotes themselves."""
    return repr(value).replace("'", '"')
