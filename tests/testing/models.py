"""What the tests of this folder serve in memory: functions, declared functions, and gates that hold a forward."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.registry.tensors import Array
from penstock.testing import Model
from tests.servers import LEAST_PATIENCE_S

X = {"name": "x", "dtype": "float32", "shape": ["batch", 4]}
Y = {"name": "y", "dtype": "float32", "shape": ["batch", 4]}
PATIENCE_S = 2 * LEAST_PATIENCE_S


def row(number: float = 1.0) -> dict[str, Any]:
    """The inputs of a job with one row."""
    return {"x": np.full((1, 4), number, np.float32)}


def double(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """2 x."""
    return {"y": inputs["x"] * 2}


def declared(function: Any = double, **fields: Any) -> Model:
    """The function with `x` and `y` declared, both float32 (batch, 4)."""
    return Model(function, inputs=[X], outputs=[Y], **fields)


class Gate:
    """A model that waits until it is opened, and notes the first number of each row, forward by forward."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.forwards: list[list[float]] = []

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.forwards.append(inputs["x"][:, 0].tolist())
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        return double(inputs)

    def await_forward(self) -> None:
        """Returns when a forward has begun."""
        assert self.entered.wait(PATIENCE_S)
