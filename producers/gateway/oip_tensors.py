"""Tensors of the Open Inference Protocol <-> arrays.

    {"name", "datatype", "shape", "data": [...]}                        values in row-major order, flat or nested
    {"name", "datatype", "shape", "parameters": {"binary_data_size"}}   bytes behind the JSON, in their order

BYTES tensors hold text here: each element is its length (uint32, little-endian) and its UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from penstock.producers.gateway.exchange import JSON, Exchange, RequestRefused
from penstock.producers.gateway.tensors import BINARY, HEAD_LENGTH, decoded, dtype_of, split_binary
from penstock.registry.errors import InvalidInput, UndecodableEnvelope, shown
from penstock.registry.tensors import DTYPES, MAX_STRINGS, STRING, Array, Tensor, decode

__all__ = [
    "DATATYPES",
    "DTYPES_OF",
    "InferRequest",
    "OpenedRequest",
    "bytes_of",
    "check_parameters",
    "count_of",
    "from_bytes",
    "read_infer",
    "write_infer",
]

DATATYPES: Final = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    STRING: "BYTES",
}
"""The datatypes of the protocol by ours."""
DTYPES_OF: Final = {datatype: dtype for dtype, datatype in DATATYPES.items()}
"""Our dtypes by those of the protocol."""
_OF_REQUEST: Final = frozenset({"priority", "timeout", "binary_data_output"})
_OF_INPUT: Final = frozenset({"binary_data_size"})
_OF_OUTPUT: Final = frozenset({"binary_data"})
_MOST_DIMS: Final = 8
_MOST_NAMED: Final = 8
_MOST_ELEMENTS: Final = 64 * 1024 * 1024


class InferInput(msgspec.Struct):
    """One input."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = msgspec.UNSET


class InferOutput(msgspec.Struct):
    """A wanted output."""

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct):
    """A request for an inference. parameters: priority, timeout in microseconds, binary_data_output."""

    inputs: list[InferInput]
    outputs: list[InferOutput] = []
    parameters: dict[str, Any] = {}
    id: str = ""


class OpenedRequest(msgspec.Struct):
    """A request with its tensors. wanted: the names of outputs; empty: all. binary: those that travel as bytes."""

    id: str
    tensors: dict[str, Array]
    wanted: tuple[str, ...]
    parameters: dict[str, Any]
    binary: frozenset[str] | None
    """None: all."""


def read_infer(exchange: Exchange, body: bytes) -> OpenedRequest:
    """Opens a request. Raises InvalidInput with the name of the tensor, and RequestRefused for another content type."""
    if exchange.media_type not in ("", JSON.decode(), BINARY.decode()):
        raise RequestRefused(415, "An unknown content type. Expected application/json or application/octet-stream")
    tail = memoryview(b"")
    head: bytes | memoryview = body
    if HEAD_LENGTH in exchange.headers:
        head, tail = split_binary(exchange, body)
    request = decoded(head, InferRequest)
    check_parameters("request", request.parameters, _OF_REQUEST)
    for output in request.outputs:
        check_parameters("output", output.parameters, _OF_OUTPUT)
    tensors: dict[str, Array] = {}
    for each in request.inputs:
        if each.name in tensors:
            raise InvalidInput(f"{shown(each.name)} is there twice. Expected each input once")
        tensors[each.name], tail = _read(each, tail)
    if tail:
        raise InvalidInput(f"{len(tail)} bytes follow the last input. Expected those of binary_data_size")
    return OpenedRequest(
        request.id,
        tensors,
        tuple(output.name for output in request.outputs),
        request.parameters,
        _binary(request),
    )


def write_infer(
    request: OpenedRequest, model: str, version: str, outputs: Mapping[str, Array]
) -> tuple[bytes, int | None]:
    """(body, bytes of its JSON). None: the body is JSON only."""
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name, values in outputs.items():
        dtype = dtype_of(values)
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[dtype], "shape": values.shape}
        if request.binary is None or name in request.binary:
            raw = bytes_of(values)
            entry["parameters"] = {"binary_data_size": len(raw)}
            parts.append(raw)
        else:
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise InvalidInput(
                    f"{name} has NaN or infinity, which JSON lacks. Expected binary_data for this output"
                )
            entry["data"] = values.ravel().tolist()
        described.append(entry)
    head: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": described}
    if request.id:
        head["id"] = request.id
    encoded = msgspec.json.encode(head)
    return (b"".join((encoded, *parts)), len(encoded)) if parts else (encoded, None)


def _binary(request: InferRequest) -> frozenset[str] | None:
    everything = request.parameters.get("binary_data_output", False)
    if not request.outputs and everything is True:
        return None
    return frozenset(
        output.name for output in request.outputs if output.parameters.get("binary_data", everything) is True
    )


