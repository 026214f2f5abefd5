"""Inspects model files without loading them: refuses code, links out of the package, and wrong sizes.

    Package.manifest -> the inspection of its format -> None, or a ConfigurationError of one line

    safetensors    the header describes exactly the bytes that follow it
    torchscript    an archive of torch.jit.save, not a pickled checkpoint; its code reads and writes no files
    onnx           external data of tensors is inside the package
    transformers   safetensors only, shards inside the folder, no configuration that fetches code

Only headers, indexes and code are read, up to a limit; weights are not.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple

from penstock.registry.errors import ConfigurationError, shown

__all__ = [
    "PICKLES",
    "declared_positions",
    "inspect_onnx",
    "inspect_safetensors",
    "inspect_torchscript",
    "inspect_transformers",
]

PICKLES: Final = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")
"""The endings of files that can run code when they are unpickled."""
_MAX_JSON_BYTES: Final = 32 << 20
_MAX_CODE_BYTES: Final = 32 << 20
_MAX_ENTRIES: Final = 100_000
_MAX_DEPTH: Final = 32
_BITS: Final = (
    {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
    | {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
    | {"I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
)
"""The dtypes of safetensors."""
_CONFIGURATIONS: Final = frozenset(
    {"config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"}
    | {"adapter_config.json", "image_processor_config.json", "tokenizer_config.json", "video_preprocessor_config.json"}
)
"""The configurations that transformers reads."""
_CODE_KEYS: Final = ("auto_map", "custom_pipelines", "trust_remote_code")
_KERNEL_KEYS: Final = ("attn_implementation", "_attn_implementation", "experts_implementation")
_FILE_OPERATORS: Final = re.compile(rb"\b(from_file|save)[\s\\]*\(")
"""torch.from_file and torch.save are operators of TorchScript and accept any path."""


class _Unfit(Exception):
    """The file is refused. The message is "found ..., expected ..."."""


def inspect_safetensors(file: Path, label: str) -> None:
    """Raises ConfigurationError unless the header describes exactly the bytes of the file."""
    try:
        with file.open("rb") as opened:
            _check_safetensors(opened, file.stat().st_size)
    except (_Unfit, OSError) as error:
        raise _refusal(label, file.name, error) from None


def inspect_torchscript(file: Path, label: str) -> None:
    """Raises ConfigurationError unless the file is an archive of TorchScript whose code uses no files."""
    try:
        with zipfile.ZipFile(file) as archive:
            _check_torchscript(archive)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError):
        # ValueError: names of entries that are not text.
        refused = _Unfit("found no archive, expected TorchScript as torch.jit.save writes it; a pickle can run code")
        raise _refusal(label, file.name, refused) from None
    except (_Unfit, OSError) as error:
        raise _refusal(label, file.name, error) from None


def inspect_onnx(file: Path, label: str) -> None:
    """Raises ConfigurationError unless the file is a model whose external data is in its folder."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for location in _external_locations(data):
                _check_location(file.parent, location)
    except (_Unfit, OSError, ValueError) as error:
        refused = error if isinstance(error, _Unfit | OSError) else _Unfit("found an empty file, expected a model")
        raise _refusal(label, file.name, refused) from None


def inspect_transformers(folder: Path, label: str) -> None:
    """Raises ConfigurationError unless the folder has safetensors and no configuration needs code."""
    if not (folder / "config.json").is_file():
        raise _refusal(label, "config.json", _Unfit("missing, expected the model's configuration"))
    for file in sorted(folder.glob("*.json")):
        try:
            if file.name in _CONFIGURATIONS:
                _check_configuration(file)
            elif file.name.endswith(".index.json"):
                _check_index(file)
        except (_Unfit, OSError) as error:
            raise _refusal(label, file.name, error) from None
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        found = f"found {pickles[0]}, a pickle that can run code" if pickles else "missing"
        raise _refusal(label, "model.safetensors", _Unfit(f"{found}, expected safetensors"))
    for file in weights:
        inspect_safetensors(file, label)


