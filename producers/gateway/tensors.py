"""Bodies of our own routes <-> inputs and outputs of a job: JSON, MessagePack, and JSON with bytes behind it.

    application/json           nested lists, or {"dtype", "shape", "data" | "base64"}, for each input
    application/msgpack        the same document; "data" may be bytes
    application/octet-stream   the document is the first `Inference-Header-Content-Length` bytes; an input with
                               {"dtype", "shape", "nbytes"} has its bytes behind the document, in their order

Lists of numbers are decoded as the model declares them, which costs a sixth of a check of each element. What that
refuses goes the way of every other client, whose errors name the input, the kind of value found and the one expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.producers.gateway.exchange import JSON, Exchange, RequestRefused
from penstock.registry import codecs
from penstock.registry.codecs import Codec
from penstock.registry.errors import InvalidInput, UndecodableEnvelope, shown
from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import DTYPES, STRING, Array, Tensor, decode, encode

__all__ = [
    "BINARY",
    "HEAD_LENGTH",
    "MSGPACK",
    "TENSOR_TYPES",
    "Document",
    "decode_json",
    "decoded",
    "dtype_of",
    "fields_of",
    "json_document",
    "msgpack_document",
    "plain_inputs",
    "read_document",
    "read_inputs",
    "split_binary",
    "write_outputs",
]

Fields = TypeVar("Fields")

MSGPACK: Final = b"application/msgpack"
BINARY: Final = b"application/octet-stream"
HEAD_LENGTH: Final = b"inference-header-content-length"
"""The header of the Open Inference Protocol, with the same meaning."""
TENSOR_TYPES: Final = (MSGPACK, BINARY)
"""The content types beside JSON."""
_MOST_DIMS: Final = 8
_NAMES: Final = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_BRACKET: Final = ord("[")
_NUMBERS: Final = {"f": float, "i": int, "u": int, "b": bool}
_decode_any = msgspec.json.Decoder().decode
_decode_outer = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in JSON, with either data or base64."""

    dtype: str
    shape: tuple[int, ...]
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    base64: bytes | msgspec.UnsetType = msgspec.UNSET


class Document(NamedTuple):
    """The head of a body: a mapping of fields, of which `inputs` holds the inputs. tail: the bytes behind it."""

    fields: Mapping[str, Any]
    tail: memoryview
    media_type: bytes


