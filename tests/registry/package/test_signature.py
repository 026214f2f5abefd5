"""The check that every job passes before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.registry.errors import InvalidInput, ModelError
from penstock.registry.package.signature import Signature, TensorSpec
from penstock.registry.tensors import DTYPES, STRING


def tensor(name: str, dtype: str, *shape: int | str, **rest: object) -> TensorSpec:
    return TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape, **rest})


ROWS = Signature([tensor("x", "float32", "batch", 4)], [tensor("y", "float32", "batch", 4)])
TEXT = Signature([tensor("text", STRING, "batch")], [tensor("y", "float32", "batch", 4)], "text", 10)
TOKENS = Signature(
    [
        tensor("tokens", "int64", "batch", "seq", min=0, max=100),
        tensor("mask", "bool", "batch", "seq"),
        tensor("bias", "float32", "batch", optional=True, allow_nan=True),
    ],
    [tensor("logits", "float32", "batch", "seq", 3), tensor("pooled", "float32", "batch", 3)],
    "tokens",
    6,
)
MASK = np.ones((1, 3), bool)


REFUSED: list[tuple[str, Signature, object, str]] = [
    ("missing", TOKENS, {"mask": MASK}, "Missing required input(s): tokens. Expected inputs: bias, mask, tokens"),
    (
        "unexpected",
        ROWS,
        {"x": [[1, 2, 3, 4]], "z": 1, "a": 2},
        "Unexpected input(s): a, z. Expected inputs: x",
    ),
    ("misnamed", ROWS, {"X": 1}, "Missing required input(s): x. Unexpected input(s): X. Expected inputs: x"),
    ("not a mapping", ROWS, [1], "Inputs are a list. Expected a mapping of names to values"),
    ("dtype", ROWS, {"x": np.zeros((1, 4))}, 'x: dtype float64. Expected float32: x.astype("float32")'),
    ("dtype of text", TEXT, {"text": np.zeros(1)}, "text: dtype float64. Expected string"),
    ("text for numbers", ROWS, {"x": np.array([["a"] * 4])}, "x: dtype string. Expected float32"),
    ("rank", ROWS, {"x": np.zeros(4, "f4")}, "x: shape (4,). Expected (batch, 4)"),
    ("extent", ROWS, {"x": np.zeros((1, 3), "f4")}, "x: shape (1, 3). Expected (batch, 4), every extent at least 1"),
    ("no rows", ROWS, {"x": np.zeros((0, 4), "f4")}, "x: shape (0, 4). Expected (batch, 4), every extent at least 1"),
    ("NaN", ROWS, {"x": [[0, 0, 0, float("nan")]]}, "x: contains NaN or infinity. Expected finite numbers"),
    ("infinity", ROWS, {"x": [[0, 0, 0, float("-inf")]]}, "x: contains NaN or infinity. Expected finite numbers"),
    ("bool", ROWS, {"x": [[0.0, 0.0, 0.0, True]]}, "x: contains bool. Expected float32"),
    ("number for bool", TOKENS, {"tokens": [[1]], "mask": [[1]]}, "mask: contains int. Expected bool"),
    ("ragged", ROWS, {"x": [[1.0] * 4, [1.0] * 3]}, "x: nested lists of unequal lengths. Expected (batch, 4)"),
    ("None", ROWS, {"x": None}, "x: contains NoneType. Expected float32"),
    ("overflow", ROWS, {"x": [[1e300] * 4]}, "x: a value does not fit. Expected numbers that float32 can hold"),
    ("inexact", ROWS, {"x": [[2**24 + 1] * 4]}, "x: a value does not fit. Expected numbers that float32 can hold"),
    (
        "fraction for int",
        TOKENS,
        {"tokens": [[1.5]], "mask": [[True]]},
        "tokens: a value does not fit. Expected numbers that int64 can hold",
    ),
    (
        "below",
        TOKENS,
        {"tokens": [[-1]], "mask": [[True]]},
        "tokens: a value is below the range. Expected values of at least 0 and at most 100",
    ),
    (
        "above",
        TOKENS,
        {"tokens": [[101]], "mask": [[True]]},
        "tokens: a value is above the range. Expected values of at least 0 and at most 100",
    ),
    (
        "symbolic",
        TOKENS,
        {"tokens": np.zeros((1, 2), "i8"), "mask": MASK},
        "mask: seq is 3, but 2 in another input. Expected the same seq wherever the signature names it",
    ),
    (
        "long",
        TOKENS,
        {"tokens": np.zeros((1, 7), "i8"), "mask": np.ones((1, 7), bool)},
        "tokens: 7 long. Expected at most 6",
    ),
    ("long text", TEXT, {"text": ["ok", "a" * 11]}, "text: 11 characters. Expected at most 10"),
    ("not str", TEXT, {"text": ["ok", b"no"]}, "text: contains bytes. Expected str"),
    ("one string", TEXT, {"text": "bare"}, 'text: one str. Expected (batch,), such as ["hello"]'),
]


@pytest.mark.parametrize(("signature", "inputs", "text"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_refusal_says_what_was_wrong_and_what_was_expected(signature: Signature, inputs: Mapping[str, object], text):
    """Every violation is an InvalidInput with exactly the documented text (AR-072, IN-003, IN-034)."""
    with pytest.raises(InvalidInput) as refused:
        signature.check(inputs)
    assert str(refused.value) == text


def test_array_of_the_declared_dtype_is_passed_on_without_a_copy():
    """A client's array is neither copied nor changed."""
    x = np.arange(8, dtype="f4").reshape(2, 4)
    assert ROWS.check({"x": x})["x"] is x
    assert ROWS.rows({"x": x}) == 2


