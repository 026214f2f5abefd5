"""What a test serves -> packages for a worker: functions without a folder, and packages of a models root.

    {"name": function, Model or path} -> ServedModels.of -> packages, repository of further versions --> build_drain

A function is called for jobs only: it has no warm-up. A package is loaded as a worker loads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from penstock.registry.errors import (
    ConfigurationError,
    JobFailed,
    ModelError,
    NonFiniteOutput,
    UnknownModel,
    described,
)
from penstock.registry.package import SPEC_FILE, ModelSpec, Package, load_package
from penstock.registry.package.manifest import Manifest
from penstock.registry.package.spec import first_problem
from penstock.registry.settings import Settings
from penstock.registry.tensors import Array
from penstock.testing.model import Function, Model, Served
from penstock.testing.undeclared import UndeclaredSpec
from penstock.workers.frameworks.inference_proxy import InferenceProxy
from penstock.workers.runtime.base import Prepared, StreamContext
from penstock.workers.runtime.python_entrypoint import PythonRuntime
from penstock.workers.versions.loader import Loader
from penstock.workers.versions.repository import DiskRepository
from penstock.workers.versions.version import ServedVersion

__all__ = ["FunctionLoader", "FunctionPackage", "FunctionRuntime", "ServedModels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPackage(Package):
    """A function and its spec. It has no files."""

    function: Function

    def manifest(self) -> Manifest:
        """No files; the content hash is that of the function's place in its module."""
        place = f"{getattr(self.function, '__module__', '')}:{getattr(self.function, '__qualname__', self.label)}"
        return Manifest({}, {}, sha256(place.encode()).hexdigest(), ())


class FunctionRuntime(PythonRuntime):
    """Runs a function in the place of what a package's `build()` returns."""

    def __init__(self, package: FunctionPackage) -> None:
        super().__init__(package)
        self._function = package.function

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """See Runtime.run."""
        return self._checked(super().run(prepared))

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """See Runtime.stream."""
        return self._checked((yield from super().stream(inputs, context)))

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        self._refuse_precision("its own code decides")
        self.model = _guarded_generator(self._function) if self.spec.streams else self._function
        self._adapter = InferenceProxy(self.model)
        return 0

    def _warm_up(self) -> None:
        """Does nothing: a test counts the calls of its function."""

    def _checked(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """The outputs. The executor checks the floats that a declaration names; here there may be no declaration."""
        if isinstance(self.spec, UndeclaredSpec):
            for name, values in outputs.items():
                if values.dtype.kind == "f" and not bool((abs(values) < float("inf")).all()):
                    raise NonFiniteOutput(f"Output {name} contains NaN or infinity. Expected finite numbers")
        return outputs


class FunctionLoader(Loader):
    """Loads functions beside packages."""

    def load(self, version: ServedVersion) -> None:
        """See Loader.load."""
        if isinstance(version.package, FunctionPackage):
            version.runtime = FunctionRuntime(version.package)
        super().load(version)


class _FurtherVersions:
    """The versions that jobs may name beside the active ones: those under a given folder of a model."""

    def __init__(self, roots: Mapping[str, DiskRepository]) -> None:
        self._roots = roots

    def package(self, name: str, label: str) -> Package:
        """See ModelRepository.package."""
        if name not in self._roots:
            raise UnknownModel(f"Unknown model {f'{name}/{label}'!r:.80}. Expected the version that is served")
        return self._roots[name].package(name, label)

    def labels(self, name: str) -> list[str]:
        """See ModelRepository.labels."""
        return self._roots[name].labels(name) if name in self._roots else []


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The packages of one worker. undeclared: the specs of functions without a declaration."""

    packages: list[Package]
    repository: _FurtherVersions
    undeclared: dict[str, UndeclaredSpec]

    @classmethod
    def of(cls, models: Mapping[str, Served], settings: Settings) -> Self:
        """Raises ConfigurationError for a name, a declaration or a package that cannot be served."""
        if not isinstance(models, Mapping):
            raise ConfigurationError(
                f"The models are {described(models)}. Expected a mapping from name to function, Model or path"
            )
        packages: list[Package] = []
        roots: dict[str, DiskRepository] = {}
        for name, served in models.items():
            if isinstance(served, str | os.PathLike):
                packages.append(_on_disk(name, Path(served).absolute(), settings, roots))
            else:
                packages.append(_function_package(name, served))
        specs = [package.spec for package in packages]
        return cls(packages, _FurtherVersions(roots), {s.name: s for s in specs if isinstance(s, UndeclaredSpec)})


def _function_package(name: str, served: Function | Model) -> FunctionPackage:
    spec: ModelSpec
    if isinstance(served, Model):
        function = served.function
        try:
            spec = ModelSpec.model_validate(served.document(name))
        except ValidationError as error:
            raise ConfigurationError(f"{name}: {first_problem(error)}") from None
    else:
        function = served
        spec = UndeclaredSpec.of(name, served)
    return FunctionPackage(spec, Path(spec.name) / spec.version, function=function)


def _on_disk(name: str, folder: Path, settings: Settings, roots: dict[str, DiskRepository]) -> Package:
    """The package in the folder of a version, or the version of a model's folder that a worker would serve."""
    is_version = (folder / SPEC_FILE).exists()
    model = folder.parent if is_version else folder
    if model.name != name:
        raise ConfigurationError(
            f"{name}: found the folder of {model.name!r:.80}. Expected the package's own name, as <name> or "
            "<name>/<version>"
        )
    max_length = settings.inference.safeguards.max_sequence_length
    if is_version:
        package = load_package(folder)
        return package if max_length is None else package.limited_to(max_length)
    roots[name] = DiskRepository(model.parent, [model.parent], max_length)
    (package,) = roots[name].initial_packages(settings.changed({"worker.models": (name,)}))
    return package


def _guarded_generator(function: Function) -> Callable[..., Generator[Any, None, Any]]:
    """The function, which fails its job alone: pytest.fail and its like are no Exception and would end the thread."""

    def steps(inputs: Mapping[str, Array], context: StreamContext) -> Generator[Any, None, Any]:
        try:
            return (yield from function(inputs, context))
        except (Exception, GeneratorExit):
            raise
        except BaseException as error:
            raise _model_error(error) from error

    return steps


def _model_error(error: BaseException) -> JobFailed:
    return ModelError(f"{type(error).__name__}: {error}")
