"""Rows of plain numbers for a model with one input of numbers, as several protocols send them.

name, or none -> model;  lists of numbers -> rows (R, N) -> the input that takes them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.producers.gateway.fleet import GatewayClient
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import STRING, Array

__all__ = ["model_or_only", "only_input", "rows_of"]

_MOST_NUMBERS: Final = 10_000


async def model_or_only(client: GatewayClient, name: str, field: str) -> str:
    """The name, or that of the only model that is served. Raises InvalidInput, with the field that has the name."""
    if name:
        return name
    names = [model.spec.name for model in await client.models()]
    if len(names) != 1:
        raise InvalidInput(f"{len(names)} models are served. Expected {field} with the name of one")
    return names[0]


def rows_of(rows: Sequence[Sequence[float]]) -> Array:
    """(R, N) float64. Raises InvalidInput for rows of unequal lengths, and for too many numbers."""
    counts = {len(row) for row in rows}
    if len(counts) != 1 or not 1 <= min(counts) <= _MOST_NUMBERS:
        raise InvalidInput(f"No row, or rows of unequal lengths. Expected rows of 1 to {_MOST_NUMBERS} numbers each")
    if len(rows) * min(counts) > _MOST_NUMBERS * 64:
        raise InvalidInput(f"Too many numbers. Expected at most {_MOST_NUMBERS * 64}")
    return np.array(rows, np.float64)


def only_input(spec: ModelSpec, rows: Array) -> str:
    """The name of the input that takes the rows. Raises InvalidInput for a model with other inputs."""
    required = [tensor for tensor in spec.inputs if not tensor.optional]
    is_simple = len(required) == 1 and required[0].dtype != STRING and len(required[0].shape) == rows.ndim
    if not is_simple or not spec.outputs:
        raise InvalidInput(
            f"{spec.name} takes other inputs than one row of numbers. Expected /v1/models/{spec.name}:predict"
        )
    return required[0].name
