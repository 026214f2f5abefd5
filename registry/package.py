"""`models/<name>/<version>/model.yaml` -> ModelSpec: what a model accepts, answers and costs.

    folder -> load_package -> Package (spec + folder) -> a worker's runtime
                              ModelSpec.to_json -> `{model}:spec` in the broker -> ModelSpec.from_json -> a client

Nothing of a model is loaded or executed here. A package that cannot work is a ConfigurationError of one line: the
file relative to the models root, the field, what was found and what was expected.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from registry.documents import BadDocument, read_yaml
from registry.errors import ConfigurationError, InvalidInput, UnknownModel, shown
from registry.queues import parse_name
from registry.signature import BATCH, Signature, TensorSpec
from registry.tensors import STRING

__all__ = [
    "SPEC_FILE",
    "Batching",
    "ModelSpec",
    "Package",
    "PackageRef",
    "Source",
    "discover",
    "find",
    "load_package",
]

SPEC_FILE: Final = "model.yaml"
_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")


def _version_text(value: object) -> object:
    # YAML reads an unquoted 1 as a number; 1.10 has already become 1.1 there, so floats are refused.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Section(BaseModel):
    """A part of model.yaml: immutable, exact types, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Source(Section):
    """Where the weights of a `transformers` package lie: a folder of the package, or of an installed one."""

    path: str = "."
    package: str | None = None
    """The importable name of an installed Python distribution; None: the model package's own folder."""

    @model_validator(mode="after")
    def _stays_inside(self) -> Source:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"path: found {self.path!r:.80}, expected a relative path inside the package")
        if self.package is not None and not self.package.isidentifier():
            raise ValueError(f"package: found {self.package!r:.80}, expected the name of a top-level Python package")
        return self


