"""`models/<name>/<version>/model.yaml` -> ModelSpec: what a model accepts, answers and costs.

    folder -> load_package -> Package (spec + folder) -> Package.manifest -> a worker's runtime, the catalogue
                              ModelSpec.to_json -> `{model}:spec` in the broker -> ModelSpec.from_json -> a client

Nothing of a model is loaded or executed here. A package that cannot work is a ConfigurationError of one line: the
file relative to the models root, the field, what was found and what was expected.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from penstock.registry.errors import ConfigurationError, InvalidInput, UnknownModel, shown
from penstock.registry.package.bounded_yaml import BadDocument, read_document, read_yaml
from penstock.registry.package.hub_cache import HubSnapshot, find_snapshot
from penstock.registry.package.inspection import (
    PICKLES,
    declared_positions,
    inspect_onnx,
    inspect_safetensors,
    inspect_torchscript,
    inspect_transformers,
)
from penstock.registry.package.manifest import FileTree, Manifest, hash_files
from penstock.registry.package.signature import BATCH, Signature, TensorSpec, shape_text
from penstock.registry.package.spec_sections import (
    MAX_CONCURRENCY,
    Batching,
    Codecs,
    Device,
    EndpointPolicy,
    InsidePath,
    Policy,
    Precision,
    Section,
    Source,
)
from penstock.registry.queues import parse_name
from penstock.registry.tensors import DTYPES, MAX_BYTES, MAX_RESULT_BYTES, MAX_TENSORS, STRING

__all__ = [
    "FORMATS",
    "SPEC_FILE",
    "ModelSpec",
    "Package",
    "PackageRef",
    "discover",
    "find",
    "load_package",
    "read_spec",
]

SPEC_FILE: Final = "model.yaml"
_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")
_TASK: Final = re.compile(r"[a-z][a-z0-9-]{0,63}\Z")
_MAX_MEMORY_MB: Final = 1 << 24
_MAX_TIMEOUT_S: Final = 86_400
_STRING_BYTES: Final = 4
"""Of an empty one in a body."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")

Format = Literal["torchscript", "python", "pytorch", "transformers", "onnx"]
FORMATS: Final[tuple[str, ...]] = get_args(Format)
"""What a package may be; each has its runtime."""
_TENSORFLOW: Final = frozenset({"tensorflow", "savedmodel", "saved_model", "keras", "tflite", "tfjs"})
_WEIGHTS: Final = {"torchscript": (".pt", ".ts"), "pytorch": (".safetensors",), "onnx": (".onnx",)}
"""The formats with a `weights` file, and how its name may end."""


def _version_text(value: object) -> object:
    # YAML reads an unquoted 1 as a number; 1.10 has already become 1.1 there, so floats are refused.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _served_format(value: object) -> object:
    if isinstance(value, str) and value.lower() in _TENSORFLOW:
        raise ValueError(
            f"found {value!r}, expected one of: {', '.join(FORMATS)}; TensorFlow is not served, export to onnx"
        )
    return value


def _checksum(digest: str) -> str:
    if not _SHA256.match(digest):
        raise ValueError(f"found {digest!r:.80}, expected a SHA-256 of 64 lower-case hex digits")
    return digest


