"""Linear layers of a decoder -> weights in oneDNN's layout, where a trial shows that they are faster.

    for each shape: known from an earlier load, or some layers packed for a trial, which compares the outputs of both
                    ways and times them at 1, 4, 16 and 64 rows -> from how many rows on, or not at all
    the findings of all shapes -> the gate --refused--> dense weights
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
from math import isfinite
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch

from penstock.registry.errors import ConfigurationError
from penstock.safety.orchestrator import GateEvidence
from penstock.workers.generation.acceleration_gate import PACKED_LINEARS, AccelerationGate
from penstock.workers.generation.load_records import LoadRecords, machine
from penstock.workers.runtime.prepacked import PackedFailure, PrepackedLinear, pack_linears, packable, unpack

__all__ = ["Packing", "least_rows"]

logger = logging.getLogger("penstock.runtime")

_ROWS: Final = (1, 4, 16, 64)
_TRIALS: Final = 5
_MOST_LAYERS: Final = 4
"""Of a shape in a trial: more take longer to load."""
_GAIN: Final = 1.03
_MOST_DIFFERENCES: Final = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Of the largest output of a layer: sums are rounded in another order."""
_NEVER: Final = 1 << 62
_KIND: Final = "packing"
_MOST_CHARACTERS: Final = 300

_Alike: TypeAlias = Sequence[Sequence[torch.nn.Linear]]
"""Weights of one shape, each with the layers that share it."""


class Packing:
    """The layers of a model that are packed, now and in the next steps."""

    def __init__(
        self, model: Any, mode: Literal["auto", "on", "off"], records: LoadRecords, gate: AccelerationGate
    ) -> None:
        """Changes layers of the model. Raises ConfigurationError for `on` where torch has no such operators.

        auto: tries each shape that the records do not know. on: packs all layers now, if their outputs are right. off:
        none.
        """
        self._gate: Final = gate
        self.layers = 0
        """Layers that could be packed."""
        self.packed = 0
        """Layers that are packed."""
        self.nbytes = 0
        """Of their packed weights."""
        self._waiting: deque[tuple[Sequence[torch.nn.Linear], int]] = deque()
        """Layers that share a weight, with their least number of rows."""
        self._layers: list[PrepackedLinear] = []
        """All that are packed."""
        if mode == "off":
            gate.stays_off(PACKED_LINEARS, "packed_linears", mode)
            return
        linears = packable(model)
        if mode == "on" and not linears:
            raise ConfigurationError("packed_linears: found on, expected auto or off: no layer can be packed here")
        self.layers = len(linears)
        if linears:
            self._decide(_by_shape(linears), mode, records)

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
        reason = _reason(failure)
        logger.warning("packed layers failed and are dense again", extra={"layers": self.packed, "reason": reason})
        for layer in self._layers:
            unpack(layer)
        self._layers.clear()
        self._waiting.clear()
        self.packed = self.nbytes = 0
        self._gate.switched_off(PACKED_LINEARS, reason)

    def _decide(self, shapes: Sequence[_Alike], mode: Literal["auto", "on"], records: LoadRecords) -> None:
        found = [_compared(alike) if mode == "on" else _known_or_tried(alike, records) for alike in shapes]
        if not self._gate.accepts(PACKED_LINEARS, _evidence(found), "packed_linears", mode):
            return
        for alike, one in zip(shapes, found, strict=True):
            if one.least_rows is not None:
                # The probe comes after this, and proves a packed layer of each shape.
                now = len(alike) if mode == "on" else 1
                for sharing in alike[:now]:
                    self._pack(sharing, one.least_rows)
                self._waiting.extend((sharing, one.least_rows) for sharing in alike[now:])

    def _pack(self, sharing: Sequence[torch.nn.Linear], rows: int) -> None:
        packed = pack_linears(sharing)
        for layer in packed:
            layer.least_rows = rows
        self._layers += packed
        self.packed += len(sharing)
        self.nbytes += sharing[0].weight.nbytes


class _ShapeFinding(NamedTuple):
    """What a trial says about layers of one shape."""

    shape: str
    least_rows: int | None
    """From how many rows on packed weights are used; None: never."""
    gain: float | None
    """How many times faster they were at the largest number of rows; None: not timed."""
    difference: float | None
    """Of the outputs, as a share of the largest; None: they could not be computed, or are no numbers."""
    problem: str
    """Why they are not used; empty where they are."""

    @property
    def figures(self) -> dict[str, float]:
        """By the shape and the name."""
        named = {"least_rows": self.least_rows, "gain": self.gain, "difference": self.difference}
        return {f"{self.shape}.{name}": float(value) for name, value in named.items() if value is not None}