@pytest.mark.parametrize("width", [16, 32, 64])
@given(data=st.data())
def test_only_finite_arrays_pass(width: Literal[16, 32, 64], data: st.DataObject):
    """The cheap probe and the exact test agree for every float, also where a dot product overflows."""
    signature = Signature([tensor("x", f"float{width}", "batch", 4)], [tensor("y", "float32", "batch")])
    x = data.draw(arrays.arrays(f"f{width // 8}", (3, 4), elements=st.floats(width=width)))
    if np.isfinite(x).all():
        signature.check_finite({"x": x})
        assert signature.check({"x": x})["x"] is x
    else:
        for check in (signature.check_finite, signature.check):
            with pytest.raises(InvalidInput, match="NaN or infinity"):
                check({"x": x})


def holds(dtype: np.dtype, value: int) -> bool:
    if dtype.kind != "f":
        return np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    with np.errstate(over="ignore"):
        nearest = float(np.array(float(value)).astype(dtype))
    return np.isfinite(nearest) and int(nearest) == value


@given(st.sampled_from(sorted(set(DTYPES) - {STRING})), st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_python_integers_are_converted_only_when_none_changes(dtype: str, values: list[int]):
    """Integers outside the dtype, or between the numbers that it can hold, are refused rather than altered."""
    signature = Signature([tensor("x", dtype, "batch")], [tensor("y", dtype, "batch")])
    if dtype != "bool" and all(holds(DTYPES[dtype], value) for value in values):
        checked = signature.check({"x": values})["x"]
        assert checked.dtype == DTYPES[dtype]
        assert [int(value) for value in checked.tolist()] == values
    else:
        with pytest.raises(InvalidInput, match=r"^x: (a value does not fit|contains int)"):
            signature.check({"x": values})


def test_python_floats_are_rounded_to_the_declared_precision():
    """Lists of floats, which JSON brings, are accepted for float32."""
    assert ROWS.check({"x": [[0.1, 1, -2.5, 3]]})["x"].tolist() == np.array([[0.1, 1, -2.5, 3]], np.float32).tolist()


def test_big_endian_array_is_accepted_with_the_same_values():
    """The byte order of an array is not a difference of dtype."""
    x = np.arange(4, dtype=">f4").reshape(1, 4)
    checked = ROWS.check({"x": x})["x"]
    assert checked.dtype == DTYPES["float32"]
    assert checked.tolist() == x.tolist()


def test_nan_passes_where_the_signature_allows_it():
    """allow_nan admits NaN for its own input only."""
    inputs = {"tokens": [[1]], "mask": [[True]], "bias": np.array([np.nan], "f4")}
    checked = TOKENS.check(inputs)
    assert np.isnan(checked["bias"]).all()
    TOKENS.check_finite(checked)


@pytest.mark.parametrize("text", [["a", "ß"], ("a", "ß"), np.array(["a", "ß"]), np.array(["a", "ß"], object)])
def test_strings_arrive_as_an_object_array_of_str(text):
    """Lists, tuples and both kinds of NumPy string arrays mean the same."""
    checked = TEXT.check({"text": text})["text"]
    assert checked.dtype == object
    assert checked.tolist() == ["a", "ß"]
    assert TEXT.rows({"text": checked}) == 2


def test_checked_inputs_come_in_declared_order():
    """Two clients that name their inputs in another order send the same bytes."""
    assert list(TOKENS.check({"mask": [[True]], "tokens": [[1]]})) == ["tokens", "mask"]


def test_length_is_that_of_the_longest_row():
    """Characters for text, the symbolic extent for tensors, 1 where no input is measured."""
    assert TEXT.length(TEXT.check({"text": ["four", "seven.."]})) == 7
    assert TOKENS.length({"tokens": np.zeros((2, 5), "i8")}) == 5
    assert ROWS.length({"x": np.zeros((2, 4), "f4")}) == 1


def test_batch_key_separates_what_cannot_be_concatenated():
    """Jobs share a key exactly when rows can be joined: not with other extents, nor with and without an option."""
    plain = {"tokens": np.zeros((1, 3), "i8"), "mask": MASK}
    assert TOKENS.batch_key(plain) == TOKENS.batch_key({name: np.repeat(one, 2, 0) for name, one in plain.items()})
    assert TOKENS.batch_key(plain) != TOKENS.batch_key({name: one[:, :2] for name, one in plain.items()})
    assert TOKENS.batch_key(plain) != TOKENS.batch_key(plain | {"bias": np.zeros(1, "f4")})
    assert ROWS.batch_key({"x": np.zeros((1, 4), "f4")}) == ()
    assert TEXT.batch_key({"text": np.array(["a"], object)}) == ()


def test_outputs_are_selected_by_name():
    """No selection means all; an undeclared name is refused with those that exist (IN-031)."""
    assert TOKENS.select_outputs(()) == ("logits", "pooled")
    assert TOKENS.select_outputs(("pooled",)) == ("pooled",)
    with pytest.raises(InvalidInput, match=r"^Unknown output\(s\): z\. Declared outputs: logits, pooled$"):
        TOKENS.select_outputs(("pooled", "z"))


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({}, "The model returned the outputs: none. Declared outputs: y"),
        ({"y": np.zeros((2, 4))}, "Output y is float64 (2, 4). Declared is float32 (batch, 4) with batch = 2"),
        ({"y": np.zeros((1, 4), "f4")}, "Output y is float32 (1, 4). Declared is float32 (batch, 4) with batch = 2"),
    ],
)
def test_outputs_other_than_declared_are_the_models_error(outputs, text: str):
    """Names, dtype, shape and the number of rows must be those of the signature."""
    with pytest.raises(ModelError) as raised:
        ROWS.check_outputs(outputs, 2)
    assert str(raised.value) == text


@pytest.mark.parametrize("signature", [ROWS, TEXT, TOKENS])
def test_example_passes_its_own_signature(signature: Signature):
    """What a worker warms up with is valid input."""
    assert signature.rows(signature.check(signature.example(2))) == 2
