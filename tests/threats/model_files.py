"""Model files for tests, honest and hostile, each small; hostile ones are made here, so that none lies about as a file.

write_package_of(format) -> a folder whose manifest() succeeds;  HOSTILE[name](folder) makes it one that must not
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

_PLAIN: Final[dict[str, Any]] = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
}
_FORMATS: Final[dict[str, dict[str, Any]]] = {
    "torchscript": {"weights": "model.pt", **_PLAIN},
    "onnx": {"weights": "model.onnx", **_PLAIN},
    "pytorch": {"weights": "model.safetensors", "entrypoint": "model:build", **_PLAIN},
    "transformers": {
        "source": {"path": "."},
        "inputs": [{"name": "text", "dtype": "string", "shape": ["batch"]}],
        "outputs": [{"name": "embedding", "dtype": "float32", "shape": ["batch", 8]}],
    },
}
CONFIGURATION: Final = {"model_type": "bert", "hidden_size": 8}


class Bomb:
    """Unpickling it writes the file `exploded` into the working directory."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, ("exploded", "w")


def safetensors(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """A file of tensors: name -> (dtype, shape, bytes)."""
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    return headed(json.dumps(header).encode(), body)


def headed(header: bytes, body: bytes = b"") -> bytes:
    """The bytes of a safetensors file with this very header."""
    return struct.pack("<Q", len(header)) + header + body


def script_archive(
    file: Path, code: str = "def forward(self): pass\n", entries: Mapping[str, bytes] | None = None
) -> None:
    """What looks like the archive of torch.jit.save; `entries` are further ones, by name."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(None))
        archive.writestr("model/constants.pkl", pickle.dumps(()))
        archive.writestr("model/code/__torch__.py", code)
        for name, data in (entries or {}).items():
            archive.writestr(name, data)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of Protocol Buffers."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def onnx_model(tensor: bytes = b"", *, inside: Callable[[bytes], bytes] = lambda tensor: field(5, tensor)) -> bytes:
    """A model whose graph holds one tensor: an initializer, or wherever `inside` puts it."""
    return b"\x08\x08" + field(7, inside(tensor))


def external(location: str) -> bytes:
    """A tensor whose data lies in another file."""
    return field(13, field(1, b"location") + field(2, location.encode())) + b"\x70\x01"


def write_encoder_files(folder: Path) -> Path:
    """A folder of weights as transformers reads them; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGURATION))
    (folder / "model.safetensors").write_bytes(safetensors({"w": ("F32", [2], bytes(8))}))
    return folder


def write_encoder(root: Path, source: Mapping[str, str], **fields: object) -> Path:
    """A `transformers` package without weights of its own; returns its folder."""
    folder = root / "encoder" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    named = {"name": "encoder", "version": "1", "format": "transformers"}
    spec = named | _FORMATS["transformers"] | {"source": dict(source), **fields}
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    return folder


def write_honest(root: Path, format: str) -> Path:
    """A package of this format that nothing speaks against; returns its folder."""
    folder = root / format / "1"
    folder.mkdir(parents=True)
    spec = {"name": format, "version": "1", "format": format, **_FORMATS[format]}
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    if format == "torchscript":
        script_archive(folder / "model.pt")
    elif format == "onnx":
        (folder / "model.onnx").write_bytes(onnx_model(external("weights.data")))
        (folder / "weights.data").write_bytes(bytes(16))
    else:
        write_encoder_files(folder)
        (folder / "model.py").write_text("def build(): ...\n")
    return folder


class Hostile(NamedTuple):
    """What is done to an honest package of a format, and what the refusal says."""

    format: str
    act: Callable[[Path], object]
    refusal: str


def _bytes(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _json(name: str, document: object) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(document))


def _spec(**fields: object) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        document = yaml.safe_load((folder / "model.yaml").read_text())
        (folder / "model.yaml").write_text(yaml.safe_dump(document | fields))

    return act


def _archive(code: str = "", entries: Mapping[str, bytes] | None = None) -> Callable[[Path], object]:
    return lambda folder: script_archive(folder / "model.pt", code, entries)


