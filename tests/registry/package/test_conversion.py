"""Which numbers may have another dtype than the declared one, and what becomes of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.registry.errors import InvalidInput
from penstock.registry.package.conversion import cast, conversions
from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import DTYPES, STRING, Array

NUMBERS = [name for name, dtype in DTYPES.items() if dtype.kind in "iuf"]


def tensor(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape})


def _exact(value: Any) -> Any:
    """A number as Python compares it without rounding."""
    return float(value) if isinstance(value, float | np.floating) else int(value)


def _is_kept(value: Any, dtype: np.dtype[Any], source: np.dtype[Any]) -> bool:
    """The rule, with Python's numbers."""
    number = _exact(value)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            nearest = float(np.array([value]).astype(dtype)[0])
        if source.kind == "f":
            return math.isinf(number) or not math.isinf(nearest)
        return math.isfinite(nearest) and int(nearest) == number
    if not math.isfinite(number) or number != int(number):
        return False
    return int(np.iinfo(dtype).min) <= int(number) <= int(np.iinfo(dtype).max)


def _edges(source: np.dtype[Any]) -> Array:
    """The numbers of a dtype at the limits of all others."""
    powers = [2**power + step for power in (0, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63, 64) for step in (-1, 0, 1)]
    whole = [*powers, *[-each for each in powers]]
    if source.kind == "f":
        others = [0.5, -1.5, 65519.9, 65520, 3.4028235e38, 3.5e38, 1e-300, 1e300, math.nan, math.inf, -math.inf]
        with np.errstate(over="ignore"):
            return np.array([*map(float, whole), *others]).astype(source)
    limits: Any = np.iinfo(source)
    return np.array([each for each in (*whole, limits.min, limits.max) if limits.min <= each <= limits.max], source)


@pytest.mark.parametrize("declared", NUMBERS)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_converted_only_when_each_keeps_its_meaning(name: str, declared: str):
    """An integer never changes, a float is rounded and never becomes infinite, and nothing is cut off."""
    dtype = DTYPES[declared]
    edges = _edges(np.dtype(name))
    for value in edges:
        found = cast(np.array([value]), dtype)
        assert (found is not None) == _is_kept(value, dtype, edges.dtype), value
    together = np.array([value for value in edges if _is_kept(value, dtype, edges.dtype)], edges.dtype)
    found = cast(together, dtype)
    assert found is not None
    assert found.dtype == dtype
    with np.errstate(all="ignore"):
        assert np.array_equal(found, together.astype(dtype), equal_nan=dtype.kind == "f")


@given(arrays.arrays(np.float64, 3, elements=st.floats(-1e38, 1e38)))
def test_float64_in_the_range_of_float32_is_rounded(array: np.ndarray):
    """NumPy's default is float64: everybody's second line."""
    (found,) = conversions([tensor("x", "float32", "batch")], {"x": array}).values()
    assert np.array_equal(np.asarray(found), array.astype(np.float32))


def test_nan_and_infinity_stay_what_they_are():
    """The signature decides about them afterwards."""
    found = cast(np.array([np.nan, np.inf, -np.inf]), DTYPES["float32"])
    assert found is not None
    assert [str(value) for value in found.tolist()] == ["nan", "inf", "-inf"]


def test_one_text_is_one_row():
    """Only where the input is a list of texts. NumPy's own strings are texts, too."""
    text = [tensor("text", STRING, "batch")]
    assert conversions(text, {"text": "hello"}) == {"text": ["hello"]}
    assert conversions(text, {"text": np.str_("hello")}) == {"text": ["hello"]}
    assert conversions(text, {"text": ["hello"]}) == {}
    assert conversions([tensor("text", STRING, "batch", 2)], {"text": "hello"}) == {}
    assert conversions([tensor("x", "float32", "batch")], {"x": "hello"}) == {}


@pytest.mark.parametrize(
    "value",
    [np.zeros(2, bool), np.zeros(2, complex), np.zeros(2, object), np.zeros(2, "M8[s]"), np.array(["1"]), [1.0], None],
    ids=str,
)
def test_what_is_no_number_is_left_alone(value: object):
    """The signature refuses it with its own text. Lists are the signature's, too."""
    assert conversions([tensor("x", "float32", "batch")], {"x": value}) == {}
    assert conversions([tensor("x", "bool", "batch")], {"x": value}) == {}


def test_the_declared_dtype_is_left_alone():
    """Also in the other byte order, which the signature accepts."""
    for array in (np.zeros(2, "<f4"), np.zeros(2, ">f4")):
        assert conversions([tensor("x", "float32", "batch")], {"x": array, "unknown": array}) == {}


def test_numbers_that_do_not_fit_are_refused_by_name():
    """The text has the dtypes and no value."""
    with pytest.raises(InvalidInput) as refused:
        conversions([tensor("x", "int8", "batch")], {"x": np.array([1, 300])})
    assert str(refused.value) == "x: dtype int64, and a value does not fit. Expected numbers that int8 can hold"
