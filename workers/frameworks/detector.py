"""The framework of a model, from its classes' modules or from a package's format. No framework is imported here."""

from __future__ import annotations

from typing import Final

from penstock.registry.errors import InvalidInput
from penstock.registry.package import Package

__all__ = ["FRAMEWORKS", "detect_framework", "framework_of_package"]

FRAMEWORKS: Final = ("onnxruntime", "pytorch", "transformers")
"""The frameworks whose models are served."""
_BY_FORMAT: Final = {
    "generate": "transformers",
    "onnx": "onnxruntime",
    "pipeline": None,
    "python": None,
    "pytorch": "pytorch",
    "torchscript": "pytorch",
    "transformers": "transformers",
}
_BY_MODULE: Final = {
    "onnx": "onnxruntime",
    "onnxruntime": "onnxruntime",
    "torch": "pytorch",
    "transformers": "transformers",
}
"""Top-level package of a class -> framework."""
_REFUSED: Final = {
    "flax": "JAX",
    "jax": "JAX",
    "jaxlib": "JAX",
    "keras": "TensorFlow",
    "tensorflow": "TensorFlow",
    "tf_keras": "TensorFlow",
}

_EXPECTED: Final = f"Expected a model of: {', '.join(FRAMEWORKS)}; TensorFlow and JAX models can be exported to ONNX"


def detect_framework(model: object) -> str:
    """The framework of a model object: one of FRAMEWORKS.

    The most derived class decides: a transformers model is also a torch module. Raises InvalidInput for models of
    TensorFlow and JAX, by name, and for objects of any other framework.
    """
    for module in (kind.__module__.partition(".")[0] for kind in type(model).__mro__):
        if (framework := _BY_MODULE.get(module)) is not None:
            return framework
        if (refused := _REFUSED.get(module)) is not None:
            raise InvalidInput(f"A {type(model).__name__} belongs to {refused}, which is not served. {_EXPECTED}")
    raise InvalidInput(f"A {type(model).__name__} belongs to no framework that is served. {_EXPECTED}")


def framework_of_package(package: Package) -> str | None:
    """The framework that a package's format needs.

    None for `python`, whose code may import any, for a pipeline, and where another server writes the texts.
    """
    if package.spec.generate is not None and package.spec.generate.runtime_url is not None:
        return None
    return _BY_FORMAT[package.spec.format]
