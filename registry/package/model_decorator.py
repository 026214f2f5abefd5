"""`@penstock.model`: declares a function or a class of a Python file as a model.

    @penstock.model(inputs={"x": ("float32", ["batch", 4])}, outputs={"y": ("float32", ["batch"])})
    def total(x):
        return x.sum(axis=1)

A class has `predict`, and may have `load`, which a worker calls once. Inputs come by name, with the rows of several
jobs. `penstock worker --app FILE` serves the models of a file; one_file.py reads the declarations without running it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from penstock.registry.package.declaration import Tensors, tensor_fields

__all__ = ["DECLARED", "model"]

DECLARED: Final = "__penstock_model__"
"""The attribute of a declared function or class."""

_Model = TypeVar("_Model", bound=Callable[..., Any])


def model(
    *,
    inputs: Tensors,
    outputs: Tensors,
    name: str | None = None,
    version: str | int = 1,
    batching: Mapping[str, Any] | None = None,
    streams: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> Callable[[_Model], _Model]:
    """Declares a model. The function or class itself is not changed, and can be called as before.

    inputs, outputs: {"x": ("float32", ["batch", 4])}, or as in model.yaml. name: of the model; None: that of the
    function or class, in lower case. batching: as in model.yaml. streams: a generator function, or a generator method
    `predict`, whose chunks are streamed. fields: further fields of model.yaml. Raises InvalidInput.
    """
    tensor_fields("inputs", inputs)
    tensor_fields("outputs", outputs)

    def declare(declared: _Model) -> _Model:
        setattr(declared, DECLARED, True)
        return declared

    return declare
