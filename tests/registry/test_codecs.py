"""IN-004: the json and base64 codecs bring every dtype back, bit by bit, and refuse what contradicts itself."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.codecs import Codec, read_array, written
from penstock.registry.errors import InvalidInput
from penstock.registry.package.spec_sections import Codecs
from penstock.registry.tensors import DTYPES, MAX_BYTES, MAX_DIMS

CODECS: tuple[Codec, ...] = get_args(Codec)
NUMERIC = sorted(DTYPES.keys() - {"string"})
SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def travelled(values: np.ndarray, codec: Codec) -> np.ndarray:
    """There and back, through the text of a JSON document."""
    text = json.dumps(written(values, codec), allow_nan=False)
    return read_array("x", json.loads(text))


def noise(name: str, shape: tuple[int, ...], seed: bytes) -> np.ndarray:
    """Any bits at all, as far as the dtype allows."""
    size = math.prod(shape) * DTYPES[name].itemsize
    raw = (seed * (size // len(seed) + 1))[:size]
    return np.frombuffer(bytes(byte & 1 for byte in raw) if name == "bool" else raw, DTYPES[name]).reshape(shape)


@given(name=st.sampled_from(NUMERIC), shape=SHAPES, seed=st.binary(min_size=8, max_size=8))
def test_base64_brings_every_bit_back(name: str, shape: tuple[int, ...], seed: bytes):
    """float16 and bool as well as the others; NaN payloads, signed zeros and infinities included."""
    sent = noise(name, shape, seed)
    got = travelled(sent, "base64")
    assert (got.dtype, got.shape, got.tobytes()) == (DTYPES[name], shape, sent.tobytes())


@given(name=st.sampled_from(NUMERIC), shape=SHAPES, seed=st.binary(min_size=8, max_size=8))
def test_json_brings_every_number_back(name: str, shape: tuple[int, ...], seed: bytes):
    """Decimal digits say each finite number exactly; the largest integers too."""
    sent = np.array(noise(name, shape, seed))
    if sent.dtype.kind == "f":
        sent[~np.isfinite(sent)] = 0
    got = travelled(sent, "json")
    assert (got.dtype, got.shape, got.tobytes()) == (DTYPES[name], shape, sent.tobytes())


@pytest.mark.parametrize("codec", CODECS)
@given(texts=st.lists(TEXTS, max_size=4))
def test_text_comes_back(codec: Codec, texts: list[str]):
    """Empty and foreign text too."""
    assert travelled(np.array(texts, object), codec).tolist() == texts


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", [name for name in NUMERIC if DTYPES[name].itemsize > 1])
def test_the_order_of_bytes_is_fixed(name: str, codec: Codec):
    """Where an array's own bytes are the other way round, the document says the same, and base64 is little-endian."""
    little = np.arange(1, 4).astype(DTYPES[name])
    big = little.astype(DTYPES[name].newbyteorder(">"))
    assert written(big, codec) == written(little, codec)
    got = travelled(big, codec)
    assert (got.dtype, got.tolist()) == (DTYPES[name], [1, 2, 3])
    assert base64.b64decode(written(big, "base64")["base64"]) == little.tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_is_no_json(value: float):
    """Other readers of JSON would refuse the whole document."""
    with pytest.raises(InvalidInput, match="no JSON"):
        written(np.array([value], np.float16), "json")


def document(**fields: Any) -> dict[str, Any]:
    """Two numbers, with some fields changed; None removes one."""
    whole = {"dtype": "int16", "shape": [2], "data": [1, 2]} | fields
    return {name: value for name, value in whole.items() if value is not None}


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ([1, 2], "found no tensor"),
        (document(data=None), "found no tensor"),
        (document(base64="AQACAA=="), "found no tensor"),
        (document(extra=1), "found no tensor"),
        (document(dtype="object"), "dtype 'object'"),
        (document(dtype=["int16"]), "dtype of type list"),
        (document(shape=[-1]), "a shape that is none"),
        (document(shape=[2.0]), "a shape that is none"),
        (document(shape=[True, 2]), "a shape that is none"),
        (document(shape=[1] * (MAX_DIMS + 1)), "a shape that is none"),
        (document(shape=[3]), r"shape \(2,\)"),
        (document(shape=[0]), "data of another shape"),
        (document(shape=[0], data=[[], [1]]), "data of another shape"),
        (document(data=[1, 1 << 15]), "does not fit"),
        (document(data=[1, 0.5]), "does not fit|contains float"),
        (document(data=[1, "2"]), "contains str"),
        (document(data=[1, True]), "contains bool"),
        (document(dtype="bool", data=[1, 0]), "contains int"),
        (document(dtype="string", data=["a", 1]), "contains int"),
        (document(data=None, base64="AQACAA="), "not base64"),
        (document(data=None, base64="AQ AC AA=="), "not base64"),
        (document(data=None, base64="AQACAA==é"), "not base64"),
        (document(data=None, base64=b"AQACAA=="), "no base64"),
        (document(data=None, base64="AQA="), "do not fit"),
        (document(data=None, base64="AQACAAMA"), "do not fit"),
        (document(data=None, base64="AQACAA==", shape=[1 << 62, 1 << 62]), "impossible shape"),
        (document(data=None, base64="A" * (MAX_BYTES * 4 // 3 + 8)), "too long"),
        (document(dtype="string", data=None, base64="/////w=="), "do not fit"),
    ],
)
def test_documents_that_contradict_themselves_are_refused(found: object, complaint: str):
    """dtype, shape and data must say the same, and base64 is read strictly."""
    with pytest.raises(InvalidInput, match=complaint):
        read_array("x", found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@given(
    dtype=st.sampled_from(list(DTYPES)) | JSON,
    shape=st.lists(st.integers(-1, 3), max_size=3) | JSON,
    data=JSON,
    key=st.sampled_from(["data", "base64"]),
)
def test_noise_is_refused_or_read_as_described(dtype: object, shape: object, data: object, key: str):
    """Whatever a stranger writes: InvalidInput, or an array of the dtype and shape that it claims."""
    try:
        got = read_array("x", {"dtype": dtype, "shape": shape, key: data})
    except InvalidInput:
        return
    assert (got.dtype, list(got.shape)) == (DTYPES[str(dtype)], shape)


def test_packages_name_these_codecs():
    """`codecs.default` of model.yaml is one of them, json where it says nothing (IN-027)."""
    assert Codecs().default == "json"
    assert [Codecs(default=codec).default for codec in CODECS] == list(CODECS)
