"""`models/<name>/<version>` -> Package: the folder of a model, found, read and checked.

    folder -> load_package -> Package (ModelSpec + folder) -> Package.manifest -> a worker's runtime, the catalogue

No model is loaded or executed here. An unusable package is a ConfigurationError of one line: the file relative to the
models root, the field, the value found and the value expected.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import ValidationError

from penstock.registry.errors import ConfigurationError, MissingRequirement, UnknownModel, shown
from penstock.registry.package.bounded_yaml import BadDocument, read_document, read_yaml
from penstock.registry.package.composition import composed
from penstock.registry.package.hub_cache import HubSnapshot, find_snapshot
from penstock.registry.package.inspection import (
    declared_positions,
    inspect_onnx,
    inspect_safetensors,
    inspect_torchscript,
    inspect_transformers,
)
from penstock.registry.package.manifest import FileTree, Manifest, hash_files
from penstock.registry.package.spec import FOUND_WEIGHTS, SPEC_FILE, ModelSpec, first_problem
from penstock.registry.package.spec_sections import Source
from penstock.registry.queues import parse_name

__all__ = ["Package", "PackageRef", "discover", "find", "load_package", "read_spec"]


@dataclass(frozen=True, slots=True)
class Package:
    """A model's spec and its folder."""

    spec: ModelSpec
    folder: Path
    spec_sha256: str = ""
    """The hash of model.yaml when it was read. Empty: the spec was not read from a file."""
    steps: tuple[Package, ...] = ()
    """The packages of a pipeline, in the order of its steps. A package of two steps is here twice, as one object."""
    pipeline: Path | None = None
    """The folder of the pipeline that the package is a step of."""

    @property
    def label(self) -> str:
        """`name/version`, for messages; of a step, its path below the models root."""
        return self.folder.relative_to((self.pipeline or self.folder).parent.parent).as_posix()

    def entrypoint(self) -> tuple[str, str]:
        """(dotted module inside the folder, attribute). Raises ConfigurationError without an entry point."""
        if self.spec.entrypoint is None:
            raise ConfigurationError(f"{self._spec_label}: entrypoint: missing, expected module:build")
        module, _, attribute = self.spec.entrypoint.partition(":")
        return module, attribute

    def weights_file(self) -> Path | None:
        """The file that `weights` names, or None. Raises ConfigurationError if the file is not in the folder."""
        if self.spec.weights is None:
            return None
        file = _inside(self.folder, self.spec.weights, Path.is_file, self.label)
        if file is None:
            raise ConfigurationError(
                f"{self._spec_label}: weights: found {self.spec.weights!r:.80}, expected a file of the package"
            )
        return file

    def source_folder(self) -> Path:
        """The folder of the weights, for `transformers` and `generate`. Raises ConfigurationError if there is none."""
        source = self.spec.source or Source()
        folder = _inside(self._source_base().folder, source.path, Path.is_dir, self.label)
        if folder is None:
            raise ConfigurationError(
                f"{self._spec_label}: source.path: found {source.path!r:.80}, expected a folder inside the package"
            )
        return folder

    def limited_to(self, max_length: int) -> Package:
        """The package with inputs limited to `max_length` and to the positions of its weights.

        Raises ConfigurationError.
        """
        if self.spec.format == "transformers" and self.spec.batching.max_length is None:
            # A declared limit above that of the weights is refused when they are loaded.
            max_length = min(max_length, declared_positions(self.source_folder(), self.label) or max_length)
        steps = {id(step): step.limited_to(max_length) for step in self.steps}
        return replace(self, spec=self.spec.limited_to(max_length), steps=tuple(steps[id(step)] for step in self.steps))

    def manifest(self) -> Manifest:
        """Reads and hashes every file of the package, and inspects its weights.

        Raises ConfigurationError: `files` does not name a file or has another hash for it, model.yaml has changed
        since it was read, or a model file has content that is not allowed.
        """
        manifest = hash_files(FileTree(self.folder, self.label, links_within=self.folder), self._source_trees())
        for package in (self, *self.steps):
            package._check(manifest, package.folder.relative_to(self.folder).as_posix())
        return manifest

    @property
    def _spec_label(self) -> str:
        return f"{self.label}/{SPEC_FILE}"

    def _check(self, manifest: Manifest, below: str) -> None:
        """Compares model.yaml and `files` with a manifest that has them in the folder `below`, and inspects weights."""
        prefix = "" if below == "." else f"{below}/"
        files = {path.removeprefix(prefix): sha for path, sha in manifest.files.items() if path.startswith(prefix)}
        if self.spec_sha256 and files.get(SPEC_FILE) != self.spec_sha256:
            raise ConfigurationError(f"{self.label}: file {SPEC_FILE}: changed since it was read, expected the same")
        _check_files(self.spec.files, files, self._spec_label)
        self._inspect()

    def _source_base(self) -> HubSnapshot:
        source = self.spec.source or Source()
        if source.hub is not None and source.revision is not None:
            return find_snapshot(source.hub, source.revision)
        folder = self.folder if source.package is None else _installed_folder(self._spec_label, source.package)
        return HubSnapshot(folder, folder)

    def _source_trees(self) -> dict[str, FileTree]:
        """The files of weights that are outside the package, by the folder of their step."""
        trees: dict[str, FileTree] = {}
        for package in (self, *self.steps):
            source = package.spec.source
            if source is not None and (source.package is not None or source.hub is not None):
                prefix = "" if package is self else f"{package.folder.relative_to(self.folder).as_posix()}/"
                within = package._source_base().repository
                trees[prefix] = FileTree(package.source_folder(), f"{package.label}: source", within)
        return trees

    def _inspect(self) -> None:
        weights = self.weights_file()
        if self.spec.source is not None:
            inspect_transformers(self.source_folder(), self.label)
        elif weights is not None:
            inspect = {"torchscript": inspect_torchscript, "pytorch": inspect_safetensors, "onnx": inspect_onnx}
            inspect[self.spec.format](weights, self.label)


