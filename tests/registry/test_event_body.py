"""Events that travel together: what comes back, what no reader could decode, and what they weigh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.errors import InvalidInput, UndecodableEnvelope
from penstock.registry.event_body import MAX_PARTS, EventPart, chunk_part, decode_parts, encode_parts
from penstock.registry.tensors import MAX_DIMS, MAX_TENSORS, Array, Tensor

MAX_BYTES = 10_000


def parts_of(events: list[dict[str, Array] | float]) -> list[EventPart]:
    """As a running job makes them: each chunk is compared with the one before."""
    parts: list[EventPart] = []
    like = None
    for event in events:
        if isinstance(event, float):
            parts.append(EventPart(fraction=event))
        else:
            parts.append(chunk_part(event, like, MAX_BYTES))
            like = parts[-1].content
    return parts


def read(body: bytes) -> list[Any]:
    """Each event as plain data."""
    return [
        {name: values.tolist() for name, values in part.values(content).items()}
        if part.fraction is None
        else part.fraction
        for part, content in decode_parts(body)
    ]


chunks = st.one_of(
    st.floats(0, 1),
    st.lists(st.integers(-(2**31), 2**31), min_size=1, max_size=4).map(lambda values: {"t": np.array(values)}),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(lambda text: {"text": np.array([text], object)}),
    st.just({}),
)


@given(events=st.lists(chunks, max_size=20))
def test_every_event_comes_back_in_its_order(events: list[Any]):
    """Chunks of one shape or of several, empty ones, and progress between them."""
    plain = [
        {name: values.tolist() for name, values in event.items()} if isinstance(event, dict) else event
        for event in events
    ]
    assert read(encode_parts(parts_of(events))) == plain


def test_tokens_of_one_shape_share_their_description():
    """A thousand tokens of eight bytes take less than 16 bytes each."""
    tokens: list[dict[str, Array] | float] = [{"token": np.array([number])} for number in range(1000)]
    body = encode_parts(parts_of(tokens))
    assert len(body) < 16 * 1000
    assert [event["token"] for event in read(body)] == [[number] for number in range(1000)]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"x": np.zeros(MAX_BYTES + 1, np.uint8)}, f"It has {MAX_BYTES + 1} bytes. Expected at most {MAX_BYTES}"),
        ({f"x{n}": np.zeros(1) for n in range(MAX_TENSORS + 1)}, f"It has {MAX_TENSORS + 1} tensors"),
        ({"x": np.zeros((1,) * (MAX_DIMS + 1))}, "x: shape"),
        ({"x": np.zeros((0, 2**40))}, "x: shape"),
        ({"x": np.array(["\udcff"], object)}, "contains a lone surrogate"),
        ({"x": np.array([object()])}, "contains other elements than str"),
        ({"x": np.zeros(1, np.complex64)}, "dtype complex64 cannot travel"),
        ({"\udcff": np.zeros(1)}, "Expected 1 to 64 printable ones"),
        ({"": np.zeros(1)}, "Expected 1 to 64 printable ones"),
        ({"x" * 65: np.zeros(1)}, "A name has 65 characters"),
    ],
)
def test_chunk_that_nobody_could_read_is_refused(values: Mapping[str, Array], problem: str):
    """Size, number, shape, text, dtype and name, each with what was found and what was expected."""
    with pytest.raises(InvalidInput, match=problem):
        chunk_part(values, None, MAX_BYTES)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([[b"12345678", None, None]]),
        msgspec.msgpack.encode([[b"1234567", [["t", "int64", [1]]], None]]),
        msgspec.msgpack.encode([[b"", None, 0.5]] * (MAX_PARTS + 1)),
    ],
    ids=["nothing", "no msgpack", "no list", "no description", "too short", "too many"],
)
def test_foreign_body_is_undecodable(body: bytes):
    """Whatever is in the place of the events, a subscriber gets one error."""
    with pytest.raises(UndecodableEnvelope):
        read(body)


def test_description_is_checked_once():
    """The content of an earlier chunk is returned as it is, so that its chunks share it."""
    first = chunk_part({"t": np.array([1])}, None, MAX_BYTES)
    again = chunk_part({"t": np.array([2])}, first.content, MAX_BYTES)
    assert again.content is first.content
    assert first.content == (Tensor("t", "int64", (1,)),)
    assert chunk_part({"t": np.array([1, 2])}, first.content, MAX_BYTES).content != first.content