class ModelSpec(Section):
    """One version of one model, as clients and workers know it."""

    name: str
    """The name of the folder above the version's."""
    version: Annotated[str, BeforeValidator(_version_text, json_schema_input_type=str | int)]
    """The name of the package's folder."""
    format: Annotated[Format, BeforeValidator(_served_format, json_schema_input_type=Format)]
    """Which runtime loads it."""
    entrypoint: str | None = None
    """`module:build` for `pytorch` and `python`; the module is a file of the package."""
    weights: InsidePath | None = None
    """The file of a `torchscript` or `onnx` model, or the safetensors of what a `pytorch` entry point builds."""
    source: Source | None = None
    """Where the weights of `transformers` lie."""
    task: str | None = None
    """The pipeline of `transformers`, such as text-classification; null: sentence embeddings."""
    files: dict[InsidePath, Annotated[str, AfterValidator(_checksum)]] | None = None
    """SHA-256 of every file of the package but model.yaml; null: any files."""
    inputs: Annotated[tuple[TensorSpec, ...], Field(strict=False, min_length=1, max_length=MAX_TENSORS)]
    """What a job must and may bring."""
    outputs: Annotated[tuple[TensorSpec, ...], Field(strict=False, max_length=MAX_TENSORS)]
    """What the model answers."""
    batching: Batching = Batching()
    """How jobs share a forward."""
    codecs: Codecs = Codecs()
    """How answers are written."""
    policy: Policy = Policy()
    """What differs by endpoint."""
    precision: Precision = "auto"
    """The number format of a forward; auto: the setting's."""
    device: Device = "auto"
    """auto: the worker's."""
    max_level: Annotated[int | None, Field(ge=0, le=4)] = None
    """Enhancement level that the model may rise to; null: the setting's."""
    memory_mb: Annotated[int | None, Field(ge=1, le=_MAX_MEMORY_MB)] = None
    """Memory that the loaded model takes, where the runtime cannot count it."""
    concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] = 1
    """Forwards of this model that may run at the same time in one worker."""
    streams: bool = False
    """Whether the entry point yields chunks; such jobs run one by one."""
    deterministic: bool = True
    """Whether equal jobs may have one forward, those that come later, too: its answer is kept for `cache_ttl_s`."""
    timeout_s: Annotated[float | None, Field(gt=0, le=_MAX_TIMEOUT_S)] = None
    """The limit of one forward; None: the worker's setting."""

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelSpec:
        for check in (
            _check_names,
            _check_format,
            _check_weights,
            _check_outputs,
            _check_batch_dimension,
            _check_sizes,
            _check_length,
        ):
            check(self)
        return self

    @cached_property
    def signature(self) -> Signature:
        """The check for this model's inputs."""
        # Only the worker can count tokens.
        limit = None if self.format == "transformers" else self.batching.max_length
        return Signature(self.inputs, self.outputs, self.batching.length_input, limit)

    @property
    def reference(self) -> str:
        """`name/version`."""
        return f"{self.name}/{self.version}"

    def policy_for(self, endpoint: str) -> EndpointPolicy:
        """The knobs of an endpoint: its own, else the policy's default, else the model's; None: the setting's."""
        own = EndpointPolicy(
            window_ms=self.batching.max_wait_ms,
            precision=None if self.precision == "auto" else self.precision,
            concurrency=self.concurrency,
        )
        return self.policy.of(endpoint).over(own)

    def limited_to(self, max_length: int) -> ModelSpec:
        """The spec with no longer `length_input` than `max_length`, in the model's own measure."""
        batching = self.batching
        measured = batching.length_input or (self.inputs[0].name if self.format == "transformers" else None)
        if measured is None or (batching.max_length is not None and batching.max_length <= max_length):
            return self
        lowered = {
            "length_input": measured,
            "max_length": max_length,
            "buckets": tuple(edge for edge in batching.buckets if edge <= max_length),
        }
        limited = self.model_copy(update={"batching": batching.model_copy(update=lowered)})
        # A copy keeps what was cached of its original.
        limited.__dict__.pop("signature", None)
        return limited

    def to_json(self) -> bytes:
        """What lies in the broker under the model's spec key: all but the checksums, which no client needs."""
        return self.model_dump_json(exclude_none=True, exclude={"files"}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ModelSpec:
        """The spec that `to_json` wrote; keys that a newer worker added are ignored. Raises ConfigurationError."""
        try:
            return cls.model_validate_json(data, extra="ignore")
        except ValidationError as error:
            raise ConfigurationError(f"Stored model spec: {_first_problem(error)}") from None


@dataclass(frozen=True, slots=True)
class Package:
    """A model's spec and the folder it was read from."""

    spec: ModelSpec
    folder: Path
    spec_sha256: str = ""
    """Of model.yaml when it was read; empty: the spec was not read from a file."""

    @property
    def label(self) -> str:
        """`name/version`, as errors name it."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    def entrypoint(self) -> tuple[str, str]:
        """(dotted module inside the folder, attribute). Raises ConfigurationError for a package without one."""
        if self.spec.entrypoint is None:
            raise ConfigurationError(f"{_label(self.folder)}: entrypoint: missing, expected module:build")
        module, _, attribute = self.spec.entrypoint.partition(":")
        return module, attribute

    def weights_file(self) -> Path | None:
        """The file that `weights` names; None without one. Raises ConfigurationError if it is not in the folder."""
        if self.spec.weights is None:
            return None
        file = _inside(self.folder, self.spec.weights, Path.is_file, self.label)
        if file is None:
            raise ConfigurationError(
                f"{_label(self.folder)}: weights: found {self.spec.weights!r:.80}, expected a file of the package"
            )
        return file

    def source_folder(self) -> Path:
        """The folder of a `transformers` package's weights. Raises ConfigurationError if it is not there."""
        source = self.spec.source or Source()
        folder = _inside(self._source_base().folder, source.path, Path.is_dir, self.label)
        if folder is None:
            raise ConfigurationError(
                f"{_label(self.folder)}: source.path: found {source.path!r:.80}, expected a folder inside the package"
            )
        return folder

    def limited_to(self, max_length: int) -> Package:
        """The package with no longer inputs than `max_length`, nor than its weights read. Raises ConfigurationError."""
        if self.spec.format == "transformers" and self.spec.batching.max_length is None:
            # A limit beyond what the weights read is refused when they are loaded.
            max_length = min(max_length, declared_positions(self.source_folder(), self.label) or max_length)
        return replace(self, spec=self.spec.limited_to(max_length))

    def manifest(self) -> Manifest:
        """The hashes of all files of the package, its weights inspected; reads every byte of it.

        Raises ConfigurationError: a file that `files` does not name or that has another hash, a model.yaml that is
        not the one that was read, and what no model file may contain.
        """
        manifest = hash_files(FileTree(self.folder, self.label, links_within=self.folder), self._source_tree())
        if self.spec_sha256 and manifest.files.get(SPEC_FILE) != self.spec_sha256:
            raise ConfigurationError(f"{self.label}: file {SPEC_FILE}: changed since it was read, expected the same")
        _check_files(self, manifest)
        self._inspect()
        return manifest

    def _source_base(self) -> HubSnapshot:
        source = self.spec.source or Source()
        if source.hub is not None and source.revision is not None:
            return find_snapshot(source.hub, source.revision)
        folder = self.folder if source.package is None else _installed_folder(self.folder, source.package)
        return HubSnapshot(folder, folder)

    def _source_tree(self) -> FileTree | None:
        """The files of the weights, where they lie outside of the package."""
        source = self.spec.source
        if source is None or (source.package is None and source.hub is None):
            return None
        return FileTree(self.source_folder(), f"{self.label}: source", self._source_base().repository)

    def _inspect(self) -> None:
        weights = self.weights_file()
        if self.spec.format == "transformers":
            inspect_transformers(self.source_folder(), self.label)
        elif weights is not None:
            inspect = {"torchscript": inspect_torchscript, "pytorch": inspect_safetensors, "onnx": inspect_onnx}
            inspect[self.spec.format](weights, self.label)


class PackageRef(NamedTuple):
    """A package folder that was found but not read."""

    name: str
    version: str
    path: Path


def discover(root: Path, name: str = "*") -> list[PackageRef]:
    """All packages under a models root, or those of one model, by name and ascending version.

    Raises ConfigurationError without a root.
    """
    try:
        if not root.is_dir():
            raise ConfigurationError(
                f"Models root {root.name!r} is not a folder. Expected <name>/<version>/{SPEC_FILE} in it"
            )
        files = list(root.glob(f"{name}/*/{SPEC_FILE}"))
    except OSError as error:
        raise ConfigurationError(f"Models root {root.name!r} cannot be read ({error.strerror})") from None
    found = [PackageRef(file.parent.parent.name, file.parent.name, file.parent) for file in files]
    return sorted(found, key=lambda ref: (ref.name, _version_order(ref.version)))


def find(root: Path, name: str, version: str | None = None) -> PackageRef:
    """The package of a model, of its highest version when None.

    Versions order by their numbers, and `2.0-rc1` comes before `2.0`. Raises UnknownModel.
    """
    parse_name("model", name)
    versions = discover(root, name) if root.is_dir() else []
    matching = [ref for ref in versions if version in (None, ref.version)]
    if not matching:
        expected = (
            f"Expected version: {', '.join(ref.version for ref in versions)}" if versions else "It has no package"
        )
        raise UnknownModel(f"Unknown model {name if version is None else f'{name}/{version}'!r:.80}. {expected}")
    return matching[-1]


def load_package(path: Path, trusted_roots: Sequence[Path] | None = None) -> Package:
    """Reads and checks the package in a folder `<models root>/<name>/<version>`.

    Code is accepted only from under one of `trusted_roots`; None: the models root that holds the folder.
    Raises ConfigurationError.
    """
    folder = path.absolute()
    if ".." in folder.parts:
        folder = folder.resolve()
    label = _label(folder)
    spec, digest = _read(folder / SPEC_FILE, label)
    for field, found, expected in (
        ("name", spec.name, folder.parent.name),
        ("version", spec.version, folder.name),
    ):
        if found != expected:
            raise ConfigurationError(f"{label}: {field}: found {found!r:.80}, expected {expected!r} as the folder says")
    package = Package(spec, folder, digest)
    package.weights_file()
    if spec.entrypoint is not None:
        _check_entrypoint(package, [folder.parent.parent] if trusted_roots is None else trusted_roots)
    return package


def read_spec(file: Path, label: str) -> ModelSpec:
    """The spec in a model.yaml, wherever it lies; `label` is how errors name it. Raises ConfigurationError."""
    return _read(file, label)[0]


def _read(file: Path, label: str) -> tuple[ModelSpec, str]:
    """(spec, SHA-256 of the file). Raises ConfigurationError."""
    try:
        text = read_document(file)
        document: Any = read_yaml(text)
    except OSError as error:
        expected = ", expected it in <models root>/<name>/<version>" if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(f"{label}: cannot be read ({error.strerror}){expected}") from None
    except BadDocument as problem:
        raise ConfigurationError(f"{label}{problem}") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{label}: found {type(document).__name__}, expected a mapping of fields")
    try:
        return ModelSpec.model_validate(document), hashlib.sha256(text).hexdigest()
    except ValidationError as error:
        raise ConfigurationError(f"{label}: {_first_problem(error)}") from None


def _check_entrypoint(package: Package, trusted_roots: Sequence[Path]) -> None:
    module, _ = package.entrypoint()
    label = _label(package.folder)
    file = _inside(package.folder, f"{module.replace('.', '/')}.py", Path.is_file, package.label)
    if file is None:
        raise ConfigurationError(
            f"{label}: entrypoint: found {package.spec.entrypoint!r:.80}, expected a module inside the package"
        )
    if not any(file.is_relative_to(os.path.realpath(root)) for root in trusted_roots):
        raise ConfigurationError(
            f"{label}: entrypoint: the package runs code and lies outside the trusted roots, "
            "expected it under one of PENSTOCK_TRUSTED_ROOTS"
        )


def _inside(folder: Path, path: str, is_there: Callable[[Path], bool], label: str) -> Path | None:
    """Where a path in a folder really lies; None if that is outside of the folder, or nothing is there.

    Raises ConfigurationError for what cannot be read.
    """
    # Unlike Path.resolve, this takes links that lead in a circle; nothing is there, then.
    real = Path(os.path.realpath(folder / path))
    try:
        return real if real.is_relative_to(os.path.realpath(folder)) and is_there(real) else None
    except OSError as error:
        raise ConfigurationError(f"{label}: {shown(path)}: cannot be read ({error.strerror})") from None


def _installed_folder(package_folder: Path, module: str) -> Path:
    try:
        found = importlib.util.find_spec(module)
    except ValueError:
        # A module that was not imported from anywhere, such as __main__.
        found = None
    locations = (found.submodule_search_locations if found else None) or []
    if not locations:
        raise ConfigurationError(
            f"{_label(package_folder)}: source.package: {module} is not installed, expected an installed Python package"
        )
    return Path(locations[0])


def _check_names(spec: ModelSpec) -> None:
    for field, kind, name in (("name", "model", spec.name), ("version", "version", spec.version)):
        try:
            parse_name(kind, name)
        except InvalidInput as error:
            raise ValueError(f"{field}: {error}") from None
    for field, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            raise ValueError(f"{field}: found {', '.join(names)}, expected distinct names")


def _check_files(package: Package, manifest: Manifest) -> None:
    """Compares the files with those that model.yaml names. Raises ConfigurationError."""
    expected = package.spec.files
    if expected is None:
        return
    found = {path: digest for path, digest in manifest.files.items() if path != SPEC_FILE}
    for path in sorted(expected.keys() | found.keys()):
        if path not in found:
            problem = "missing, expected the file that model.yaml names"
        elif path not in expected:
            problem = "found, expected no file that model.yaml does not name"
        elif found[path] != expected[path]:
            problem = f"found SHA-256 {found[path][:12]}.., expected {expected[path][:12]}.. as model.yaml says"
        else:
            continue
        raise ConfigurationError(f"{_label(package.folder)}: files: {shown(path)}: {problem}")


def _check_format(spec: ModelSpec) -> None:
    is_code = spec.format in ("pytorch", "python")
    if is_code and (spec.entrypoint is None or not _ENTRYPOINT.match(spec.entrypoint)):
        raise ValueError(f"entrypoint: found {spec.entrypoint!r:.80}, expected module:build for format {spec.format}")
    if spec.format == "transformers":
        _check_transformers(spec)
    else:
        for field in ("source", "task") if is_code else ("entrypoint", "source", "task"):
            if getattr(spec, field) is not None:
                raise ValueError(f"{field}: found one, expected none for format {spec.format}")
    if spec.streams and (spec.format != "python" or spec.batching.max_batch_size > 1):
        raise ValueError("streams: found true, expected it for format python only, with max_batch_size 1")


def _check_transformers(spec: ModelSpec) -> None:
    if spec.source is None or spec.entrypoint is not None:
        raise ValueError("source: expected a source and no entrypoint for format transformers")
    if [(one.dtype, one.shape) for one in spec.inputs] != [(STRING, (BATCH,))]:
        raise ValueError(f"inputs: expected one string input of shape ({BATCH},) for format transformers")
    if spec.task is not None:
        if not _TASK.match(spec.task):
            raise ValueError(f"task: found {spec.task!r:.80}, expected a pipeline's name such as text-classification")
    elif [(one.dtype, len(one.shape)) for one in spec.outputs] != [("float32", 2)] or isinstance(
        spec.outputs[0].shape[1], str
    ):
        raise ValueError(
            f"outputs: expected one float32 output of shape ({BATCH}, width) with a number as width, for format "
            "transformers"
        )


def _check_weights(spec: ModelSpec) -> None:
    endings = _WEIGHTS.get(spec.format)
    if endings is None:
        if spec.weights is not None:
            raise ValueError(f"weights: found {spec.weights!r:.80}, expected none for format {spec.format}")
        return
    if spec.weights is None:
        if spec.format == "pytorch":
            return
        raise ValueError(f"weights: missing, expected a file {' or '.join(endings)} for format {spec.format}")
    if not spec.weights.endswith(endings):
        reason = "; a pickle can run code" if spec.weights.endswith(PICKLES) else ""
        raise ValueError(
            f"weights: found {spec.weights!r:.80}, expected a file {' or '.join(endings)} for format "
            f"{spec.format}{reason}"
        )


def _check_outputs(spec: ModelSpec) -> None:
    """Refuses what only inputs can have: it would have no effect."""
    for output in spec.outputs:
        for field in ("optional", "min", "max"):
            if getattr(output, field) not in (None, False):
                raise ValueError(f"outputs: {output.name}: {field}: found one, expected it for inputs only")


def _check_sizes(spec: ModelSpec) -> None:
    """Refuses a signature that no job could meet: one row would not fit into a message."""
    for field, tensors, most in (("inputs", spec.inputs, MAX_BYTES), ("outputs", spec.outputs, MAX_RESULT_BYTES)):
        needed = 0
        for tensor in tensors:
            if not tensor.optional:
                width = _STRING_BYTES if tensor.dtype == STRING else DTYPES[tensor.dtype].itemsize
                needed += width * math.prod(extent for extent in tensor.shape if isinstance(extent, int))
            if needed > most:
                raise ValueError(
                    f"{field}: {tensor.name}: found shape {shape_text(tensor.shape)}, expected one row of all {field} "
                    f"within {most} bytes"
                )


def _check_batch_dimension(spec: ModelSpec) -> None:
    if spec.streams:
        return
    if not spec.outputs:
        raise ValueError("outputs: found none, expected at least one unless streams is true")
    for tensor in (*spec.inputs, *spec.outputs):
        if not tensor.is_batched:
            raise ValueError(f"shape of {tensor.name}: expected {BATCH} as the first dimension unless streams is true")
    if all(tensor.optional for tensor in spec.inputs):
        raise ValueError("inputs: found optional ones only, expected one that is required")


def _check_length(spec: ModelSpec) -> None:
    batching = spec.batching
    measured = next((tensor for tensor in spec.inputs if tensor.name == batching.length_input), None)
    if batching.length_input is not None and (
        measured is None or (measured.dtype != STRING and measured.length_axis is None)
    ):
        raise ValueError(
            f"batching.length_input: found {batching.length_input!r:.80}, expected an input of text or with a symbolic "
            f"dimension besides {BATCH}"
        )
    if measured is None and (batching.max_length or batching.max_tokens or batching.buckets):
        raise ValueError("batching.length_input: missing, expected with max_length, max_tokens and buckets")
    if batching.truncate and spec.format != "transformers":
        raise ValueError("batching.truncate: found true, expected it for format transformers only")
    if batching.max_length is not None and max(batching.buckets, default=0) > batching.max_length:
        raise ValueError(
            f"batching.buckets: found {batching.buckets[-1]}, expected at most max_length {batching.max_length}"
        )
    if batching.buckets and (spec.format != "transformers" or spec.task is not None):
        raise ValueError(
            f"batching.buckets: found {', '.join(map(str, batching.buckets))}, expected them for an encoder of "
            "transformers only: other models would take padding for input"
        )


def _version_order(version: str) -> tuple[list[tuple[int, int, str]], bool, list[tuple[int, int, str]]]:
    release, _, pre_release = version.partition("-")
    return _by_number(release), not pre_release, _by_number(pre_release)


def _by_number(text: str) -> list[tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"[0-9]+|[a-z]+", text)]