class PackageRef(NamedTuple):
    """A package folder that was not read yet."""

    name: str
    version: str
    path: Path


def discover(root: Path, name: str | None = None) -> list[PackageRef]:
    """The packages under a models root, or those of one model, by name and ascending version.

    Folders whose name begins with a dot are none: programs write unfinished packages there. Raises ConfigurationError
    when there is no such folder.
    """
    try:
        if not root.is_dir():
            raise ConfigurationError(
                f"Models root {root.name!r} is not a folder. Expected <name>/<version>/{SPEC_FILE} in it"
            )
        models = list(root.iterdir()) if name is None else [root / name]
    except OSError as error:
        raise ConfigurationError(f"Models root {root.name!r} cannot be read ({error.strerror})") from None
    folders = [folder for model in models for folder in _entries(model) if _is_there(folder / SPEC_FILE)]
    found = [PackageRef(folder.parent.name, folder.name, folder) for folder in folders]
    visible = [ref for ref in found if not ref.name.startswith(".") and not ref.version.startswith(".")]
    return sorted(visible, key=lambda ref: (ref.name, _version_order(ref.version)))


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder; none where it cannot be read: that affects no other model."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_there(file: Path) -> bool:
    """Whether a file exists. True where that cannot be told: the error of its reading has the reason."""
    try:
        return file.exists()
    except OSError:
        return True


