"""S1, malformed input: caps on bytes, items, depth; NaN, dtypes, shapes. A clear error for little work and memory.

Work is counted in lines of Python; `python -m tests.threats` measures the seconds.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.registry.admission import JobBuilder
from penstock.registry.envelope import Keyring
from penstock.registry.errors import InvalidInput, PenstockError, UndecodableEnvelope
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import MAX_BYTES, MAX_STRINGS, MAX_TENSORS, Tensor, decode, encode
from tests.counting import lines_run

SPEC = ModelSpec.model_validate(
    {
        "name": "double",
        "version": "1",
        "format": "python",
        "entrypoint": "model:build",
        "inputs": [
            {"name": "x", "dtype": "float32", "shape": ["batch", 4], "optional": True},
            {"name": "label", "dtype": "int64", "shape": ["batch"], "optional": True, "min": 0, "max": 9},
            {"name": "text", "dtype": "string", "shape": ["batch"]},
        ],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
    }
)
BUILDER = JobBuilder(tenant="default", keyring=Keyring.parse(None), max_bytes=MAX_BYTES)
ROWS = MAX_BYTES // 16
MAX_LINES = 200_000
"""A few for each string that may travel. A loop over the numbers or strings of a full body runs millions."""
FULL = np.ones((ROWS, 4), np.float32)
TEXT = {"text": ["a"]}


def _last(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.copy()
    changed.flat[-1] = value
    return changed


def _nested(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value]
    return value


OFFERS: dict[str, Callable[[], dict[Any, Any]]] = {
    "a NaN at the end": lambda: {"x": _last(FULL, math.nan), "text": ["a"] * ROWS},
    "an infinity at the end": lambda: {"x": _last(FULL, math.inf), **TEXT},
    "one byte too many": lambda: {"x": np.ones((ROWS + 1, 4), np.float32), **TEXT},
    "ten times too many": lambda: {"x": np.ones((ROWS * 10, 4), np.float32), **TEXT},
    "another dtype": lambda: {"x": FULL.astype(np.float64), **TEXT},
    "complex": lambda: {"x": FULL.astype(np.complex64), **TEXT},
    "objects": lambda: {"x": np.full((1000, 4), None), **TEXT},
    "structured": lambda: {"x": np.zeros((1000, 4), "f4,f4"), **TEXT},
    "dates": lambda: {"x": np.zeros((1000, 4), "M8[s]"), **TEXT},
    "another shape": lambda: {"x": FULL.reshape(-1, 2), **TEXT},
    "another rank": lambda: {"x": FULL.reshape(-1), **TEXT},
    "no rows": lambda: {"x": FULL[:0], **TEXT},
    "out of range at the end": lambda: {"label": _last(np.zeros(MAX_BYTES // 8, np.int64), 10), **TEXT},
    "sixty-four levels": lambda: {"x": _nested(64), **TEXT},
    "a thousand levels": lambda: {"x": _nested(1_000), **TEXT},
    "ragged": lambda: {"x": [[1.0] * 4] * 1_000 + [[1.0] * 3], **TEXT},
    "too many strings": lambda: {"text": ["a"] * (MAX_STRINGS + 1)},
    "a lone surrogate": lambda: {"text": ["\ud800"]},
    "too long a text": lambda: {"text": ["a" * (MAX_BYTES + 1)]},
    "bytes for text": lambda: {"text": [b"a"] * 1_000},
    "a thousand unknown names": lambda: {**TEXT, **{f"name{n}": 1 for n in range(1_000)}},
    "a name of a megabyte": lambda: {**TEXT, "n" * 1_000_000: 1},
    "numbers as names": lambda: {**TEXT, 7: 1, None: 2},
    "an integer that no float holds": lambda: {"x": [[10**400, 1, 1, 1]], **TEXT},
    "truth values": lambda: {"x": [[True] * 4], **TEXT},
}


def _cost(action: Callable[[], object]) -> tuple[BaseException, int, int]:
    """(error, lines of Python run, bytes of the highest rise in memory) of something that must be refused."""
    with pytest.raises(PenstockError) as refused:
        action()

    def again() -> None:
        with pytest.raises(PenstockError):
            action()

    lines = lines_run(again)
    tracemalloc.start()
    try:
        with pytest.raises(PenstockError):
            action()
        return refused.value, lines, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _check(error: BaseException, lines: int, rise: int, size: int) -> None:
    assert str(error)
    assert len(str(error)) < 10_000
    assert "\n" not in str(error)
    assert lines <= MAX_LINES
    # A small body may cost what a handful of objects do.
    assert rise <= max(2 * size, 1_000_000)


@pytest.mark.parametrize("what", OFFERS)
def test_input_is_refused_for_little_work_and_within_twice_its_size(what: str):
    """Before anything is written: one line, few lines of Python, at most twice the body in memory."""
    inputs = OFFERS[what]()
    size = sum(value.nbytes if isinstance(value, np.ndarray) else 0 for value in inputs.values())
    error, lines, rise = _cost(lambda: BUILDER.build(SPEC, inputs))
    assert isinstance(error, InvalidInput)
    _check(error, lines, rise, size)


def _lengths(*lengths: int) -> bytes:
    return np.array(lengths, "<u4").tobytes()


_MANY = MAX_BYTES // 4
BODIES: dict[str, tuple[list[Tensor], Callable[[], bytes]]] = {
    "numbers that do not fit": ([Tensor("x", "float32", (ROWS, 4))], lambda: bytes(MAX_BYTES - 1)),
    "a shape of 2**63 and no bytes": ([Tensor("x", "float32", (2**63 - 1, 2**63 - 1))], lambda: b""),
    "seven thousand dimensions": ([Tensor("x", "float32", (2**63 - 1,) * 7_000)], lambda: bytes(16)),
    "a zero that hides the rest": ([Tensor("x", "float32", (0, *(2**63 - 1,) * 7_000))], lambda: b""),
    "two million empty strings": ([Tensor("x", "string", (_MANY,))], lambda: bytes(MAX_BYTES)),
    "as many in forty tensors": (
        [Tensor(f"x{n}", "string", (_MANY // 40,)) for n in range(40)],
        lambda: bytes(MAX_BYTES),
    ),
    "lengths that wrap around": ([Tensor("x", "string", (4,))], lambda: _lengths(*[2**32 - 1] * 4) + bytes(MAX_BYTES)),
    "a bad letter at the end": (
        [Tensor("x", "string", (MAX_STRINGS,))],
        lambda: _lengths(*[300] * MAX_STRINGS) + b"a" * (300 * MAX_STRINGS - 1) + b"\xff",
    ),
    "more tensors than may travel": (
        [Tensor(f"x{n}", "int8", (1,)) for n in range(MAX_TENSORS + 1)],
        lambda: bytes(MAX_TENSORS + 1),
    ),
    "ten megabytes behind the last": ([Tensor("x", "int8", (1,))], lambda: bytes(MAX_BYTES)),
    "objects": ([Tensor("x", "object", (_MANY // 2,))], lambda: bytes(MAX_BYTES)),
}


@pytest.mark.parametrize("what", BODIES)
def test_body_is_refused_for_little_work_and_within_twice_its_size(what: str):
    """On the worker's side: what a description claims is neither believed nor allocated."""
    described, make = BODIES[what]
    body = make()
    error, lines, rise = _cost(lambda: decode(described, body))
    assert isinstance(error, UndecodableEnvelope)
    _check(error, lines, rise, len(body))


def test_cap_on_strings_is_exact():
    """As many as may travel come back; one more is refused on either side, also when spread over tensors."""
    most = np.full(MAX_STRINGS, "", object)
    described, body = encode({"x": most})
    assert decode(described, body)["x"].size == MAX_STRINGS
    with pytest.raises(InvalidInput, match=f"Expected at most {MAX_STRINGS}"):
        encode({"x": most, "y": np.array(["a"], object)})
    more, tail = encode({"y": np.array(["a"], object)})
    with pytest.raises(UndecodableEnvelope, match=f"more than {MAX_STRINGS} strings"):
        decode([*described, *more], body + tail)
