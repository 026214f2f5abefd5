"""The proxy for each framework: the objects that it accepts, and the method of these that is one inference.

    model object -> detect_framework -> its adapter -> called like the model itself

No framework is imported here: it was imported when the model object was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Protocol

from penstock.registry.errors import InvalidInput
from penstock.workers.frameworks.detector import detect_framework
from penstock.workers.frameworks.inference_proxy import After, Before, InferenceProxy

__all__ = ["Adapter", "OnnxAdapter", "PyTorchAdapter", "TransformersAdapter", "adapt"]


class Adapter(Protocol):
    """One model object of a framework, called as its framework calls it."""

    framework: ClassVar[str]
    """One of detector.FRAMEWORKS."""
    entry: ClassVar[str]
    """The model's method that is one inference."""

    @property
    def call_count(self) -> int:
        """Inferences so far."""

    @property
    def __wrapped__(self) -> Any:
        """The model object."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the entry method for these arguments."""


class _FrameworkProxy(InferenceProxy):
    """A proxy that accepts the models of some frameworks only."""

    __slots__ = ()

    framework: ClassVar[str]
    accepts: ClassVar[tuple[str, ...]]

    def __init__(self, model: Any, before: Before | None = None, after: After | None = None) -> None:
        found = detect_framework(model)
        if found not in self.accepts:
            raise InvalidInput(f"A {type(model).__name__} is of {found}. Expected a model of {self.framework}")
        super().__init__(model, before, after)


class PyTorchAdapter(_FrameworkProxy):
    """A torch module, called through `Module.__call__`, so that its hooks fire."""

    __slots__ = ()

    framework = "pytorch"
    # A transformers model is a torch module as well.
    accepts = ("pytorch", "transformers")


class TransformersAdapter(_FrameworkProxy):
    """A transformers pipeline or model, called through its `__call__`."""

    __slots__ = ()

    framework = "transformers"
    accepts = ("transformers",)


class OnnxAdapter(_FrameworkProxy):
    """An ONNX Runtime session: `adapter(outputs, feed)` and `adapter.run(outputs, feed)` are `session.run`."""

    __slots__ = ()

    framework = "onnxruntime"
    accepts = ("onnxruntime",)
    entry = "run"

    def run(self, output_names: Sequence[str] | None, input_feed: dict[str, Any], run_options: Any = None) -> Any:
        """See `InferenceSession.run`."""
        return self(output_names, input_feed, run_options)


_ADAPTERS: Final = {adapter.framework: adapter for adapter in (PyTorchAdapter, TransformersAdapter, OnnxAdapter)}


def adapt(model: Any, before: Before | None = None, after: After | None = None) -> Adapter:
    """The adapter for a model of any framework that is served. Raises InvalidInput, see detect_framework."""
    return _ADAPTERS[detect_framework(model)](model, before, after)