def find(root: Path, name: str, version: str | None = None) -> PackageRef:
    """The package of a version of a model; of the highest version when `version` is None.

    Versions are compared by their numbers, and `2.0-rc1` comes before `2.0`. Raises UnknownModel.
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

    A package with code must be under one of `trusted_roots`; None: under its models root. Raises ConfigurationError.
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
    roots = [folder.parent.parent] if trusted_roots is None else trusted_roots
    package = Package(spec, folder, digest)
    _check_contents(package, roots)
    return package if spec.steps is None else _with_steps(package, roots)


def read_spec(file: Path, label: str) -> ModelSpec:
    """The spec in a model.yaml at any path. `label` names it in messages. Raises ConfigurationError."""
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
        return ModelSpec.model_validate(document | _found_files(document, file.parent, label)), sha256(text).hexdigest()
    except ValidationError as error:
        raise ConfigurationError(f"{label}: {first_problem(error, document)}") from None


def _found_files(document: dict[Any, Any], folder: Path, label: str) -> dict[str, object]:
    """The `weights` or `source` of a package that names none, but has a file of the usual name."""
    kind = document.get("format")
    if kind in ("transformers", "generate"):
        is_found = document.get("source") is None and (folder / "model.safetensors").is_file()
        return {"source": {}} if is_found else {}
    if not isinstance(kind, str) or document.get("weights") is not None:
        return {}
    found = [name for name in FOUND_WEIGHTS.get(kind, ()) if (folder / name).is_file()]
    if len(found) > 1:
        raise ConfigurationError(f"{label}: weights: found {' and '.join(found)}, expected one, or weights: {found[0]}")
    return {"weights": found[0]} if found else {}


def _with_steps(pipeline: Package, trusted_roots: Sequence[Path]) -> Package:
    """A pipeline with the packages of its steps and their limits. Raises ConfigurationError."""
    label = f"{pipeline.label}/{SPEC_FILE}"
    loaded: dict[str, Package] = {}
    steps = pipeline.spec.steps or ()
    for number, step in enumerate(steps):
        if step.package not in loaded:
            loaded[step.package] = _step(pipeline, f"{label}: steps[{number}].package", step.package)
    packages = tuple(loaded[step.package] for step in steps)
    try:
        spec = composed(pipeline.spec, [package.spec for package in packages])
    except ValueError as problem:
        raise ConfigurationError(f"{label}: {problem}") from None
    for package in loaded.values():
        _check_contents(package, trusted_roots)
    return replace(pipeline, spec=spec, steps=packages)


def _step(pipeline: Package, field: str, path: str) -> Package:
    """The package in a folder of a pipeline. Raises ConfigurationError."""
    if _inside(pipeline.folder, path, Path.is_dir, pipeline.label) is None:
        raise ConfigurationError(f"{field}: found {path!r:.80}, expected a folder inside the package")
    folder = pipeline.folder / path
    if _inside(pipeline.folder, f"{path}/{SPEC_FILE}", Path.is_file, pipeline.label) is None:
        raise ConfigurationError(f"{field}: found {path!r:.80} without {SPEC_FILE}, expected the folder of a package")
    label = f"{pipeline.label}/{PurePosixPath(path)}/{SPEC_FILE}"
    spec, digest = _read(folder / SPEC_FILE, label)
    return Package(spec, folder, digest, pipeline=pipeline.folder)


def _check_contents(package: Package, trusted_roots: Sequence[Path]) -> None:
    """Raises ConfigurationError unless weights and code are in the package, and code under a trusted root."""
    package.weights_file()
    if package.spec.entrypoint is not None:
        _check_entrypoint(package, trusted_roots)


def _check_entrypoint(package: Package, trusted_roots: Sequence[Path]) -> None:
    module, _ = package.entrypoint()
    label = f"{package.label}/{SPEC_FILE}"
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
    """The real path of a path in a folder; None if it is outside the folder or does not exist.

    Raises ConfigurationError if it cannot be read.
    """
    # Unlike Path.resolve, this accepts links that lead in a circle: such a path does not exist.
    real = Path(os.path.realpath(folder / path))
    try:
        return real if real.is_relative_to(os.path.realpath(folder)) and is_there(real) else None
    except OSError as error:
        raise ConfigurationError(f"{label}: {shown(path)}: cannot be read ({error.strerror})") from None


def _installed_folder(label: str, module: str) -> Path:
    try:
        found = importlib.util.find_spec(module)
    except ValueError:
        # A module without an origin, such as __main__.
        found = None
    locations = (found.submodule_search_locations if found else None) or []
    if not locations:
        raise MissingRequirement(
            f"{label}: source.package: {module} is not installed, expected an installed Python package"
        )
    return Path(locations[0])


def _check_files(expected: Mapping[str, str] | None, files: Mapping[str, str], label: str) -> None:
    """Compares the files with those that model.yaml names. Raises ConfigurationError."""
    if expected is None:
        return
    found = {path: digest for path, digest in files.items() if path != SPEC_FILE}
    for path in sorted(expected.keys() | found.keys()):
        if path not in found:
            problem = "missing, expected the file that model.yaml names"
        elif path not in expected:
            problem = "found, expected no file that model.yaml does not name"
        elif found[path] != expected[path]:
            problem = f"found SHA-256 {found[path][:12]}.., expected {expected[path][:12]}.. as model.yaml says"
        else:
            continue
        raise ConfigurationError(f"{label}: files: {shown(path)}: {problem}")


def _version_order(version: str) -> tuple[list[tuple[int, int, str]], bool, list[tuple[int, int, str]]]:
    release, _, pre_release = version.partition("-")
    return _by_number(release), not pre_release, _by_number(pre_release)


def _by_number(text: str) -> list[tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"[0-9]+|[a-z]+", text)]


def _label(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}/{SPEC_FILE}"
