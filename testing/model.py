"""What a test may serve under a model's name. Standard library only: pytest imports this at its start."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Any, TypeAlias

from penstock.registry.errors import ConfigurationError

__all__ = ["Function", "Model", "Served", "is_generator"]

Function: TypeAlias = Callable[..., Any]
"""`(inputs) -> outputs` over mappings of names to arrays; or a generator function `(inputs, ctx)`, which streams."""


@dataclass(frozen=True, slots=True)
class Model:
    """A function with the declaration that a package has in its model.yaml: jobs are checked and batched by it.

        Model(predict, inputs=[{"name": "x", "dtype": "float32", "shape": ["batch", 4]}], outputs=[...])

    function: as the `build()` of a package of format `python` returns it; a generator function streams.
    inputs, outputs, batching, policy, concurrency, deterministic, timeout_s: the fields of model.yaml with these names.
    """

    function: Function
    _: KW_ONLY
    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    version: str = "1"
    batching: Mapping[str, Any] | None = None
    policy: Mapping[str, Any] | None = None
    concurrency: int = 1
    deterministic: bool = True
    timeout_s: float | None = None

    def document(self, name: str) -> dict[str, Any]:
        """The model.yaml that declares the function under this name."""
        streams = is_generator(self.function)
        return {
            "name": name,
            "version": self.version,
            "format": "python",
            "entrypoint": "function:build",
            "inputs": [dict(each) for each in self.inputs],
            "outputs": [dict(each) for each in self.outputs],
            "batching": dict(self.batching or {}),
            "policy": dict(self.policy or {}),
            "concurrency": self.concurrency,
            "deterministic": self.deterministic,
            "timeout_s": self.timeout_s,
            "streams": streams,
        }


Served: TypeAlias = Function | Model | str | PathLike[str]
"""A function, a declared one, or the path of a package: `<models root>/<name>`, or one version below it."""


def is_generator(function: Function) -> bool:
    """Whether the function streams. Raises ConfigurationError for what cannot be a model."""
    if not callable(function):
        raise ConfigurationError(f"The model is a {type(function).__name__}. Expected a function (inputs) -> outputs")
    kinds = (function, getattr(function, "__call__", None))  # noqa: B004 - the method shows the kind of an object
    if any(inspect.iscoroutinefunction(kind) or inspect.isasyncgenfunction(kind) for kind in kinds):
        raise ConfigurationError("The model is a coroutine function. Expected a function or a generator function")
    return any(inspect.isgeneratorfunction(kind) for kind in kinds)
