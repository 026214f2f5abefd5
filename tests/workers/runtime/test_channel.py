"""Messages between a worker and an instance: arrays arrive as they were sent, and foreign bytes do no harm."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.registry.errors import InvalidInput
from penstock.workers.runtime.channel import BadMessage, Channel, Disconnected

NUMBERS = arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.floating_dtypes(sizes=(16, 32, 64))
TEXT = st.text(st.characters(categories=["L", "So", "Cs", "Cc"]), max_size=5)


class Pair:
    """Both ends of a connection."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.near, self.far = Channel(self.ours), Channel(self.theirs)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@given(NUMBERS.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))))
def test_numbers_of_every_dtype_and_shape_arrive_unchanged(values: Any):
    """Also none at all, and bytes in another order; the receiver may write to them."""
    pair = Pair()
    pair.near.send("run", {"number": 7}, {"x": values, "same": values})
    kind, facts, found = pair.far.receive()
    pair.close()
    assert (kind, facts, list(found)) == ("run", {"number": 7}, ["x", "same"])
    for each in found.values():
        assert (each.dtype, each.shape) == (values.dtype, values.shape)
        assert each.tobytes() == values.tobytes()
        assert each.flags.writeable


@example(np.array(["\ud800"], object))
@given(arrays.arrays(object, arrays.array_shapes(max_dims=2, min_side=0), elements=TEXT))
def test_text_arrives_unchanged(values: Any):
    """Also a lone surrogate: a result with it is refused later, with a better message."""
    pair = Pair()
    pair.near.send("run", arrays={"text": values})
    found = pair.far.receive().arrays["text"]
    pair.close()
    assert found.shape == values.shape
    assert found.tolist() == values.tolist()


def test_large_arrays_and_parts_of_arrays_arrive(pair: Pair):
    """More than a socket holds, and rows that do not lie side by side in memory."""
    values = np.arange(3_000_000, dtype=np.float32).reshape(1000, 3000)
    sender = threading.Thread(target=pair.near.send, args=("run", None, {"x": values, "part": values[:, ::7]}))
    sender.start()
    found = pair.far.receive().arrays
    sender.join(60)
    assert (found["x"] == values).all()
    assert (found["part"] == values[:, ::7]).all()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.zeros(2, "V8"), "y: dtype |V8 cannot travel"),
        (np.array(["a", 1], object), "y: contains other elements than str. Expected str"),
    ],
)
def test_arrays_that_cannot_travel_are_refused_before_anything_is_sent(values: Any, text: str, pair: Pair):
    """In the words of the result that they cannot become; the next message arrives."""
    with pytest.raises(InvalidInput) as refused:
        pair.near.send("outputs", arrays={"x": np.zeros(1), "y": values})
    assert text in str(refused.value)
    pair.near.send("error")
    assert pair.far.receive().kind == "error"


@given(st.binary(min_size=1, max_size=80))
def test_foreign_bytes_are_no_message(data: bytes):
    """Whatever they are, behind lengths that fit them."""
    pair = Pair()
    pair.ours.sendall(len(data).to_bytes(4, "little") + bytes(8) + data)
    with pytest.raises(BadMessage):
        pair.far.receive()
    pair.close()


def test_lengths_beyond_all_measure_are_refused_before_memory_is_taken(pair: Pair):
    """Twelve bytes cannot have the receiver take 16 exabytes."""
    pair.ours.sendall(b"\xff" * 12)
    with pytest.raises(BadMessage, match=r"a message of 4294967295"):
        pair.far.receive()


def test_the_end_of_one_side_is_noticed_by_the_other(pair: Pair):
    """While it waits for a message, in the middle of one, and when it sends."""
    pair.ours.sendall(b"\x01")
    waiting: list[type[Exception]] = []

    def receive() -> None:
        try:
            pair.far.receive()
        except Exception as error:
            waiting.append(type(error))

    thread = threading.Thread(target=receive)
    thread.start()
    pair.near.close()
    thread.join(60)
    assert waiting == [Disconnected]
    with pytest.raises(Disconnected):
        pair.far.send("run", arrays={"x": np.zeros(1_000_000)})