def declared_positions(folder: Path, label: str) -> int | None:
    """The most tokens that the weights in a folder read, from config.json. Raises ConfigurationError."""
    try:
        positions = _json_object(_read_bounded(folder / "config.json")).get("max_position_embeddings")
    except (_Unfit, OSError) as error:
        raise _refusal(label, "config.json", error) from None
    return positions if type(positions) is int and positions > 0 else None


def _refusal(label: str, name: str, error: _Unfit | OSError) -> ConfigurationError:
    reason = str(error) if isinstance(error, _Unfit) else f"cannot be read ({error.strerror})"
    return ConfigurationError(f"{label}: file {shown(name)}: {reason}")


def _check_safetensors(opened: BinaryIO, size: int) -> None:
    length = int.from_bytes(opened.read(8), "little")
    if not 0 < length <= min(size - 8, _MAX_JSON_BYTES):
        raise _Unfit(f"found a header of {length} bytes in a file of {size}, expected safetensors")
    header = _json_object(opened.read(length))
    header.pop("__metadata__", None)
    end = 0
    for name, (begin, stop) in sorted(_spans(header), key=lambda span: span[1]):
        if begin != end:
            raise _Unfit(f"tensor {shown(name)}: found bytes from {begin}, expected from {end}")
        end = stop
    if end != size - 8 - length:
        raise _Unfit(f"found {size - 8 - length} bytes of tensors, expected {end} as the header says")