def _read(each: InferInput, tail: memoryview) -> tuple[Array, memoryview]:
    """(array, the rest of the bytes)."""
    check_parameters("input", each.parameters, _OF_INPUT)
    name, dtype = shown(each.name), DTYPES_OF.get(each.datatype)
    if dtype is None:
        raise InvalidInput(f"{name}: an unknown datatype. Expected one of: {', '.join(DTYPES_OF)}")
    count = count_of(name, each.shape)
    size = each.parameters.get("binary_data_size")
    if (size is None) == (each.data is msgspec.UNSET):
        raise InvalidInput(f"{name}: found both or none of data and binary_data_size. Expected one of them")
    if size is None:
        return _from_data(name, dtype, each.shape, count, each.data), tail
    if type(size) is not int or not 0 <= size <= len(tail):
        raise InvalidInput(f"{name}: bad binary_data_size. Expected at most the {len(tail)} bytes that are left")
    return from_bytes(name, dtype, each.shape, count, tail[:size]), tail[size:]


def check_parameters(where: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises InvalidInput for parameters that are not obeyed, such as classification, sequences and shared memory.

    where: request, input or output.
    """
    if not found.keys() <= known:
        unknown = ", ".join(shown(name) for name in sorted(found.keys() - known)[:_MOST_NAMED])
        expected = ", ".join(sorted(known)) or "none"
        raise InvalidInput(f"Unknown parameters of the {where}: {unknown}. Expected only: {expected}")


def count_of(name: str, shape: Sequence[int]) -> int:
    """The elements of a shape. Raises InvalidInput. name: of the tensor, as it may be shown."""
    count = 1
    for extent in shape:
        count *= extent
        if extent < 0 or count > _MOST_ELEMENTS:
            break
    else:
        if len(shape) <= _MOST_DIMS:
            return count
    raise InvalidInput(f"{name}: an impossible shape. Expected at most {_MOST_DIMS} extents, none below 0")


def _from_data(name: str, dtype: str, shape: list[int], count: int, data: object) -> Array:
    flat: list[Any] = []
    _flatten(name, data, flat, count, 0)
    kind = str if dtype == STRING else bool if dtype == "bool" else float if dtype.startswith("float") else int
    # A bool is an int in Python, and a whole number a float in JSON.
    allowed = (int, float) if kind is float else (kind,)
    if len(flat) != count or any(type(value) not in allowed for value in flat):
        raise InvalidInput(f"{name}: other data than its datatype and shape. Expected {count} of {DATATYPES[dtype]}")
    try:
        with np.errstate(over="ignore"):
            values: Array = np.array(flat, DTYPES[dtype]).reshape(shape)
    except (OverflowError, ValueError):
        raise InvalidInput(f"{name}: a value does not fit. Expected values of {DATATYPES[dtype]}") from None
    return values


def _flatten(name: str, data: object, flat: list[Any], count: int, depth: int) -> None:
    if not isinstance(data, list):
        flat.append(data)
        return
    if depth > _MOST_DIMS:
        raise InvalidInput(f"{name}: data nested too deeply. Expected at most {_MOST_DIMS} dimensions")
    if not any(isinstance(value, list) for value in data):
        flat.extend(data)
        return
    for value in data:
        _flatten(name, value, flat, count, depth + 1)


def from_bytes(name: str, dtype: str, shape: Sequence[int], count: int, body: memoryview) -> Array:
    """The array of raw bytes, a view where the dtype allows. Raises InvalidInput for bytes that do not fit."""
    if dtype == STRING:
        return _texts(name, count, body).reshape(shape)
    try:
        return decode([Tensor("data", dtype, tuple(shape))], body)["data"]
    except UndecodableEnvelope as error:
        raise InvalidInput(f"{name}: bytes that do not fit ({error}). Expected those of datatype and shape") from None


def _texts(name: str, count: int, body: memoryview) -> Array:
    if count > MAX_STRINGS:
        raise InvalidInput(f"{name}: {count} strings. Expected at most {MAX_STRINGS}")
    values = np.empty(count, object)
    place = 0
    try:
        for index in range(count):
            (length,) = struct.unpack_from("<I", body, place)
            place += 4 + length
            if place > len(body):
                raise ValueError
            values[index] = str(body[place - length : place], "utf-8")
        if place != len(body):
            raise ValueError
    except (ValueError, struct.error):
        raise InvalidInput(
            f"{name}: no {count} strings. Expected the length of each (uint32, little-endian) and its UTF-8"
        ) from None
    return values


def bytes_of(values: Array) -> bytes:
    """The raw bytes of an array, as the protocol has them."""
    if values.dtype != object:
        return values.tobytes()
    texts = [text.encode() for text in values.ravel().tolist()]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)
