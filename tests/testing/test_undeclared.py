"""A function without a declaration: what it takes, what still holds for its outputs, and what it shares: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.registry.errors import ConfigurationError, InvalidInput, ModelError
from penstock.testing.undeclared import UndeclaredSignature, UndeclaredSpec
from tests.testing.models import double


@pytest.fixture
def signature() -> UndeclaredSignature:
    """Of a model that does not stream."""
    return UndeclaredSignature(streams=False)


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ([1, 2], "int64", (2,)),
        ([[1.5], [2.5]], "float64", (2, 1)),
        ([True], "bool", (1,)),
        (["a", "b"], "object", (2,)),
        (np.array(["a"]), "object", (1,)),
        (np.zeros((2, 3), np.float16), "float16", (2, 3)),
        (np.zeros(2, ">i4"), "int32", (2,)),
        ([float("nan")], "float64", (1,)),
    ],
)
def test_values_become_arrays(signature: UndeclaredSignature, value: Any, dtype: str, shape: tuple[int, ...]):
    """An array keeps its dtype, a list becomes what NumPy makes of it, and text is str in object arrays."""
    array = signature.check({"x": value})["x"]
    assert (array.dtype, array.shape) == (np.dtype(dtype), shape)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([1], "Inputs are a list. Expected a mapping"),
        ({"x": 1.0}, r"x: shape \(\). Expected \(batch,\)"),
        ({"x": [[1], [2, 3]]}, "x: nested lists of unequal lengths. Expected a rectangular array"),
        ({"x": np.zeros(2, complex)}, "x: dtype complex128. Expected one of: bool"),
        ({"x": [None]}, "x: contains NoneType. Expected str"),
        ({"x": [1, 2], "y": [1]}, "y: batch is 1, but 2 in another input"),
        ({"x": np.zeros((0, 2))}, r"x: shape \(0, 2\). Expected \(batch, 2\), every extent at least 1"),
        ({"bad name": [1]}, "bad name: name: found 'bad name'"),
    ],
)
def test_what_no_model_can_take_is_refused(signature: UndeclaredSignature, inputs: Any, text: str):
    """The rules that hold whatever a declaration says, with the texts of declared inputs."""
    with pytest.raises(InvalidInput, match=text):
        signature.check(inputs)


def test_a_model_that_streams_takes_inputs_without_rows():
    """Such a job runs alone, and its tensors need no first dimension of rows."""
    signature = UndeclaredSignature(streams=True)
    arrays = signature.check({"n": 3, "x": [1.0, 2.0]})
    assert (arrays["n"].shape, signature.rows(arrays)) == ((), 1)
    signature.check_outputs({"any": np.zeros((7, 2))}, 1)


def test_rows_are_those_of_the_inputs(signature: UndeclaredSignature):
    """The first extent, which all inputs share; one for a job without inputs."""
    assert signature.rows(signature.check({"x": [1, 2, 3], "y": [[1], [2], [3]]})) == 3
    assert signature.rows(signature.check({})) == 1


def test_no_two_jobs_share_a_forward(signature: UndeclaredSignature):
    """Nothing says that the function may be called with the rows of several jobs."""
    arrays = signature.check({"x": [1]})
    assert signature.batch_key(arrays) != signature.batch_key(arrays)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({}, "The model returned no outputs. Expected at least one"),
        ({"y": np.zeros(())}, r"Output y has shape \(\). Expected 2 as the first extent"),
        ({"y": np.zeros((1, 2))}, r"Output y has shape \(1, 2\). Expected 2 as the first extent"),
    ],
)
def test_outputs_have_a_row_for_each_row(signature: UndeclaredSignature, outputs: dict[str, Any], text: str):
    """Otherwise jobs of a batch would get the outputs of other jobs in production."""
    with pytest.raises(ModelError, match=text):
        signature.check_outputs(outputs, 2)


def test_outputs_cannot_be_selected(signature: UndeclaredSignature):
    """Their names are not known before the call."""
    assert signature.select_outputs(()) == ()
    with pytest.raises(InvalidInput, match="the model declares none"):
        signature.select_outputs(["y"])


def test_kept_signatures_are_bounded(signature: UndeclaredSignature):
    """A test that submits many shapes keeps a few of them."""
    for extent in range(1, 1000):
        signature.check({"x": np.zeros((1, extent))})
    assert len(signature._signatures) <= 256


def streaming(inputs: Any, ctx: Any) -> Iterator[Any]:
    """Yields nothing."""
    yield from ()


class Streaming:
    """An object whose call is a generator."""

    def __call__(self, inputs: Any, ctx: Any) -> Iterator[Any]:
        yield from ()


def test_the_spec_follows_the_function():
    """A generator function streams; nothing is deterministic without a declaration."""
    assert not UndeclaredSpec.of("double", double).streams
    assert UndeclaredSpec.of("streaming", streaming).streams
    assert UndeclaredSpec.of("object", Streaming()).streams
    assert not UndeclaredSpec.of("double", double).deterministic


async def coroutine(inputs: Any) -> Any:
    """No model."""


async def async_generator(inputs: Any) -> Any:
    """No model either."""
    yield inputs


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (coroutine, "coroutine function. Expected a function or a generator function"),
        (async_generator, "coroutine function. Expected a function or a generator function"),
        (3, "The model is a int. Expected a function"),
    ],
)
def test_what_is_no_function_is_refused(function: Any, text: str):
    """Before a job is accepted that could never be answered."""
    with pytest.raises(ConfigurationError, match=text):
        UndeclaredSpec.of("m", function)
