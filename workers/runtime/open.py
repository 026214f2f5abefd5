"""A package -> the runtime for its format. Frameworks are imported by the runtime's `load`, not here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import Package
from penstock.registry.package.generation import GENERATE
from penstock.registry.package.spec import PIPELINE
from penstock.registry.package.spec_sections import Precision
from penstock.workers.frameworks.detector import FRAMEWORKS, framework_of_package
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.instances import ProcessInstances, ThreadInstances
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.runtime.onnx import OnnxRuntime
from penstock.workers.runtime.pipeline import PipelineRuntime
from penstock.workers.runtime.python_entrypoint import PythonRuntime
from penstock.workers.runtime.pytorch import PyTorchRuntime
from penstock.workers.runtime.step_graph import StepGraphRuntime
from penstock.workers.runtime.torchscript import TorchScriptRuntime
from penstock.workers.runtime.transformers import EncoderRuntime

__all__ = ["open_copy", "open_runtime"]

_RUNTIMES: Final[dict[str, Callable[[Package, LoadOptions], Runtime]]] = {
    "onnx": OnnxRuntime,
    "python": PythonRuntime,
    "pytorch": PyTorchRuntime,
    "torchscript": TorchScriptRuntime,
}


def open_runtime(
    package: Package,
    content_hash: str = "",
    *,
    frameworks: Collection[str] = FRAMEWORKS,
    precision: Precision = "auto",
    warmup_requests: int = 1,
    runtime_hosts: tuple[str, ...] = (),
    generate: Callable[[Package, LoadOptions], Runtime] | None = None,
) -> Runtime:
    """The runtime of a package, not yet loaded. No file of the package is read here.

    content_hash: the expected hash of the files when they are loaded; empty: any. frameworks: those that models may
    use. precision: of torch models whose package names none. warmup_requests: forwards before the model counts as
    ready. runtime_hosts: see the setting. generate: the runtime of format `generate`; None: the caller cannot have one.
    Raises ConfigurationError for a framework that is not allowed.
    """
    for one in (package, *package.steps):
        _check_framework(one, frameworks)
    options = LoadOptions(content_hash, precision, warmup_requests, runtime_hosts)
    if package.spec.format == GENERATE:
        if generate is None:
            raise ConfigurationError(f"{package.label}: found format {GENERATE}, expected another one here")
        return generate(package, options)
    if package.spec.instances == 1:
        return open_copy(package, options)
    if package.spec.instance_kind == "process":
        return ProcessInstances(package, options)
    return ThreadInstances(package, lambda: open_copy(package, options))


def open_copy(package: Package, options: LoadOptions) -> Runtime:
    """One instance of the package's model, in this process; not yet loaded."""
    return _runtime_of(package)(package, options)


def _check_framework(package: Package, frameworks: Collection[str]) -> None:
    framework = framework_of_package(package)
    if framework is not None and framework not in frameworks:
        raise ConfigurationError(
            f"{package.label}: format {package.spec.format} needs the framework {framework}, expected one of "
            f"the setting frameworks: {', '.join(sorted(frameworks)) or 'none'}"
        )


def _runtime_of(package: Package) -> Callable[[Package, LoadOptions], Runtime]:
    if package.spec.format == PIPELINE:
        return lambda pipeline, options: StepGraphRuntime(pipeline, options, open_copy)
    if package.spec.format == "transformers":
        return EncoderRuntime if package.spec.task is None else PipelineRuntime
    return _RUNTIMES[package.spec.format]
