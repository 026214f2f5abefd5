"""The candidate's outputs beside the served ones -> a verdict with figures, by the validators of the canary.

pass    every output is accepted by its validator
fail    an output differs more than its validator allows, is missing, or has NaN or infinity
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import Array
from penstock.safety.validator_registry import ValidatorRegistry, compare_outputs
from penstock.safety.validators import Validator, WorseSide, changed_precision_validators

__all__ = ["FAILED", "Comparer", "PairComparison"]

FAILED: Final = ("error", "timeout", "crashed")
"""Outcomes of a candidate that gave no outputs: it raised, took too long, or its process ended."""
_WORST: Final = 1e9
_INT8: Final = "int8"


@dataclass(frozen=True, slots=True)
class PairComparison:
    """How one pair ended. outcome: `pass`, `fail` or one of FAILED. reason: empty for `pass`.

    figures: finite numbers by `<output>.<figure>`. worse_sides: the direction in which each figure of a validator gets
    worse.
    """

    outcome: str
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    worse_sides: Mapping[str, WorseSide] = field(default_factory=dict)

    @property
    def badness(self) -> float:
        """What the worst pairs are sorted by: failures first, then by the largest distance of a figure."""
        rank = 2 if self.outcome in FAILED else int(self.outcome != "pass")
        return rank * _WORST + min(_WORST - 1, max(map(_distance, self.figures.items()), default=0.0))


class Comparer:
    """Compares outputs of one candidate of a model. outputs: as both versions declare them. validators: custom ones
    take the place of those for a changed precision: another version is other numbers. form: of the candidate.
    """

    def __init__(
        self,
        model: str,
        outputs: Sequence[TensorSpec],
        validators: ValidatorRegistry | None = None,
        *,
        task: str | None = None,
        form: str = "",
    ) -> None:
        self._model = model
        self._outputs = tuple(outputs)
        self._task = task
        self._is_int8 = form == _INT8
        self._registry = validators or ValidatorRegistry()
        self._validators: dict[str, Validator] = {}

    def compare(self, candidate: Mapping[str, Array], served: Mapping[str, Array]) -> PairComparison:
        """Compares each served output; a job may have asked for some of them only."""
        reasons: list[str] = []
        figures: dict[str, float] = {}
        sides: dict[str, WorseSide] = {}
        for name, golden in served.items():
            if name not in candidate:
                reasons.append(f"{name}: missing, expected an output")
                continue
            found = compare_outputs(self.validators(served)[name], candidate[name], golden)
            if not found.accepted:
                reasons.append(f"{name}: {found.reason}")
            figures.update((f"{name}.{figure}", value) for figure, value in found.values.items() if isfinite(value))
            sides.update((f"{name}.{place}", figure.worse_side) for place, figure in found.figures.items())
        return PairComparison("fail" if reasons else "pass", "; ".join(reasons), figures, sides)

    def validators(self, served: Mapping[str, Array]) -> dict[str, Validator]:
        """The validator of each of these outputs. It is chosen once, by the first output that was served."""
        outputs = [one for one in self._outputs if one.name in served and one.name not in self._validators]
        if outputs:
            defaults = changed_precision_validators(outputs, served, is_int8=self._is_int8)
            self._validators |= self._registry.validators_for(
                self._model, outputs, served, self._task, defaults=defaults
            )
        return {name: self._validators[name] for name in served}


def _distance(figure: tuple[str, float]) -> float:
    """How far a figure is from that of an equal output."""
    name, value = figure
    kind = name.rpartition(".")[2]
    return max(0.0, 1 - value) if kind.startswith("min_") or kind == "agreement" else abs(value)