class Batching(Section):
    """How jobs of this model share a forward. 0 and null mean: use the setting, or no bound."""

    max_batch_size: Annotated[int, Field(ge=0)] = 0
    """Rows; 0: the worker's setting."""
    max_wait_ms: Annotated[int | float | None, Field(ge=0)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Rows times the longest length in the batch."""
    max_bytes: Annotated[int | None, Field(ge=1)] = None
    sort_window: Annotated[int, Field(ge=1)] = 1
    """How many batches of waiting jobs are sorted by length before one is cut."""
    length_input: str | None = None
    """The input whose length decides: characters of text, or the extent of a tensor's first symbolic axis."""
    max_length: Annotated[int | None, Field(ge=1)] = None
    """The longest `length_input`; for `transformers` in tokens, otherwise as `length_input` is measured."""
    truncate: bool = False
    """Whether longer text is cut; only `transformers` can, and must, since clients cannot count tokens."""


class ModelSpec(Section):
    """One version of one model, as clients and workers know it."""

    name: str
    version: Annotated[str, BeforeValidator(_version_text)]
    format: Literal["pytorch", "transformers", "python"]
    entrypoint: str | None = None
    """`module:build` for `pytorch` and `python`; the module is a file of the package."""
    source: Source | None = None
    inputs: Annotated[tuple[TensorSpec, ...], Field(strict=False, min_length=1)]
    outputs: Annotated[tuple[TensorSpec, ...], Field(strict=False)]
    batching: Batching = Batching()
    concurrency: Annotated[int, Field(ge=1)] = 1
    """Forwards of this model that may run at the same time in one worker."""
    streams: bool = False
    """Whether the entry point yields chunks; such jobs run one by one."""
    deterministic: bool = True
    """Whether equal jobs may share one forward."""
    timeout_s: Annotated[int | float | None, Field(gt=0)] = None
    """The limit of one forward; None: the worker's setting."""

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelSpec:
        for check in (_check_names, _check_format, _check_batch_dimension, _check_length):
            check(self)
        return self

    @cached_property
    def signature(self) -> Signature:
        """The check for this model's inputs."""
        # A limit in tokens is the worker's to apply: it cuts, so no text is too long for the client.
        limit = None if self.batching.truncate else self.batching.max_length
        return Signature(self.inputs, self.outputs, self.batching.length_input, limit)

    @property
    def reference(self) -> str:
        """`name/version`."""
        return f"{self.name}/{self.version}"

    def to_json(self) -> bytes:
        """What lies in the broker under the model's spec key."""
        return self.model_dump_json(exclude_none=True).encode()

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

    def entrypoint(self) -> tuple[str, str]:
        """(dotted module inside the folder, attribute). Raises ConfigurationError for a package without one."""
        if self.spec.entrypoint is None:
            raise ConfigurationError(f"{_label(self.folder)}: entrypoint: missing, expected module:build")
        module, _, attribute = self.spec.entrypoint.partition(":")
        return module, attribute

    def source_folder(self) -> Path:
        """The folder of a `transformers` package's weights. Raises ConfigurationError if it is not there."""
        source = self.spec.source or Source()
        base = self.folder if source.package is None else _installed_folder(self.folder, source.package)
        folder = (base / source.path).resolve()
        if not folder.is_relative_to(base.resolve()) or not folder.is_dir():
            raise ConfigurationError(
                f"{_label(self.folder)}: source.path: found {source.path!r:.80}, expected a folder inside the package"
            )
        return folder


class PackageRef(NamedTuple):
    """A package folder that was found but not read."""

    name: str
    version: str
    path: Path


def discover(root: Path) -> list[PackageRef]:
    """All packages under a models root, by name and ascending version. Raises ConfigurationError without a root."""
    if not root.is_dir():
        raise ConfigurationError(
            f"Models root {root.name!r} is not a folder. Expected <name>/<version>/{SPEC_FILE} in it"
        )
    found = [
        PackageRef(file.parent.parent.name, file.parent.name, file.parent) for file in root.glob(f"*/*/{SPEC_FILE}")
    ]
    return sorted(found, key=lambda ref: (ref.name, _version_order(ref.version)))


def find(root: Path, name: str, version: str | None = None) -> PackageRef:
    """The package of a model, of its highest version when None.

    Versions order by their numbers, and `2.0-rc1` comes before `2.0`. Raises UnknownModel.
    """
    parse_name("model", name)
    versions = [ref for ref in discover(root) if ref.name == name] if root.is_dir() else []
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
    label = _label(folder)
    spec = _read_spec(folder / SPEC_FILE, label)
    for field, found, expected in (
        ("name", spec.name, folder.parent.name),
        ("version", spec.version, folder.name),
    ):
        if found != expected:
            raise ConfigurationError(f"{label}: {field}: found {found!r:.80}, expected {expected!r} as the folder says")
    package = Package(spec, folder)
    if spec.entrypoint is not None:
        _check_entrypoint(package, [folder.parent.parent] if trusted_roots is None else trusted_roots)
    return package


def _read_spec(file: Path, label: str) -> ModelSpec:
    try:
        document: Any = read_yaml(file.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{label}: cannot be read ({error.strerror})") from None
    except BadDocument as problem:
        raise ConfigurationError(f"{label}{problem}") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{label}: found {type(document).__name__}, expected a mapping of fields")
    try:
        return ModelSpec.model_validate(document)
    except ValidationError as error:
        raise ConfigurationError(f"{label}: {_first_problem(error)}") from None


def _check_entrypoint(package: Package, trusted_roots: Sequence[Path]) -> None:
    module, _ = package.entrypoint()
    label = _label(package.folder)
    file = package.folder.joinpath(*module.split(".")).with_suffix(".py").resolve()
    if not file.is_file() or not file.is_relative_to(package.folder.resolve()):
        raise ConfigurationError(
            f"{label}: entrypoint: found {package.spec.entrypoint!r:.80}, expected a module inside the package"
        )
    if not any(file.is_relative_to(root.resolve()) for root in trusted_roots):
        raise ConfigurationError(
            f"{label}: entrypoint: the package runs code and lies outside the trusted roots, "
            "expected it under one of PENSTOCK_TRUSTED_ROOTS"
        )


def _installed_folder(package_folder: Path, module: str) -> Path:
    found = importlib.util.find_spec(module)
    locations = (found.submodule_search_locations if found else None) or []
    if not locations:
        raise ConfigurationError(
            f"{_label(package_folder)}: source.package: {module} is not installed, expected an installed Python package"
        )
    return Path(locations[0])


def _check_names(spec: ModelSpec) -> None:
    for field, name in (("name", spec.name), ("version", spec.version)):
        try:
            parse_name(field, name)
        except InvalidInput as error:
            raise ValueError(f"{field}: {error}") from None
    for field, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            raise ValueError(f"{field}: found {', '.join(names)}, expected distinct names")


def _check_format(spec: ModelSpec) -> None:
    if spec.format == "transformers":
        if spec.source is None or spec.entrypoint is not None:
            raise ValueError("source: expected a source and no entrypoint for format transformers")
        if [(one.dtype, one.shape) for one in spec.inputs] != [(STRING, (BATCH,))]:
            raise ValueError(f"inputs: expected one string input of shape ({BATCH},) for format transformers")
        if [(one.dtype, len(one.shape)) for one in spec.outputs] != [("float32", 2)]:
            raise ValueError(f"outputs: expected one float32 output of shape ({BATCH}, width) for format transformers")
    elif spec.entrypoint is None or not _ENTRYPOINT.match(spec.entrypoint) or spec.source is not None:
        raise ValueError(
            f"entrypoint: found {spec.entrypoint!r:.80}, expected module:build and no source for format {spec.format}"
        )
    if spec.streams and (spec.format != "python" or spec.batching.max_batch_size > 1):
        raise ValueError("streams: found true, expected it for format python only, with max_batch_size 1")


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
    if measured is None and (batching.max_length is not None or batching.max_tokens is not None):
        raise ValueError("batching.length_input: missing, expected with max_length and max_tokens")
    if batching.truncate != (spec.format == "transformers" and batching.max_length is not None):
        raise ValueError(
            f"batching.truncate: found {str(batching.truncate).lower()}, expected true exactly for format transformers "
            "with a max_length"
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
    field = shown("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip("."))
    kind, found = problem["type"], problem["input"]
    if kind == "value_error":
        return (f"{field}: " if field else "") + str(problem["ctx"]["error"])
    if kind == "missing":
        return f"{field}: missing, expected a value"
    if kind == "extra_forbidden":
        return f"{field}: unknown field, expected {_nearest(problem['loc'])}"
    return f"{field}: found {json.dumps(found, default=str)[:80]}, expected {_expectation(problem['msg'])}"


def _expectation(message: str) -> str:
    return message.removeprefix("Input should be ").removeprefix("Input should ")


def _nearest(location: Sequence[int | str]) -> str:
    known: dict[str, type[BaseModel]] = {
        "batching": Batching,
        "source": Source,
        "inputs": TensorSpec,
        "outputs": TensorSpec,
    }
    section = known.get(str(location[0]), ModelSpec) if len(location) > 1 else ModelSpec
    near = difflib.get_close_matches(str(location[-1]), section.model_fields, n=1)
    return near[0] if near else f"one of: {', '.join(section.model_fields)}"
