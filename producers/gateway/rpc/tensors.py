"""Messages of the Open Inference Protocol <-> arrays: raw bytes for all tensors of a message, or lists of values.

ModelInferRequest -> inputs of a job;  outputs -> ModelInferResponse, in the form of its request
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.producers.gateway.oip_tensors import (
    DATATYPES,
    DTYPES_OF,
    bytes_of,
    check_parameters,
    count_of,
    from_bytes,
)
from penstock.producers.gateway.rpc.messages import message
from penstock.producers.gateway.tensors import dtype_of
from penstock.registry.errors import InvalidInput, shown
from penstock.registry.tensors import DTYPES, MAX_STRINGS, STRING, Array

__all__ = ["parameters_of", "read_infer", "write_infer"]

_Response: Final = message("ModelInferResponse")
_FIELDS: Final = {
    "bool": "bool_contents",
    **dict.fromkeys(("int8", "int16", "int32"), "int_contents"),
    "int64": "int64_contents",
    **dict.fromkeys(("uint8", "uint16", "uint32"), "uint_contents"),
    "uint64": "uint64_contents",
    "float32": "fp32_contents",
    "float64": "fp64_contents",
    STRING: "bytes_contents",
}
"""Where InferTensorContents has the values of a dtype."""
_WIDE: Final = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}
"""The dtypes of those lists."""
_PARAMETERS: Final = frozenset({"priority", "timeout", "triton_enable_empty_final_response"})
"""The last one asks for what a stream here always has: the last answer says that it is the last."""


def read_infer(request: Any) -> dict[str, Array]:
    """The inputs of a ModelInferRequest; raw ones are views. Raises InvalidInput with the name of the tensor."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidInput(
            f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs. Expected one for each input, or none"
        )
    tensors: dict[str, Array] = {}
    for place, each in enumerate(request.inputs):
        if each.name in tensors:
            raise InvalidInput(f"{shown(each.name)} is there twice. Expected each input once")
        name, dtype, shape = shown(each.name), DTYPES_OF.get(each.datatype), tuple(each.shape)
        if dtype is None:
            raise InvalidInput(f"{name}: an unknown datatype. Expected one of: {', '.join(DTYPES_OF)}")
        count = count_of(name, shape)
        if not raw:
            tensors[each.name] = _from_contents(name, dtype, count, each.contents).reshape(shape)
        elif each.HasField("contents"):
            raise InvalidInput(f"{name}: found contents beside raw_input_contents. Expected one of them")
        else:
            tensors[each.name] = from_bytes(name, dtype, shape, count, memoryview(raw[place]))
    return tensors


def write_infer(request: Any, version: str, outputs: Mapping[str, Array]) -> Any:
    """The ModelInferResponse to a request."""
    response = _Response(model_name=request.model_name, model_version=version, id=request.id)
    dtypes = {name: dtype_of(values) for name, values in outputs.items()}
    is_raw = bool(request.raw_input_contents) or any(dtype not in _FIELDS for dtype in dtypes.values())
    for name, values in outputs.items():
        tensor = response.outputs.add(name=name, datatype=DATATYPES[dtypes[name]], shape=values.shape)
        if is_raw:
            response.raw_output_contents.append(bytes_of(values))
        else:
            flat = values.ravel().tolist()
            listed = [text.encode() for text in flat] if dtypes[name] == STRING else flat
            getattr(tensor.contents, _FIELDS[dtypes[name]]).extend(listed)
    return response


def parameters_of(request: Any) -> dict[str, Any]:
    """The parameters of a request as plain values; None: one without a value. Raises InvalidInput for unknown ones."""
    for where, tensors in (("input", request.inputs), ("output", request.outputs)):
        for each in tensors:
            if each.parameters:
                check_parameters(where, dict.fromkeys(each.parameters), frozenset())
    if not request.parameters:
        return {}
    found = {name: _value(parameter) for name, parameter in request.parameters.items()}
    check_parameters("request", found, _PARAMETERS)
    return found


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _from_contents(name: str, dtype: str, count: int, contents: Any) -> Array:
    field = _FIELDS.get(dtype)
    if field is None:
        raise InvalidInput(f"{name}: contents have no {DATATYPES[dtype]}. Expected raw_input_contents")
    values = getattr(contents, field)
    if len(values) != count or any(other.name != field for other, _ in contents.ListFields()):
        raise InvalidInput(f"{name}: other contents than its datatype and shape. Expected {count} in {field}")
    if dtype == STRING:
        return _texts(name, values)
    wide: Array = np.array(values, _WIDE[field])
    narrow: Array = wide.astype(DTYPES[dtype], copy=False)
    if narrow.dtype.kind in "iu" and not np.array_equal(narrow, wide):
        raise InvalidInput(f"{name}: a value does not fit. Expected values of {DATATYPES[dtype]}")
    return narrow


def _texts(name: str, values: Any) -> Array:
    if len(values) > MAX_STRINGS:
        raise InvalidInput(f"{name}: {len(values)} strings. Expected at most {MAX_STRINGS}")
    texts = np.empty(len(values), object)
    try:
        texts[:] = [str(value, "utf-8") for value in values]
    except UnicodeDecodeError:
        raise InvalidInput(f"{name}: bytes that are no text. Expected UTF-8") from None
    return texts