def _checkpoint(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
        archive.writestr("archive/version", "3")


def _unreadable_names(folder: Path) -> None:
    file = folder / "model.pt"
    script_archive(file, entries={"model/extra/ü": b"x"})
    file.write_bytes(file.read_bytes().replace("ü".encode(), b"\xff\xfe"))


def _inflating(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.pt", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/code/__torch__/big.py", bytes(64 << 20))


def _only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def _linked(name: str, target: str) -> Callable[[Path], object]:
    def act(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return act


def _piped(folder: Path) -> None:
    (folder / "model.onnx").unlink()
    os.mkfifo(folder / "model.onnx")


def _bound(folder: Path) -> None:
    (folder / "weights.data").unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(folder / "weights.data"))


def _attribute(tensor: bytes) -> bytes:
    return field(1, field(5, field(5, tensor)))


def _subgraph(tensor: bytes) -> bytes:
    return field(1, field(5, field(6, field(5, tensor))))


def _nested(depth: int) -> bytes:
    graph = b""
    for _ in range(depth):
        graph = _subgraph_of(graph)
    return b"\x08\x08" + field(7, graph)


def _subgraph_of(graph: bytes) -> bytes:
    return field(1, field(5, field(6, graph)))


_SPAN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
_WEIGHTS = "model.safetensors"

HOSTILE: Final[dict[str, Hostile]] = {
    # safetensors
    "a pickle called safetensors": Hostile(
        "pytorch", _bytes(_WEIGHTS, pickle.dumps(Bomb())), "found a header of .* expected safetensors"
    ),
    "a header of 2^63 bytes": Hostile(
        "pytorch", _bytes(_WEIGHTS, struct.pack("<Q", 1 << 63) + b"{}"), "found a header of 9223372036854775808 bytes"
    ),
    "a header without end": Hostile("pytorch", _bytes(_WEIGHTS, headed(b"[" * 200_000)), "found no JSON"),
    "tensors beyond the file": Hostile(
        "pytorch", _bytes(_WEIGHTS, headed(json.dumps({"w": _SPAN}).encode(), bytes(4))), "found 4 bytes of tensors"
    ),
    "tensors over each other": Hostile(
        "pytorch",
        _bytes(_WEIGHTS, headed(json.dumps({"a": _SPAN, "b": _SPAN}).encode(), bytes(8))),
        "tensor b: found bytes from 0, expected from 8",
    ),
    "bytes that no tensor has": Hostile(
        "pytorch",
        _bytes(_WEIGHTS, headed(json.dumps({"w": _SPAN}).encode(), bytes(8) + pickle.dumps(Bomb()))),
        "expected 8 as the header says",
    ),
    "a shape that wraps around": Hostile(
        "pytorch",
        _bytes(_WEIGHTS, headed(json.dumps({"w": _SPAN | {"shape": [1 << 32, 1 << 32]}}).encode(), bytes(8))),
        "tensor w: found a dtype, shape and span that do not fit",
    ),
    "one name, two tensors": Hostile(
        "pytorch",
        _bytes(_WEIGHTS, headed(b'{"w": %s, "w": %s}' % ((json.dumps(_SPAN).encode(),) * 2), bytes(8))),
        "found a name twice",
    ),
    # TorchScript
    "a pickle called TorchScript": Hostile("torchscript", _bytes("model.pt", pickle.dumps(Bomb())), "found no archive"),
    "a checkpoint called TorchScript": Hostile("torchscript", _checkpoint, "found a pickled checkpoint"),
    "TorchScript that reads files": Hostile(
        "torchscript",
        _archive('def forward(self):\n  return torch.from_file("/etc/passwd", False, 99)\n'),
        "found code that calls from_file",
    ),
    "TorchScript that writes files": Hostile(
        "torchscript", _archive('def forward(self, x):\n  ops.aten.save(x, "out")\n'), "found code that calls save"
    ),
    "an archive that climbs": Hostile(
        "torchscript", _archive(entries={"../../outside.py": b"x"}), r"found the entry \.\./\.\./outside\.py"
    ),
    "an archive with names that are no text": Hostile("torchscript", _unreadable_names, "found no archive"),
    "an archive that inflates": Hostile("torchscript", _inflating, "found compressed entries of more than"),
    # ONNX
    "no model at all": Hostile("onnx", _bytes("model.onnx", b"\xff" * 64), "expected an ONNX model"),
    "an empty model": Hostile("onnx", _bytes("model.onnx", b""), "found an empty file"),
    "a model cut short": Hostile("onnx", _bytes("model.onnx", onnx_model(external("weights.data"))[:-4]), "too early"),
    "external data that climbs": Hostile(
        "onnx", _bytes("model.onnx", onnx_model(external("../../../etc/passwd"))), "found external data at"
    ),
    "external data by an absolute path": Hostile(
        "onnx", _bytes("model.onnx", onnx_model(external("/etc/passwd"))), "found external data at /etc/passwd"
    ),
    "external data that climbs, in an attribute": Hostile(
        "onnx", _bytes("model.onnx", onnx_model(external("../x"), inside=_attribute)), r"found external data at \.\./x"
    ),
    "external data that climbs, in a subgraph": Hostile(
        "onnx", _bytes("model.onnx", onnx_model(external("../x"), inside=_subgraph)), r"found external data at \.\./x"
    ),
    "external data that is not there": Hostile(
        "onnx", _bytes("model.onnx", onnx_model(external("data\\..\\..\\x"))), "found no file"
    ),
    "external data behind a link": Hostile("onnx", _linked("weights.data", "/etc/passwd"), "a link leads out"),
    "graphs without end": Hostile("onnx", _bytes("model.onnx", _nested(500)), "found graphs deeper than 32"),
    # transformers
    "configuration with code of its own": Hostile(
        "transformers",
        _json("config.json", CONFIGURATION | {"auto_map": {"AutoModel": "evil.Model"}}),
        "file config.json: found auto_map",
    ),
    "tokenizer with code of its own": Hostile(
        "transformers",
        _json("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}),
        "file tokenizer_config.json: found auto_map",
    ),
    "pipeline with code of its own": Hostile(
        "transformers",
        _json("config.json", CONFIGURATION | {"custom_pipelines": {"x": {"impl": "evil.Pipeline"}}}),
        "found custom_pipelines",
    ),
    "kernels from the hub": Hostile(
        "transformers",
        _json("config.json", CONFIGURATION | {"_attn_implementation": "evil/kernel"}),
        "found _attn_implementation with a repository",
    ),
    "an adapter on another model": Hostile(
        "transformers", _json("adapter_config.json", {"base_model_name_or_path": "/etc"}), "found an adapter"
    ),
    "pickled weights only": Hostile("transformers", _only_pickled, r"found pytorch_model\.bin, a pickle that can run"),
    "shards from elsewhere": Hostile(
        "transformers",
        lambda folder: (
            _bytes("../../secret.safetensors", b"secret")(folder),
            _json("model.safetensors.index.json", {"weight_map": {"w": "../../secret.safetensors"}})(folder),
        ),
        r"found the shard \.\./\.\./secret\.safetensors",
    ),
    "shards that are pickles": Hostile(
        "transformers",
        lambda folder: (
            _bytes("part.bin", pickle.dumps(Bomb()))(folder),
            _json("model.safetensors.index.json", {"weight_map": {"w": "part.bin"}})(folder),
        ),
        r"found the shard part\.bin, expected safetensors",
    ),
    # any format
    "remote code in model.yaml": Hostile("transformers", _spec(trust_remote_code=True), "is never run"),
    "pickled weights in model.yaml": Hostile("pytorch", _spec(weights="model.pkl"), "a pickle can run code"),
    "weights that are a link to elsewhere": Hostile("pytorch", _linked(_WEIGHTS, "/etc/passwd"), "expected a file of"),
    "weights that are a device": Hostile("torchscript", _linked("model.pt", "/dev/zero"), "expected a file of"),
    "weights that are a pipe": Hostile("onnx", _piped, "expected a file of the package"),
    "data that is a socket": Hostile("onnx", _bound, "found no regular file"),
    "a checksum that does not fit": Hostile(
        "onnx", _spec(files={"model.onnx": "0" * 64, "weights.data": "0" * 64}), "found SHA-256"
    ),
    "YAML that builds objects": Hostile(
        "onnx", _bytes("model.yaml", b"name: !!python/object/apply:os.mkdir [exploded]\n"), "not valid YAML"
    ),
    "YAML that inflates": Hostile(
        "onnx",
        _bytes(
            "model.yaml",
            b"\n".join(
                [b"a0: &a0 [x,x,x,x,x,x,x,x,x]"]
                + [b"a%d: &a%d [%s]" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)]
            ),
        ),
        "with aliases",
    ),
}
"""Twenty-five and more: each must be refused before it is loaded."""