def _spans(header: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (first byte, byte after the last)) of each tensor. Refuses a span that does not fit dtype and shape."""
    for name, tensor in header.items():
        match tensor:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(stop)]}:
                extents = [extent for extent in shape if type(extent) is int and extent >= 0]
                is_sized = dtype in _BITS and len(extents) == len(shape) <= 64
                if is_sized and 0 <= begin <= stop and (stop - begin) * 8 == math.prod(extents) * _BITS[dtype]:
                    yield name, (begin, stop)
                    continue
        raise _Unfit(f"tensor {shown(name)}: found a dtype, shape and span that do not fit, expected those of a tensor")


def _check_torchscript(archive: zipfile.ZipFile) -> None:
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(names) > _MAX_ENTRIES or len(set(names)) < len(names):
        raise _Unfit(f"found {len(names)} entries, expected distinct ones, at most {_MAX_ENTRIES}")
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise _Unfit(f"found the entry {shown(name)}, expected names inside the archive")
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" not in inner or not any(name.startswith("code/") for name in inner):
        raise _Unfit("found a pickled checkpoint, expected TorchScript as torch.jit.save writes it")
    # Weights are stored without compression. A compressed entry could be far larger than the file.
    if sum(entry.file_size for entry in entries if entry.compress_type != zipfile.ZIP_STORED) > _MAX_CODE_BYTES:
        raise _Unfit(f"found compressed entries of more than {_MAX_CODE_BYTES} bytes, expected less code")
    code = [entry for entry in entries if entry.filename.partition("/")[2].startswith("code/")]
    if sum(entry.file_size for entry in code) > _MAX_CODE_BYTES:
        raise _Unfit(f"found more than {_MAX_CODE_BYTES} bytes of code, expected less")
    for entry in code:
        if entry.filename.endswith(".py") and (found := _FILE_OPERATORS.search(archive.read(entry))):
            raise _Unfit(f"found code that calls {found[1].decode()}, expected none that reads or writes files")


def _check_configuration(file: Path) -> None:
    if file.name == "adapter_config.json":
        raise _Unfit("found an adapter, which names its base model, expected whole weights")
    configuration = _json_object(_read_bounded(file))
    for key in _CODE_KEYS:
        if configuration.get(key):
            raise _Unfit(f"found {key}, expected none: code that comes with weights is never run")
    for key in _KERNEL_KEYS:
        if "/" in str(configuration.get(key)):
            raise _Unfit(f"found {key} with a repository, expected none: kernels are never fetched")


def _check_index(file: Path) -> None:
    shards = _json_object(_read_bounded(file)).get("weight_map")
    for shard in set(shards.values()) if isinstance(shards, dict) else {None}:
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or not (file.parent / shard).is_file():
            raise _Unfit(f"found the shard {shown(shard)}, expected a file of the same folder")
        if file.name.endswith(".safetensors.index.json") and not shard.endswith(".safetensors"):
            raise _Unfit(f"found the shard {shown(shard)}, expected safetensors")


def _read_bounded(file: Path) -> bytes:
    with file.open("rb") as opened:
        data = opened.read(_MAX_JSON_BYTES + 1)
    if len(data) > _MAX_JSON_BYTES:
        raise _Unfit(f"found more than {_MAX_JSON_BYTES} bytes, expected less")
    return data


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        raise _Unfit("found no JSON, expected an object of it") from None
    if not isinstance(document, dict):
        raise _Unfit(f"found {type(document).__name__}, expected a JSON object")
    return document


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of two values for one name, another reader may take the other one.
    if len(document := dict(pairs)) < len(pairs):
        raise _Unfit("found a name twice in one object, expected distinct ones")
    return document


def _check_location(folder: Path, location: str) -> None:
    file = (folder / location).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise _Unfit(f"found external data at {shown(location)}, expected it inside the package")
    if not file.is_file():
        raise _Unfit(f"found no file {shown(location)}, expected the external data that the model names")


# The messages of ONNX that contain tensors: field number -> message. Source: onnx.proto3, IR version 13.

_LENGTH_DELIMITED: Final = 2
_PAYLOAD_BYTES: Final = {1: 8, 5: 4}
"""Bytes of a field by its wire type, for the types of fixed size."""
_CONTAINS: Final = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "Sparse"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "Sparse", 23: "Sparse"},
    "Sparse": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
    "Entry": {},
}


class _Field(NamedTuple):
    number: int
    begin: int
    end: int


def _external_locations(data: mmap.mmap) -> Iterator[str]:
    """The locations of external data that the model's tensors name. Raises _Unfit when the bytes are no model."""
    if all(field.number != 7 for field in _fields(data, 0, len(data))):
        raise _Unfit("found no graph, expected an ONNX model")
    for entry in _entries(data, "Model", _Field(0, 0, len(data)), 0):
        texts = {field.number: data[field.begin : field.end] for field in _fields(data, entry.begin, entry.end)}
        if texts.get(1) == b"location":
            yield texts.get(2, b"").decode("utf-8", "backslashreplace")


def _entries(data: mmap.mmap, message: str, at: _Field, depth: int) -> Iterator[_Field]:
    if message == "Entry":
        yield at
        return
    if depth > _MAX_DEPTH:
        raise _Unfit(f"found graphs deeper than {_MAX_DEPTH} levels, expected fewer")
    for field in _fields(data, at.begin, at.end):
        if (inner := _CONTAINS[message].get(field.number)) is not None:
            yield from _entries(data, inner, field, depth + 1)


def _fields(data: mmap.mmap, begin: int, end: int) -> Iterator[_Field]:
    """The fields of one message of Protocol Buffers."""
    while begin < end:
        tag, begin = _varint(data, begin, end)
        kind = tag & 7
        size = _PAYLOAD_BYTES.get(kind, 0)
        if kind == _LENGTH_DELIMITED:
            size, begin = _varint(data, begin, end)
        elif kind == 0:
            _, stop = _varint(data, begin, end)
            size = stop - begin
        elif not size:
            raise _Unfit("found bytes that are no message, expected an ONNX model")
        if begin + size > end:
            raise _Unfit("found a message that ends too early, expected an ONNX model")
        yield _Field(tag >> 3, begin, begin + size)
        begin += size


def _varint(data: mmap.mmap, begin: int, end: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = 0
    for shift, position in zip(range(0, 70, 7), range(begin, end), strict=False):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
    raise _Unfit("found bytes that are no message, expected an ONNX model")
