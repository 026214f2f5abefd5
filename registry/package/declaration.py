"""Inputs and outputs as Python writes them -> the fields of model.yaml.

    {"x": ("float32", ["batch", 4])}   or   [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}]

The first form has a name, a dtype and a shape; the second is that of model.yaml, with all its fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from penstock.registry.errors import InvalidInput

__all__ = ["Tensors", "tensor_fields"]

Tensors: TypeAlias = Mapping[str, tuple[str, Sequence[int | str]]] | Sequence[Mapping[str, Any]]
"""The declared inputs or outputs of a model."""


def tensor_fields(kind: str, declared: object) -> list[dict[str, Any]]:
    """The entries of `inputs` or `outputs` in model.yaml. `kind` is the word for it. Raises InvalidInput."""
    if isinstance(declared, Mapping):
        return [_entry(kind, name, value) for name, value in declared.items()]
    if isinstance(declared, Sequence) and all(isinstance(entry, Mapping) for entry in declared):
        return [dict(entry) for entry in declared]
    raise InvalidInput(
        f'{kind}: found {type(declared).__name__}, expected a mapping such as {{"x": ("float32", ["batch", 4])}}'
    )


def _entry(kind: str, name: object, value: object) -> dict[str, Any]:
    match value:
        case (str(dtype), [*shape]) | (str(dtype), (*shape,)):
            return {"name": name, "dtype": dtype, "shape": shape}
        case {**fields}:
            return {"name": name} | {str(field): given for field, given in fields.items()}
    raise InvalidInput(
        f'{kind}: {name!r:.80}: found {type(value).__name__}, expected a dtype and a shape: ("float32", ["batch", 4])'
    )
