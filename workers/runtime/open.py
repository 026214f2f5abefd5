"""A package -> the runtime for its format. Frameworks are imported by the runtime's `load`, not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from registry.package import Package
from workers.runtime.base import Runtime
from workers.runtime.python_entrypoint import PythonRuntime
from workers.runtime.pytorch import PyTorchRuntime
from workers.runtime.transformers import EncoderRuntime

__all__ = ["open_runtime"]

_RUNTIMES: Final[dict[str, Callable[[Package], Runtime]]] = {
    "pytorch": PyTorchRuntime,
    "transformers": EncoderRuntime,
    "python": PythonRuntime,
}


def open_runtime(package: Package) -> Runtime:
    """The runtime of a package, not yet loaded."""
    return _RUNTIMES[package.spec.format](package)
