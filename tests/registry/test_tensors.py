"""Tensors as bytes: every dtype there and back, and descriptions that lie about their bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.errors import InvalidInput, UndecodableEnvelope
from penstock.registry.tensors import DTYPES, MAX_DIMS, MAX_TENSORS, Tensor, decode, encode, encoded_size

NUMERIC = sorted(DTYPES.keys() - {"string"})
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(name=st.sampled_from(NUMERIC), shape=SHAPES, seed=st.binary(min_size=8, max_size=8))
def test_numbers_come_back_bit_by_bit(name: str, shape: tuple[int, ...], seed: bytes):
    """NaN payloads, signed zeros and infinities included; little-endian on the way."""
    size = math.prod(shape) * DTYPES[name].itemsize
    raw = (seed * (size // 8 + 1))[:size] if name != "bool" else bytes(byte & 1 for byte in (seed * size)[:size])
    sent = np.frombuffer(raw, DTYPES[name]).reshape(shape)
    described, body = encode({"x": sent})
    assert body == raw
    got = decode(described, body)["x"]
    assert (got.dtype, got.shape, got.tobytes()) == (DTYPES[name], shape, raw)
    assert encoded_size({"x": sent}) == len(body)


@given(texts=st.lists(TEXTS, min_size=4, max_size=4), number=st.floats(width=32))
def test_text_and_numbers_travel_together(texts: list[str], number: float):
    """Several tensors in one body, in the order of their description; empty and foreign text too."""
    sent = {
        "a": np.array(texts, object).reshape(2, 2),
        "b": np.array([number], np.float32),
        "c": np.array(texts[:1], object),
    }
    described, body = encode(sent)
    got = decode(described, body)
    assert list(got) == ["a", "b", "c"]
    assert got["a"].tolist() == [texts[:2], texts[2:]]
    assert got["c"].tolist() == texts[:1]
    assert got["b"].tobytes() == sent["b"].tobytes()
    assert encoded_size(sent) <= len(body)


def _x(dtype: str = "float32", *shape: int) -> Tensor:
    return Tensor("x", dtype, shape)


def _lengths(*lengths: int) -> bytes:
    return np.array(lengths, "<u4").tobytes()


@pytest.mark.parametrize(
    ("described", "body", "complaint"),
    [
        ([_x("float32", 2)], b"\0" * 7, "do not fit its 7 bytes"),
        ([_x("float32", 2)], b"\0" * 9, "do not fit its 9 bytes"),
        ([_x("float32", 2), Tensor("y", "int8", (1,))], b"\0" * 8, "do not fit its 0 bytes"),
        ([_x("int8", 1), Tensor("y", "int8", (1,))], b"\0" * 3, "1 bytes follow the last tensor"),
        ([_x("int8", 1), _x("int8", 1)], b"\0" * 2, "two tensors share a name"),
        ([_x("float128", 1)], b"\0" * 16, "unknown dtype"),
        ([_x("object", 1)], b"\0" * 8, "unknown dtype"),
        ([_x("float32", -1, -1)], b"\0" * 4, "impossible shape"),
        ([_x("int8", *([1] * (MAX_DIMS + 1)))], b"\0", "impossible shape"),
        ([_x("int8", 1 << 62, 1 << 62)], b"\0" * 8, "impossible shape"),
        ([_x("int8", 0, 1 << 62, 1 << 62)], b"", "impossible shape"),
        ([Tensor(f"x{n}", "int8", (1,)) for n in range(MAX_TENSORS + 1)], b"\0" * 65, "at most 64"),
        ([_x("string", 1 << 40)], b"\0" * 8, "impossible shape"),
        ([_x("string", 1 << 10)], b"\0" * 8, "fewer bytes than its 1024 lengths need"),
        ([_x("string", 2)], _lengths(1, 5) + b"abc", "its lengths exceed its bytes"),
        ([_x("string", 2)], _lengths(0xFFFFFFFF, 0xFFFFFFFF) + b"abc", "its lengths exceed its bytes"),
        ([_x("string", 1)], _lengths(2) + b"\xff\xfe", "is not UTF-8"),
        ([_x("string", 1)], _lengths(1) + b"ab", "1 bytes follow the last tensor"),
    ],
)
def test_description_that_does_not_fit_its_bytes_is_refused(described: list[Tensor], body: bytes, complaint: str):
    """Neither a wrong view of memory nor an allocation of what a shape claims: the bytes go to the dead letters."""
    with pytest.raises(UndecodableEnvelope, match=complaint):
        decode(described, body)


@given(body=st.binary(max_size=64), shape=SHAPES, name=st.sampled_from([*NUMERIC, "string"]), twice=st.booleans())
def test_noise_under_any_description_is_refused_or_read_whole(
    body: bytes, shape: tuple[int, ...], name: str, twice: bool
):
    """Whatever a forger writes: an UndecodableEnvelope, or arrays of the shapes that were described."""
    described = [Tensor("x", name, shape), *([Tensor("y", "int8", (1,))] if twice else [])]
    try:
        arrays = decode(described, body)
    except UndecodableEnvelope:
        return
    assert [array.shape for array in arrays.values()] == [tensor.shape for tensor in described]


def test_received_arrays_are_views_that_cannot_be_written_to():
    """Nothing is copied, and a model cannot change what another reader of the bytes sees."""
    described, body = encode({"x": np.arange(4, dtype=np.float32)})
    got = decode(described, body)["x"]
    assert not got.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (np.zeros(1, np.complex64), "dtype complex64 cannot travel"),
        (np.array([b"bytes"], object), r"^x: contains other elements than str\. Expected str$"),
        (np.array(["\ud800"], object), r"^x: contains a lone surrogate\. Expected text that UTF-8 can encode$"),
    ],
)
def test_what_cannot_travel_is_refused(value: np.ndarray, complaint: str):
    """The error says which elements are expected."""
    with pytest.raises(InvalidInput, match=complaint):
        encode({"x": value})
