"""Plain numbers -> the input of a model that takes one row of numbers: /predict and its WebSocket.

[1, 2, 3] or [[1, 2], [3, 4]] -> array of rows -> the only input of the named model, or of the only one served
"""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.producers.gateway.fleet import GatewayClient
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import STRING, Array

__all__ = ["flat_rows", "named_model", "only_input"]

_MOST_NUMBERS: Final = 10_000


def flat_rows(rows: list[list[float]]) -> Array:
    """The rows as float64 (rows, numbers). Raises InvalidInput unless they have one length from 1 to 10,000."""
    counts = {len(row) for row in rows}
    if len(counts) != 1 or not 1 <= min(counts) <= _MOST_NUMBERS:
        raise InvalidInput(f"No row, or rows of unequal lengths. Expected rows of 1 to {_MOST_NUMBERS} numbers each")
    if len(rows) * min(counts) > _MOST_NUMBERS * 64:
        raise InvalidInput(f"Too many numbers. Expected at most {_MOST_NUMBERS * 64}")
    return np.array(rows, np.float64)


def only_input(spec: ModelSpec, rows: Array) -> str:
    """The name of the only required input. Raises InvalidInput for a model that takes anything else."""
    required = [tensor for tensor in spec.inputs if not tensor.optional]
    is_simple = len(required) == 1 and required[0].dtype != STRING and len(required[0].shape) == rows.ndim
    if not is_simple or not spec.outputs:
        raise InvalidInput(
            f"{spec.name} takes other inputs than one row of numbers. Expected /v1/models/{spec.name}:predict"
        )
    return required[0].name


async def named_model(client: GatewayClient, name: str | None, field: str = "?model=") -> str:
    """The name that the request has, or that of the only model that is served.

    field: where a request names its model. Raises InvalidInput.
    """
    if name:
        return name
    names = [model.spec.name for model in await client.models()]
    if len(names) != 1:
        raise InvalidInput(f"{len(names)} models are served. Expected {field} with the name of one")
    return names[0]