def _by_shape(linears: Sequence[torch.nn.Linear]) -> list[_Alike]:
    shapes: dict[tuple[int, ...], dict[int, list[torch.nn.Linear]]] = defaultdict(lambda: defaultdict(list))
    for one in linears:
        shapes[tuple(one.weight.shape)][id(one.weight)].append(one)
    return [[*alike.values()] for alike in shapes.values()]


def _evidence(found: Sequence[_ShapeFinding]) -> GateEvidence:
    """Speaks against packed weights where no shape is better by them. The gain is that of the best shape."""
    used = [one for one in found if one.least_rows is not None]
    problems = () if used else tuple(f"{one.shape}: {one.problem}" for one in found)
    gains = [one.gain for one in used if one.gain is not None]
    figures = {name: value for one in found for name, value in one.figures.items()}
    return GateEvidence(problems, None, figures, max(gains, default=None), _GAIN if gains else 0.0)


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


def _known_or_tried(alike: _Alike, records: LoadRecords) -> _ShapeFinding:
    facts = _facts(alike[0][0])
    if (known := _known(records.read(_KIND, facts))) is not None:
        return known
    found = _tried(alike[:_MOST_LAYERS])
    records.write(_KIND, facts, found._asdict())
    return found


def _known(record: Any) -> _ShapeFinding | None:
    """None for a record that this module does not write."""
    if not isinstance(record, dict) or record.keys() != {*_ShapeFinding._fields}:
        return None
    found = _ShapeFinding(**record)
    are_numbers = all(one is None or isinstance(one, float) for one in (found.gain, found.difference))
    are_texts = isinstance(found.shape, str) and isinstance(found.problem, str)
    return found if found.least_rows in (None, *_ROWS) and are_numbers and are_texts else None


def _facts(layer: torch.nn.Linear) -> dict[str, Any]:
    shape, dtype = list(layer.weight.shape), str(layer.weight.dtype)
    return {**machine(), "threads": torch.get_num_threads(), "shape": shape, "dtype": dtype}


def _tried(alike: _Alike) -> _ShapeFinding:
    """Whether packed weights give the outputs of dense ones, and are faster. The layers are dense again afterwards."""
    found = _compared(alike)
    if found.problem:
        return found
    layers = [layer for sharing in alike for layer in pack_linears(sharing)]
    try:
        dense, packed = _times(layers)
    except PackedFailure as failure:
        return found._replace(least_rows=None, problem=_reason(failure))
    finally:
        for layer in layers:
            unpack(layer)
    rows, gain = least_rows(dense, packed), dense[-1] / max(packed[-1], 1e-12)
    problem = f"gain {gain:.2f} at {_ROWS[-1]} rows, expected at least {_GAIN:g}" if rows is None else ""
    return found._replace(least_rows=rows, gain=gain, problem=problem)


def _compared(alike: _Alike) -> _ShapeFinding:
    """Whether a packed layer gives the outputs of the dense one: then it is used for any number of rows."""
    shape, dtype = "x".join(map(str, alike[0][0].weight.shape)), alike[0][0].weight.dtype
    values = torch.randn(_ROWS[-1], alike[0][0].in_features, dtype=dtype)
    with torch.inference_mode():
        expected = alike[0][0](values)
        layers = pack_linears(alike[0])
        try:
            layers[0].least_rows = 1
            found = layers[0](values)
        except PackedFailure as failure:
            return _ShapeFinding(shape, None, None, None, _reason(failure))
        finally:
            for layer in layers:
                unpack(layer)
        largest = float(expected.abs().max())
        difference = float((found - expected).abs().max()) / (largest or 1.0)
    most = _MOST_DIFFERENCES[dtype]
    # A NaN is no less than the limit, either.
    if not difference <= most:
        problem = f"outputs differ by {difference:.3g} of the largest, expected at most {most:g}"
        return _ShapeFinding(shape, None, None, difference if isfinite(difference) else None, problem)
    return _ShapeFinding(shape, 1, None, difference, "")


def _reason(failure: PackedFailure) -> str:
    return str(failure).partition("\n")[0][:_MOST_CHARACTERS]


def _times(layers: Sequence[PrepackedLinear]) -> tuple[list[float], list[float]]:
    """Seconds with dense and with packed weights, at each number of rows."""
    dense, packed = [], []
    for rows in _ROWS:
        values = torch.randn(rows, layers[0].in_features, dtype=layers[0].weight.dtype)
        # In turn, so that a disturbance meets both.
        times = [(_seconds(layers, values, _NEVER), _seconds(layers, values, 1)) for _ in range(_TRIALS)]
        dense.append(min(one for one, _ in times))
        packed.append(min(one for _, one in times))
    return dense, packed


def _seconds(layers: Sequence[PrepackedLinear], values: torch.Tensor, rows: int) -> float:
    for layer in layers:
        layer.least_rows = rows
    with torch.inference_mode():
        begun = time.thread_time()
        for layer in layers:
            layer(values)
        return time.thread_time() - begun
