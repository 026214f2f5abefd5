"""Named arrays <-> (description, bytes). Numbers travel as raw little-endian bytes, strings as UTF-8.

A string tensor's bytes are its elements' lengths (uint32) followed by their UTF-8. In memory it is an object
array of `str`, so that shapes mean the same for every dtype. Sizes come from `math.prod`, never from
`np.prod`, which wraps around.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, overload

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.registry.errors import InvalidInput, UndecodableEnvelope, shown

__all__ = [
    "DTYPES",
    "MAX_BYTES",
    "MAX_DIMS",
    "MAX_RESULT_BYTES",
    "MAX_STRINGS",
    "MAX_TENSORS",
    "STRING",
    "Array",
    "Tensor",
    "check_decodable",
    "decode",
    "dtype_name",
    "encode",
    "encoded_size",
    "lists",
]

Array: TypeAlias = npt.NDArray[Any]

MAX_BYTES: Final = 10 * 1024 * 1024
"""The largest body of a job, in bytes."""
MAX_RESULT_BYTES: Final = 64 * 1024 * 1024
"""The largest body of a result, in bytes: outputs may be larger than inputs."""
MAX_TENSORS: Final = 64
MAX_DIMS: Final = 8
MAX_STRINGS: Final = 32_768
"""The most strings in one body. Each is an object: a small body could need much memory."""
STRING: Final = "string"
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
} | {STRING: np.dtype(object)}
"""The dtypes of messages, by name."""
_VIEWED_BYTES: Final = 64 * 1024
"""A copy of fewer bytes costs less than it saves."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH: Final = np.dtype("<u4")


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype in messages; None: arrays of it cannot travel."""
    return _NAMES.get(dtype)


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One array of a body, in order: `name`, `dtype` (a key of DTYPES), `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def _strings(name: str, values: Array) -> bytes:
    try:
        parts = [value.encode() for value in values.ravel().tolist()]
    except AttributeError:
        raise InvalidInput(f"{name}: contains other elements than str. Expected str") from None
    except UnicodeEncodeError:
        raise InvalidInput(f"{name}: contains a lone surrogate. Expected text that UTF-8 can encode") from None
    return np.fromiter(map(len, parts), _LENGTH, len(parts)).tobytes() + b"".join(parts)


@overload
def encode(tensors: Mapping[str, Array]) -> tuple[tuple[Tensor, ...], bytes]: ...
@overload
def encode(tensors: Mapping[str, Array], *, may_view: bool) -> tuple[tuple[Tensor, ...], bytes | memoryview]: ...
def encode(tensors: Mapping[str, Array], *, may_view: bool = False) -> tuple[tuple[Tensor, ...], bytes | memoryview]:
    """(descriptions, body) of arrays whose dtypes are among DTYPES (object arrays hold str).

    may_view: the body of one large array may be a view of that array, without a copy.
    Raises InvalidInput for another dtype, and for more than MAX_STRINGS strings.
    """
    described = []
    parts: list[bytes | memoryview] = []
    strings = 0
    for name, values in tensors.items():
        dtype = _NAMES.get(values.dtype)
        if dtype is None:
            raise InvalidInput(f"{name}: dtype {values.dtype} cannot travel. Expected one of: {', '.join(DTYPES)}")
        described.append(Tensor(name, dtype, values.shape))
        if dtype != STRING:
            is_viewed = may_view and values.nbytes >= _VIEWED_BYTES and values.flags.c_contiguous
            parts.append(values.reshape(-1).view(np.uint8).data if is_viewed else values.tobytes())
            continue
        strings += values.size
        if strings > MAX_STRINGS:
            raise InvalidInput(
                f"{name}: {strings} strings, with those before. Expected at most {MAX_STRINGS} in one body"
            )
        parts.append(_strings(name, values))
    return tuple(described), parts[0] if len(parts) == 1 else b"".join(parts)


def encoded_size(tensors: Mapping[str, Array]) -> int:
    """The bytes that `encode` would make; exact for numbers, a lower bound for text."""
    size = 0
    for values in tensors.values():
        if values.dtype == object:
            size += sum(4 + len(value) for value in values.ravel().tolist() if isinstance(value, str))
        else:
            size += values.nbytes
    return size


def check_decodable(described: Sequence[Tensor]) -> None:
    """Raises InvalidInput for descriptions that `decode` refuses: of too many tensors, or of an impossible shape."""
    if len(described) > MAX_TENSORS:
        raise InvalidInput(f"It has {len(described)} tensors. Expected at most {MAX_TENSORS}")
    for tensor in described:
        try:
            _count(tensor)
        except UndecodableEnvelope:
            raise InvalidInput(
                f"{shown(tensor.name)}: shape {tensor.shape!s:.80}. Expected at most {MAX_DIMS} dimensions, and "
                f"{MAX_RESULT_BYTES} elements"
            ) from None


def decode(described: Sequence[Tensor], body: memoryview | bytes) -> dict[str, Array]:
    """The arrays of a body, read-only views where the dtype allows.

    Raises UndecodableEnvelope when descriptions and bytes do not fit each other exactly.
    """
    if len(described) == 1:
        only = described[0]
        if (dtype := DTYPES.get(only.dtype)) is not None and only.dtype != STRING:
            return {only.name: _numbers(only, dtype, body)}
    if len(described) > MAX_TENSORS:
        raise UndecodableEnvelope(f"{len(described)} tensors; at most {MAX_TENSORS} may travel together")
    view = memoryview(body)
    if sum(_count(tensor) for tensor in described if tensor.dtype == STRING) > MAX_STRINGS:
        raise UndecodableEnvelope(f"more than {MAX_STRINGS} strings in one body")
    arrays: dict[str, Array] = {}
    for tensor in described:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise UndecodableEnvelope(f"{tensor.name!r:.80} has an unknown dtype")
        if tensor.dtype == STRING:
            arrays[tensor.name], view = _take_strings(tensor, view)
        else:
            size = _count(tensor) * dtype.itemsize
            arrays[tensor.name], view = _numbers(tensor, dtype, view[:size]), view[size:]
    if len(view):
        raise UndecodableEnvelope(f"{len(view)} bytes follow the last tensor")
    if len(arrays) != len(described):
        raise UndecodableEnvelope("two tensors share a name")
    return arrays


def _count(tensor: Tensor) -> int:
    shape = tensor.shape
    # Checked first: the product of thousands of large extents takes longer than everything else.
    if len(shape) <= MAX_DIMS and min(shape, default=0) >= 0:
        count = math.prod(shape)
        # A zero extent hides the other ones from the product, but NumPy still checks them.
        claimed = count or math.prod(extent or 1 for extent in shape)
        if claimed <= MAX_RESULT_BYTES:
            return count
    raise UndecodableEnvelope(f"{tensor.name!r:.80} has an impossible shape")


def _numbers(tensor: Tensor, dtype: np.dtype[Any], body: memoryview | bytes) -> Array:
    if _count(tensor) * dtype.itemsize != len(body):
        raise UndecodableEnvelope(f"{tensor.name!r:.80}: shape and dtype do not fit its {len(body)} bytes")
    return np.frombuffer(body, dtype).reshape(tensor.shape)


def _take_strings(tensor: Tensor, view: memoryview) -> tuple[Array, memoryview]:
    count = _count(tensor)
    if count * 4 > len(view):
        raise UndecodableEnvelope(f"{tensor.name!r:.80}: fewer bytes than its {count} lengths need")
    # Not np.cumsum, which takes half of the time of a short text.
    ends = [*itertools.accumulate(np.frombuffer(view[: count * 4], _LENGTH).tolist())]
    text = view[count * 4 :]
    total = ends[-1] if ends else 0
    if total > len(text):
        raise UndecodableEnvelope(f"{tensor.name!r:.80}: its lengths exceed its bytes")
    values = np.empty(count, object)
    try:
        start = 0
        for index, end in enumerate(ends):
            values[index] = str(text[start:end], "utf-8")
            start = end
    except UnicodeDecodeError:
        raise UndecodableEnvelope(f"{tensor.name!r:.80} is not UTF-8") from None
    return values.reshape(tensor.shape), text[total:]


def lists(tensors: Mapping[str, Array]) -> dict[str, Any]:
    """Nested plain lists, for JSON."""
    return {name: values.tolist() for name, values in tensors.items()}
