"""Linear layers of a decoder -> weights in oneDNN's layout, where a trial at load shows that they are faster.

    all layers packed -> for each shape: both ways timed at 1, 4, 16 and 64 rows -> from how many rows on, or not at all

A trial goes through all layers of a shape in turn, as a forward does: one weight alone would stay in the cache of the
processor. The packed weights take the memory of the layers once more. The probe runs after this, so it proves them too.

Importing this module imports torch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import torch

from penstock.registry.errors import ConfigurationError
from penstock.workers.runtime.prepacked import PrepackedLinear, prepack_layers, unpack

__all__ = ["Packing", "least_rows", "pack"]

_ROWS: Final = (1, 4, 16, 64)
_TRIALS: Final = 5
_MOST_LAYERS: Final = 8
"""Of a shape in a trial: more take longer to load, and the first weights have left the cache by then."""
_GAIN: Final = 1.03
_NEVER: Final = 1 << 62


class Packing(NamedTuple):
    """Layers that are packed, of all that could be, and the bytes of their packed weights."""

    packed: int
    layers: int
    nbytes: int


def pack(model: Any, mode: Literal["auto", "on", "off"]) -> Packing:
    """Changes the layers of the model. Raises ConfigurationError for `on` where torch has no such operators."""
    if mode == "off":
        return Packing(0, 0, 0)
    layers = prepack_layers(model)
    if mode == "on" and not layers:
        raise ConfigurationError("packed_linears: found on, expected auto or off: no layer can be packed here")
    shapes: dict[tuple[int, ...], list[PrepackedLinear]] = defaultdict(list)
    for layer in layers:
        shapes[tuple(layer.weight.shape)].append(layer)
    kept: list[PrepackedLinear] = []
    for alike in shapes.values():
        rows = 1 if mode == "on" else _tried(alike[:_MOST_LAYERS])
        for layer in alike:
            if rows is None:
                unpack(layer)
            else:
                layer.least_rows = rows
                kept.append(layer)
    nbytes = sum({id(layer.weight): layer.weight.nbytes for layer in kept}.values())
    return Packing(len(kept), len(layers), nbytes)


def least_rows(dense_s: Sequence[float], packed_s: Sequence[float]) -> int | None:
    """From how many rows on packed weights are faster by 3 percent, at each number of rows that was tried from there.

    The seconds are those at 1, 4, 16 and 64 rows. None: packed weights are not faster at the largest number.
    """
    found = None
    for rows, dense, packed in zip(reversed(_ROWS), reversed(dense_s), reversed(packed_s), strict=True):
        if dense < packed * _GAIN:
            break
        found = rows
    return found


def _tried(layers: Sequence[PrepackedLinear]) -> int | None:
    dense, packed = [], []
    for rows in _ROWS:
        values = torch.randn(rows, layers[0].in_features, dtype=layers[0].weight.dtype)
        # In turn, so that a disturbance meets both.
        times = [(_seconds(layers, values, _NEVER), _seconds(layers, values, 1)) for _ in range(_TRIALS)]
        dense.append(min(one for one, _ in times))
        packed.append(min(one for _, one in times))
    return least_rows(dense, packed)


def _seconds(layers: Sequence[PrepackedLinear], values: torch.Tensor, rows: int) -> float:
    for layer in layers:
        layer.least_rows = rows
    with torch.inference_mode():
        begun = time.thread_time()
        for layer in layers:
            layer(values)
        return time.thread_time() - begun
