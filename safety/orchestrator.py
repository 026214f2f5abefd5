"""The gate: outputs of a candidate and of the reference -> a verdict. Without one, no candidate serves.

golden jobs -- the reference --> expected --.
     '-------- the candidate --> outputs ---+--> Gate.judge --> GateVerdict: accepted, or all reasons against it
               a validator for each output -'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.registry.tensors import Array
from penstock.safety.validators import Validator

__all__ = ["Gate", "GateVerdict", "joined"]

Outputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """`evidence`: figures by `<output>.<figure>`, and the number of golden rows as `rows`."""

    reasons: tuple[str, ...]
    evidence: Mapping[str, float]

    @property
    def accepted(self) -> bool:
        """Whether the candidate may serve."""
        return not self.reasons


class Gate:
    """Judges candidates. min_rows: with fewer rows all are refused."""

    def __init__(self, min_rows: int = 1) -> None:
        self._min_rows = min_rows

    def judge(
        self, candidate: Sequence[Outputs], golden: Sequence[Outputs], validators: Mapping[str, Validator]
    ) -> GateVerdict:
        """Compares two runs of the same batches by output. Each validator gets all rows in one call."""
        reasons = [reason for name in validators if (reason := _misshapen(name, candidate, golden))]
        if reasons:
            return GateVerdict(tuple(reasons), {"rows": 0.0})
        ours, expected = joined(candidate), joined(golden)
        rows = len(next(iter(expected.values()))) if expected else 0
        evidence = {"rows": float(rows)}
        if rows < self._min_rows:
            reasons.append(f"{rows} golden rows, expected at least {self._min_rows}")
        for name, validator in validators.items() if rows else ():
            comparison = validator.compare(ours[name], expected[name])
            evidence |= {f"{name}.{figure}": value for figure, value in comparison.figures.items()}
            if not comparison.accepted:
                reasons.append(f"{name}: {comparison.reason}")
        return GateVerdict(tuple(reasons), evidence)


def _misshapen(name: str, candidate: Sequence[Outputs], golden: Sequence[Outputs]) -> str:
    for ours, expected in zip(candidate, golden, strict=True):
        if name not in ours:
            return f"{name}: missing"
        if ours[name].shape != expected[name].shape:
            return f"{name}: shape {ours[name].shape}, expected {expected[name].shape}"
    return ""


def joined(batches: Sequence[Outputs]) -> dict[str, Array]:
    """The rows of all batches. Rows of different lengths are padded with zeros to the longest."""
    names = batches[0] if batches else ()
    return {name: _concatenated([outputs[name] for outputs in batches]) for name in names}


def _concatenated(parts: Sequence[Array]) -> Array:
    if len({part.ndim for part in parts}) == 1:
        widest = tuple(max(extents) for extents in zip(*(part.shape[1:] for part in parts), strict=True))
        parts = [_padded(part, widest) for part in parts]
    return np.concatenate(parts)


def _padded(part: Array, extents: tuple[int, ...]) -> Array:
    missing = [(0, 0), *((0, wide - own) for wide, own in zip(extents, part.shape[1:], strict=True))]
    return np.pad(part, missing) if any(after for _, after in missing) else part