def decode_json(body: bytes | memoryview) -> Any:
    """Any JSON. Raises InvalidInput for anything else, and for one that is nested too deeply."""
    try:
        return _decode_any(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _broken("JSON", error) from None


def read_document(exchange: Exchange, body: bytes) -> Document:
    """The document of a body by its content type. Raises InvalidInput, and RequestRefused for another type."""
    kind = exchange.media_type.encode()
    if kind == JSON or not kind:
        return json_document(body)
    if kind == MSGPACK:
        return msgpack_document(body)
    if kind == BINARY:
        head, tail = split_binary(exchange, body)
        return Document(_fields(decode_json(head)), tail, BINARY)
    raise RequestRefused(
        415, "An unknown content type. Expected application/json, application/msgpack or application/octet-stream"
    )


def json_document(body: bytes) -> Document:
    """A document in JSON. Raises InvalidInput."""
    return Document(_fields(_opened(body)), memoryview(b""), JSON)


def msgpack_document(body: bytes) -> Document:
    """A document in MessagePack. Raises InvalidInput."""
    try:
        return Document(_fields(msgspec.msgpack.decode(body)), memoryview(b""), MSGPACK)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _broken("MessagePack", error) from None


def fields_of(document: Document, kind: type[Fields]) -> Fields:
    """The fields of a document, checked. Raises InvalidInput with the field, and the type that is expected."""
    try:
        return msgspec.convert(document.fields, kind)
    except msgspec.ValidationError as error:
        raise _unfit(kind, error) from None


def decoded(body: bytes | memoryview, kind: type[Fields]) -> Fields:
    """A JSON body with these fields. Raises InvalidInput."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _unfit(kind, error) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _broken("JSON", error) from None


def split_binary(exchange: Exchange, body: bytes) -> tuple[memoryview, memoryview]:
    """(document, bytes behind it). Raises InvalidInput for a length that the body has not."""
    text = exchange.header(HEAD_LENGTH)
    view = memoryview(body)
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > len(view):
        raise InvalidInput(
            "Bad Inference-Header-Content-Length. Expected the bytes of the JSON document at the beginning of the body"
        )
    return view[: int(text)], view[int(text) :]


def read_inputs(spec: ModelSpec, document: Document) -> dict[str, object]:
    """The inputs of a job, for AsyncClient.submit, which checks them. Raises InvalidInput, with the input's name."""
    inputs = document.fields.get("inputs")
    if not isinstance(inputs, Mapping):
        raise InvalidInput(f"Bad inputs. Expected an object with: {', '.join(tensor.name for tensor in spec.inputs)}")
    declared = {tensor.name: tensor for tensor in spec.inputs}
    tail = document.tail
    found: dict[str, object] = {}
    for name, value in inputs.items():
        if isinstance(value, msgspec.Raw):
            found[name] = _from_json(name, value, declared.get(name))
        elif isinstance(value, Mapping) and "nbytes" in value and document.media_type == BINARY:
            found[name], tail = _from_tail(name, value, tail)
        else:
            found[name] = _from_value(name, value)
    if tail:
        raise InvalidInput(f"{len(tail)} bytes follow the last input. Expected the bytes of each input with nbytes")
    return found


def dtype_of(values: Array) -> str:
    """The dtype of an output by its name in specs; that of strings for text."""
    # NumPy makes the name of a dtype anew each time, which takes longer than to write a few numbers.
    return STRING if values.dtype.kind == "O" else _NAMES.get(values.dtype) or values.dtype.name


def plain_inputs(inputs: Mapping[str, Any]) -> dict[str, object]:
    """The inputs of a job from plain data, without the model's spec. Raises InvalidInput, with the input's name."""
    return {name: _from_value(name, value) for name, value in inputs.items()}


def write_outputs(
    outputs: Mapping[str, Array], codec: Codec, facts: Mapping[str, Any], wanted: bytes
) -> tuple[bytes, bytes, list[tuple[bytes, bytes]]]:
    """(body, content type, headers) of outputs, with `facts` beside them.

    codec: for JSON; floats with NaN or infinity, which JSON lacks, are written with base64. wanted: the content type.
    """
    if wanted == MSGPACK:
        tensors: dict[str, Any] = {name: _with_bytes(name, values) for name, values in outputs.items()}
        return msgspec.msgpack.encode({**facts, "outputs": tensors}), MSGPACK, []
    if wanted == BINARY:
        parts = {name: _with_bytes(name, values) for name, values in outputs.items()}
        tensors = {
            name: {"dtype": part["dtype"], "shape": part["shape"], "nbytes": len(part["data"])}
            for name, part in parts.items()
        }
        head = msgspec.json.encode({**facts, "outputs": tensors})
        body = b"".join((head, *(part["data"] for part in parts.values())))
        return body, BINARY, [(HEAD_LENGTH, b"%d" % len(head))]
    tensors = {name: _written(values, codec) for name, values in outputs.items()}
    return msgspec.json.encode({**facts, "outputs": tensors}), JSON, []


def _written(values: Array, codec: Codec) -> dict[str, Any]:
    kind = values.dtype.kind
    # A dot product costs a third of isfinite on a row. If it overflows, the exact check decides.
    is_json = codec == "json" and (
        kind != "f" or math.isfinite(np.vdot(values, values)) or bool(np.isfinite(values).all())
    )
    if is_json and kind != "O":
        # As codecs.written, without the bytes that it makes for both codecs.
        return {"dtype": dtype_of(values), "shape": values.shape, "data": values.tolist()}
    return codecs.written(values, "json" if is_json else "base64")


def _with_bytes(name: str, values: Array) -> dict[str, Any]:
    (tensor,), body = encode({name: values})
    return {"dtype": tensor.dtype, "shape": tensor.shape, "data": body}


def _opened(body: bytes) -> Any:
    """A JSON document; each of its inputs stays JSON text until the model is known."""
    try:
        fields: dict[str, Any] = _decode_outer(body)
        if isinstance(inputs := fields.get("inputs"), msgspec.Raw):
            fields["inputs"] = _decode_outer(inputs)
        return {name: value if name == "inputs" else _decode_any(value) for name, value in fields.items()}
    except msgspec.ValidationError:
        # It is JSON, and no object: `_fields` and `read_inputs` say so.
        return decode_json(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _broken("JSON", error) from None


def _fields(document: Any) -> Mapping[str, Any]:
    if not isinstance(document, Mapping) or not all(isinstance(name, str) for name in document):
        raise InvalidInput("The body is no object. Expected an object with inputs")
    return document


def _from_json(name: str, raw: msgspec.Raw, declared: TensorSpec | None) -> object:
    """One input from its JSON text. Numbers first, as the model declares them."""
    if declared is not None and declared.dtype != STRING and (quick := _numbers(raw, declared)) is not None:
        return quick
    return _from_value(name, decode_json(memoryview(raw)))


def _numbers(raw: msgspec.Raw, declared: TensorSpec) -> Array | None:
    """Numbers as the model declares them; None: they are something else, and the plain way says what."""
    try:
        if memoryview(raw)[0] == _BRACKET:
            return _array(raw, declared.dtype, len(declared.shape))
        tensor = _decode_tensor(raw)
        data, in_base64, shape = tensor.data, tensor.base64, tensor.shape
        if tensor.dtype != declared.dtype or len(shape) > _MOST_DIMS:
            return None
        if data is msgspec.UNSET and in_base64 is not msgspec.UNSET and declared.dtype != "bool":
            # A view. It raises TypeError for too few bytes, and takes no notice of too many.
            values: Array = np.ndarray(shape, DTYPES[tensor.dtype], in_base64)
            return values if values.nbytes == len(in_base64) else None
        if data is msgspec.UNSET or in_base64 is not msgspec.UNSET:
            return None
        values = _array(data, tensor.dtype, len(shape))
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError):
        return None
    return values if values.shape == shape else None


def _array(text: msgspec.Raw, dtype: str, dims: int) -> Array:
    # A ragged list raises ValueError; a whole number too large for the dtype OverflowError.
    with np.errstate(over="ignore"):
        values: Array = np.array(_decoders[dims, DTYPES[dtype].kind].decode(text), DTYPES[dtype])
    if values.ndim != dims or (values.dtype.kind == "f" and not np.isfinite(values).all()):
        raise ValueError
    return values


def _decoder(dims: int, kind: str) -> msgspec.json.Decoder[Any]:
    found: Any = _NUMBERS[kind]
    for _ in range(dims):
        found = list[found]
    return msgspec.json.Decoder(found)


_decoders: Final = {(dims, kind): _decoder(dims, kind) for dims in range(_MOST_DIMS + 1) for kind in _NUMBERS}
_decode_tensor = msgspec.json.Decoder(_Tensor).decode


def _from_value(name: str, value: object) -> object:
    """One input from plain data: an object is a tensor, anything else is nested lists."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(data := value.get("data"), bytes) and value.keys() == {"dtype", "shape", "data"}:
        return _from_bytes(name, value["dtype"], value["shape"], memoryview(data))
    return codecs.read_array(name, value)


def _from_tail(name: str, value: Mapping[str, Any], tail: memoryview) -> tuple[Array, memoryview]:
    nbytes = value["nbytes"]
    if value.keys() != {"dtype", "shape", "nbytes"} or type(nbytes) is not int or not 0 <= nbytes <= len(tail):
        raise InvalidInput(
            f"{shown(name)}: no tensor with bytes. Expected dtype, shape and nbytes, and so many bytes behind the JSON"
        )
    return _from_bytes(name, value["dtype"], value["shape"], tail[:nbytes]), tail[nbytes:]


def _from_bytes(name: str, dtype: object, shape: object, body: memoryview) -> Array:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidInput(f"{shown(name)}: an unknown dtype. Expected one of: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or any(type(dim) is not int or dim < 0 for dim in shape):
        raise InvalidInput(f"{shown(name)}: a shape that is none. Expected a list of extents")
    try:
        return decode([Tensor("data", dtype, tuple(shape))], body)["data"]
    except UndecodableEnvelope as error:
        raise InvalidInput(f"{shown(name)}: bytes that do not fit dtype and shape ({error})") from None


def _unfit(kind: type[Any], error: msgspec.ValidationError) -> InvalidInput:
    text = f"{error!s:.300}"
    if "Expected" not in text:
        text += f". Expected these fields, as /docs describes them: {', '.join(kind.__struct_fields__)}"
    return InvalidInput(text)


def _broken(what: str, error: Exception) -> InvalidInput:
    detail = "nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.120}"
    return InvalidInput(f"The body is no {what} ({detail}). Expected one {what} document")
