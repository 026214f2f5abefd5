"""Linear layers of a decoder -> weights in oneDNN's layout, where a trial shows that they are faster.

    for each shape: known from an earlier load, or some layers packed and both ways timed at 1, 4, 16 and 64 rows
                 -> from how many rows on, or not at all
    layers that gain -> one packed before each step, so that a load and a stream do not wait for all of them
    a packed layer fails -> all compute with their dense weights again

A trial goes through several layers of a shape in turn, as a forward does: one weight alone would stay in the cache of
the processor. The packed weights take the memory of the layers once more. The probe runs after the trials, so it proves
layers of each shape.

Importing this module imports torch.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch

from penstock.registry.errors import ConfigurationError
from penstock.workers.generation.load_records import LoadRecords, machine
from penstock.workers.runtime.prepacked import PackedFailure, PrepackedLinear, pack_linears, packable, unpack

__all__ = ["Packing", "least_rows"]

logger = logging.getLogger("penstock.runtime")

_ROWS: Final = (1, 4, 16, 64)
_TRIALS: Final = 5
_MOST_LAYERS: Final = 4
"""Of a shape in a trial: more take longer to load."""
_GAIN: Final = 1.03
_NEVER: Final = 1 << 62
_KIND: Final = "packing"


class Packing:
    """The layers of a model that are packed, now and in the next steps."""

    def __init__(self, model: Any, mode: Literal["auto", "on", "off"], records: LoadRecords) -> None:
        """Changes layers of the model. Raises ConfigurationError for `on` where torch has no such operators.

        auto: tries each shape that the records do not know. on: packs all layers now. off: none.
        """
        self.layers = 0
        """Layers that could be packed."""
        self.packed = 0
        """Layers that are packed."""
        self.nbytes = 0
        """Of their packed weights."""
        self._waiting: deque[tuple[list[torch.nn.Linear], int]] = deque()
        """Layers that share a weight, with their least number of rows."""
        self._layers: list[PrepackedLinear] = []
        """All that are packed."""
        if mode == "off":
            return
        linears = packable(model)
        if mode == "on" and not linears:
            raise ConfigurationError("packed_linears: found on, expected auto or off: no layer can be packed here")
        self.layers = len(linears)
        shapes: dict[tuple[int, ...], dict[int, list[torch.nn.Linear]]] = defaultdict(lambda: defaultdict(list))
        for one in linears:
            shapes[tuple(one.weight.shape)][id(one.weight)].append(one)
        for alike in shapes.values():
            self._choose([*alike.values()], mode, records)

    @property
    def expected_nbytes(self) -> int:
        """Of all packed weights, once none waits."""
        return self.nbytes + sum(sharing[0].weight.nbytes for sharing, _ in self._waiting)

    @property
    def waiting(self) -> int:
        """Layers that will be packed."""
        return sum(len(sharing) for sharing, _ in self._waiting)

    def pack_next(self) -> bool:
        """Packs the next weight that waits, if there is memory for it. Returns whether others wait."""
        if not self._waiting:
            return False
        sharing, rows = self._waiting.popleft()
        try:
            self._pack(sharing, rows)
        except (MemoryError, RuntimeError):
            # The layers are as they were. Requests run: what no memory is there for must not end them.
            logger.warning("the other layers stay unpacked", extra={"layers": self.waiting + len(sharing)})
            self._waiting.clear()
        return bool(self._waiting)

    def give_up(self, failure: PackedFailure) -> None:
        """All layers compute with their dense weights from here on, and none is packed any more."""
        reason = str(failure).partition("\n")[0]
        logger.warning("packed layers failed and are dense again", extra={"layers": self.packed, "reason": reason})
        for layer in self._layers:
            unpack(layer)
        self._layers.clear()
        self._waiting.clear()
        self.packed = self.nbytes = 0

    def _choose(self, alike: Sequence[list[torch.nn.Linear]], mode: str, records: LoadRecords) -> None:
        """alike: weights of one shape, each with the layers that share it."""
        if mode == "on":
            for sharing in alike:
                self._pack(sharing, 1)
            return
        facts = _facts(alike[0][0])
        known = records.read(_KIND, facts)
        tried: Sequence[list[torch.nn.Linear]] = ()
        if isinstance(known, dict) and known.get("least_rows") in (None, *_ROWS):
            rows = known.get("least_rows")
        else:
            tried = alike[:_MOST_LAYERS]
            rows = self._tried(tried)
            records.write(_KIND, facts, {"least_rows": rows})
        if rows is None:
            return
        if not tried:
            # The probe comes after this, and proves a packed layer of each shape.
            tried = alike[:1]
            self._pack(tried[0], rows)
        self._waiting.extend((sharing, rows) for sharing in alike[len(tried) :])

    def _pack(self, sharing: Sequence[torch.nn.Linear], rows: int) -> None:
        packed = pack_linears(sharing)
        for layer in packed:
            layer.least_rows = rows
        self._layers += packed
        self._count(sharing)

    def _tried(self, alike: Sequence[list[torch.nn.Linear]]) -> int | None:
        """The layers of the trial remain packed where packed weights are faster."""
        layers = [layer for sharing in alike for layer in pack_linears(sharing)]
        try:
            rows = _trial(layers)
        except PackedFailure:
            rows = None
        for layer in layers:
            if rows is None:
                unpack(layer)
            else:
                layer.least_rows = rows
        self._layers += layers if rows is not None else []
        for sharing in alike if rows is not None else ():
            self._count(sharing)
        return rows

    def _count(self, sharing: Sequence[torch.nn.Linear]) -> None:
        self.packed += len(sharing)
        self.nbytes += sharing[0].weight.nbytes


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


def _facts(layer: torch.nn.Linear) -> dict[str, Any]:
    shape, dtype = list(layer.weight.shape), str(layer.weight.dtype)
    return {**machine(), "threads": torch.get_num_threads(), "shape": shape, "dtype": dtype}


def _trial(layers: Sequence[PrepackedLinear]) -> int | None:
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
