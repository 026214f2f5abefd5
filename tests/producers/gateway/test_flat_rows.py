"""Rows of plain numbers, and outputs as JSON and bytes: bounds and forms, without a server."""

from __future__ import annotations

import base64
import json

import msgspec
import numpy as np
import pytest

from penstock.producers.gateway.exchange import JSON
from penstock.producers.gateway.flat_rows import flat_rows
from penstock.producers.gateway.tensors import BINARY, MSGPACK, write_outputs
from penstock.registry.codecs import Codec
from penstock.registry.errors import InvalidInput
from penstock.registry.tensors import Array


@pytest.mark.parametrize(("rows", "numbers"), [(1, 1), (1, 10_000), (64, 10_000), (640_000, 1)])
def test_rows_within_the_bounds_are_an_array(rows: int, numbers: int):
    """CX-023, CX-032: 1 to 10,000 numbers a row, and at most 640,000 in all, as float64."""
    found = flat_rows([[0.5] * numbers] * rows)
    assert found.shape == (rows, numbers)
    assert found.dtype == np.float64


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "No row"),
        ([[]], "Expected rows of 1 to 10000 numbers"),
        ([[1.0] * 10_001], "Expected rows of 1 to 10000 numbers"),
        ([[1.0], [1.0, 2.0]], "unequal lengths"),
        ([[1.0] * 10_000] * 65, "Too many numbers. Expected at most 640000"),
    ],
)
def test_rows_beyond_the_bounds_are_refused(rows: list[list[float]], text: str):
    """With the bound."""
    with pytest.raises(InvalidInput, match=text):
        flat_rows(rows)


OUTPUTS: dict[str, Array] = {
    "finite": np.array([[1.5, -2.0]], np.float32),
    "large": np.array([3e38, 3e38], np.float32),
    "broken": np.array([np.nan, np.inf], np.float32),
    "whole": np.array([1 << 60], np.int64),
    "text": np.array(["é", ""], object),
    "none": np.zeros((0, 4), np.float32),
}


@pytest.mark.parametrize("codec", ["json", "base64"])
def test_outputs_in_json(codec: Codec):
    """Lists where the package wants them and JSON has the numbers; base64 of little-endian bytes else. Sums of squares
    that overflow are no reason for base64."""
    body, kind, headers = write_outputs(OUTPUTS, codec, {"model": "m"}, JSON)
    found = json.loads(body, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert (kind, headers, found.pop("model"), found.keys()) == (JSON, [], "m", {"outputs"})
    forms = {name: "data" if "data" in each else "base64" for name, each in found["outputs"].items()}
    in_base64 = {"broken"} if codec == "json" else {*OUTPUTS} - {"text"}
    assert {name for name, form in forms.items() if form == "base64"} - {"text"} == in_base64
    for name, each in found["outputs"].items():
        values = OUTPUTS[name]
        assert each["shape"] == list(values.shape)
        if forms[name] == "data":
            assert each["data"] == values.tolist()
        elif name != "text":
            assert base64.b64decode(each["base64"]) == values.tobytes()


def test_outputs_in_bytes():
    """MessagePack holds them, and behind a JSON head they follow in their order."""
    packed, kind, _ = write_outputs(OUTPUTS, "json", {"model": "m"}, MSGPACK)
    found = msgspec.msgpack.decode(packed)
    assert (kind, found["model"]) == (MSGPACK, "m")
    body, kind, ((name, length),) = write_outputs(OUTPUTS, "json", {"model": "m"}, BINARY)
    head, tail = json.loads(body[: int(length)]), body[int(length) :]
    assert (kind, name) == (BINARY, b"inference-header-content-length")
    for output, values in OUTPUTS.items():
        size = head["outputs"][output]["nbytes"]
        assert tail[:size] == found["outputs"][output]["data"]
        if output != "text":
            assert tail[:size] == values.tobytes()
        tail = tail[size:]
    assert tail == b""
