"""Arrays <-> values of a JSON document, with the two codecs of `codecs.default` in model.yaml.

    json      {"dtype": "float32", "shape": [1, 2], "data": [[0.5, 1.0]]}      readable; without NaN, which JSON lacks
    base64    {"dtype": "float32", "shape": [1, 2], "base64": "AAAAPwAAgD8="}  little-endian bytes, exact

Both have dtype and shape, and reading checks them against the data. A string tensor's bytes are those of
registry/tensors.py. Jobs and results in the broker do not use these codecs: they are plain bytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

from penstock.registry.errors import InvalidInput, UndecodableEnvelope, described, shown
from penstock.registry.package.signature import Signature, TensorSpec
from penstock.registry.tensors import DTYPES, MAX_BYTES, MAX_DIMS, Array, Tensor, decode, encode

__all__ = ["Codec", "read_array", "written"]

Codec = Literal["json", "base64"]
_JSON_KEYS: Final = {"dtype", "shape", "data"}
_BASE64_KEYS: Final = {"dtype", "shape", "base64"}
_LONGEST_TEXT: Final = 4 * math.ceil(MAX_BYTES / 3)


def written(values: Array, codec: Codec) -> dict[str, Any]:
    """The array as plain data. Raises InvalidInput for an unsupported dtype, and for NaN with `json`."""
    if values.dtype.kind in "biuf":
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    (tensor,), body = encode({"values": values})
    head: dict[str, Any] = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if codec == "base64":
        return head | {"base64": base64.b64encode(body).decode("ascii")}
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise InvalidInput("NaN and infinity are no JSON. Expected finite numbers, or base64")
    return head | {"data": values.tolist()}


def read_array(name: str, document: object) -> Array:
    """The array of a document of `written`. `name` names it in messages. Raises InvalidInput."""
    try:
        return _read(document)
    except InvalidInput as error:
        raise InvalidInput(f"{shown(name)}: {error}") from None


def _read(document: object) -> Array:
    if not isinstance(document, Mapping) or document.keys() not in (_JSON_KEYS, _BASE64_KEYS):
        raise InvalidInput("found no tensor. Expected dtype, shape, and either data or base64")
    dtype, shape = document["dtype"], document["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidInput(f"dtype {described(dtype)}. Expected one of: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or any(type(dim) is not int or dim < 0 for dim in shape):
        raise InvalidInput(f"a shape that is none. Expected at most {MAX_DIMS} extents")
    if "base64" in document:
        return _from_base64(Tensor("data", dtype, tuple(shape)), document["base64"])
    return _from_lists(dtype, tuple(shape), document["data"])


def _from_base64(tensor: Tensor, text: object) -> Array:
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise InvalidInput(f"no base64, or too long. Expected at most {MAX_BYTES} bytes in base64")
    try:
        # Without validation, letters that are not base64 would be skipped.
        body = base64.b64decode(text, validate=True)
        return decode([tensor], body)[tensor.name]
    except ValueError:
        raise InvalidInput("not base64. Expected its alphabet, padded") from None
    except UndecodableEnvelope as error:
        raise InvalidInput(f"bytes that do not fit dtype and shape ({error})") from None


def _from_lists(dtype: str, shape: tuple[int, ...], data: object) -> Array:
    if 0 not in shape:
        spec = TensorSpec(name="data", dtype=dtype, shape=shape)
        return Signature([spec], []).check({"data": data})["data"]
    # Nested lists end at the first extent of 0. A signature has no such extent, and there are no values to check.
    if np.shape(np.array(data, object)) != shape[: shape.index(0) + 1]:
        raise InvalidInput(f"data of another shape. Expected {shape}")
    return np.empty(shape, DTYPES[dtype])