def _label(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}/{SPEC_FILE}"


def _first_problem(error: ValidationError) -> str:
    """One line for the first problem: field, found, expected."""
    problem = error.errors(include_url=False)[0]
    # The last part for a key of a mapping, that of the mapping's own name, says nothing.
    path = [part for part in problem["loc"] if part != "[key]"]
    field = shown("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix("."))
    kind, found = problem["type"], problem["input"]
    if kind == "value_error":
        return (f"{field}: " if field else "") + str(problem["ctx"]["error"])
    if kind == "missing":
        return f"{field}: missing, expected a value"
    if kind == "extra_forbidden":
        return f"{field}: unknown field, expected {_nearest(problem['loc'])}"
    if kind == "invalid_key":
        return f"{field}: found a field that is called {json.dumps(found, default=str)[:80]}, expected names of text"
    expected = _expectation(kind, found, problem.get("ctx", {})) or problem["msg"].removeprefix("Input should be ")
    return f"{field}: found {json.dumps(found, default=str)[:80]}, expected {expected}"


def _expectation(kind: str, found: object, limits: Mapping[str, Any]) -> str | None:
    """In the words of YAML where the validator has Python's; None: its own will do."""
    if kind == "float_type" and isinstance(found, str):
        # YAML 1.1 reads 1e-3 as text.
        return "a number, without quotes; with an exponent as in 1.0e-3"
    if kind == "int_type" and isinstance(found, str):
        return "a whole number, without quotes"
    return {
        "bool_type": "true or false",
        "dict_type": "a mapping of fields",
        "float_type": "a number",
        "int_type": "a whole number",
        "model_type": "a mapping of fields",
        "string_type": "text, in quotes where it looks like something else",
        "too_long": f"at most {limits.get('max_length')} entries",
        "too_short": f"at least {limits.get('min_length')} entry",
        "tuple_type": "a list",
    }.get(kind)


def _nearest(location: Sequence[int | str]) -> str:
    known: dict[str, type[BaseModel]] = {
        "batching": Batching,
        "codecs": Codecs,
        "policy": Policy if len(location) == 2 else EndpointPolicy,
        "source": Source,
        "inputs": TensorSpec,
        "outputs": TensorSpec,
    }
    section = known.get(str(location[0]), ModelSpec) if len(location) > 1 else ModelSpec
    near = difflib.get_close_matches(str(location[-1]), section.model_fields, n=1)
    return near[0] if near else f"one of: {', '.join(section.model_fields)}"
