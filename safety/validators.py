"""Compare a candidate's output with the golden one -> accepted or refused, with figures.

    same precision     every element within atol + rtol * |golden|; text and integers exactly
    other precision    by the use of the output: the direction of embeddings, the ranking and size of logits

NaN and infinity are always refused. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import Array

__all__ = [
    "Comparison",
    "EmbeddingValidator",
    "ExactValidator",
    "LogitsValidator",
    "TensorValidator",
    "Validator",
    "changed_precision_validators",
    "same_precision_validators",
]

_MIN_COSINE: Final = 0.999
_UNIT_LENGTH_WITHIN: Final = 1e-3
"""Rows whose length differs less from 1 are embeddings: the rows of logits do not all have unit length."""
_REDUCED_DELTA: Final = 0.02
_REDUCED_AGREEMENT: Final = 0.99
_INT8_DELTA: Final = 0.1
_INT8_AGREEMENT: Final = 0.98


@dataclass(frozen=True, slots=True)
class Comparison:
    """`reason` is empty if the output is accepted."""

    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether the output is accepted."""
        return not self.reason


class Validator(Protocol):
    """Judges one output over all golden rows."""

    def compare(self, candidate: Array, golden: Array) -> Comparison:
        """Compares the same rows in the same order. A wrong shape is a refusal, not an error."""


@dataclass(frozen=True, slots=True)
class TensorValidator:
    """Every element within atol + rtol * |golden|: for a candidate of the same precision."""

    atol: float
    rtol: float

    def compare(self, candidate: Array, golden: Array) -> Comparison:
        """Figures: max_error; max_error_ratio, whose limit is 1."""
        if reason := _unfit(candidate, golden):
            return Comparison(reason)
        error = np.abs(candidate.astype(np.float64) - golden.astype(np.float64))
        allowed = self.atol + self.rtol * np.abs(golden.astype(np.float64))
        # With a tolerance of 0, equal elements are accepted.
        ratio = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
        worst = float(ratio.max(initial=0.0))
        figures = {"max_error": float(error.max(initial=0.0)), "max_error_ratio": worst}
        return Comparison(_if(worst > 1, f"max_error_ratio {worst:.3g}, expected at most 1"), figures)


@dataclass(frozen=True, slots=True)
class EmbeddingValidator:
    """Every row has the direction of the golden one: for vectors that are compared by their direction."""

    min_cosine: float = _MIN_COSINE

    def compare(self, candidate: Array, golden: Array) -> Comparison:
        """Figures: min_cosine over the rows, which are the vectors along the last axis."""
        if reason := _unfit(candidate, golden):
            return Comparison(reason)
        ours, theirs = candidate.astype(np.float64), golden.astype(np.float64)
        lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
        products = (ours * theirs).sum(axis=-1)
        # A vector of zeros has no direction. It equals only another one.
        both_are_zero: Array = np.asarray(1.0 - (ours.any(axis=-1) | theirs.any(axis=-1)))
        cosines = np.divide(products, lengths, out=both_are_zero, where=lengths > 0)
        worst = float(cosines.min(initial=1.0))
        reason = _if(worst < self.min_cosine, f"min_cosine {worst:.4f}, expected at least {self.min_cosine:g}")
        return Comparison(reason, {"min_cosine": worst})


@dataclass(frozen=True, slots=True)
class LogitsValidator:
    """The same largest number in nearly every row, and small changes everywhere: for logits.

    max_delta: the largest change, as a share of the largest golden number. min_agreement: the share of rows along
    the last axis whose largest number has the same index.
    """

    max_delta: float
    min_agreement: float

    def compare(self, candidate: Array, golden: Array) -> Comparison:
        """Figures: max_delta; agreement, if rows have more than one number."""
        if reason := _unfit(candidate, golden):
            return Comparison(reason)
        ours, theirs = candidate.astype(np.float64), golden.astype(np.float64)
        scale = float(np.abs(theirs).max(initial=0.0)) or 1.0
        delta = float(np.abs(ours - theirs).max(initial=0.0)) / scale
        figures = {"max_delta": delta}
        reason = _if(delta > self.max_delta, f"max_delta {delta:.3g}, expected at most {self.max_delta:g}")
        if golden.ndim > 1 and golden.shape[-1] > 1 and golden.size:
            agreement = float((ours.argmax(axis=-1) == theirs.argmax(axis=-1)).mean())
            figures["agreement"] = agreement
            reason = reason or _if(
                agreement < self.min_agreement, f"agreement {agreement:.3f}, expected at least {self.min_agreement:g}"
            )
        return Comparison(reason, figures)


@dataclass(frozen=True, slots=True)
class ExactValidator:
    """Equal in nearly every element: for integers, booleans and text."""

    min_agreement: float = 1.0

    def compare(self, candidate: Array, golden: Array) -> Comparison:
        """Figures: agreement, the share of equal elements."""
        if candidate.shape != golden.shape:
            return Comparison(_wrong_shape(candidate, golden))
        agreement = float(np.mean(candidate == golden)) if golden.size else 1.0
        reason = _if(
            agreement < self.min_agreement, f"agreement {agreement:.3f}, expected at least {self.min_agreement:g}"
        )
        return Comparison(reason, {"agreement": agreement})


def same_precision_validators(outputs: Sequence[TensorSpec], tolerance: float) -> dict[str, Validator]:
    """For a candidate with the same number format. tolerance: both atol and rtol."""
    return {
        one.name: TensorValidator(tolerance, tolerance) if one.dtype.startswith("float") else ExactValidator()
        for one in outputs
    }


def changed_precision_validators(
    outputs: Sequence[TensorSpec], golden: Mapping[str, Array], *, is_int8: bool = False
) -> dict[str, Validator]:
    """For a candidate of lower precision, by the use of each output: rows of unit length are embeddings.

    is_int8: the logits of int8 candidates may change more. Embeddings may not: they are compared with stored ones.
    """
    delta, agreement = (_INT8_DELTA, _INT8_AGREEMENT) if is_int8 else (_REDUCED_DELTA, _REDUCED_AGREEMENT)
    validators: dict[str, Validator] = {}
    for one in outputs:
        if not one.dtype.startswith("float"):
            validators[one.name] = ExactValidator(agreement)
        elif _is_embedding(golden[one.name]):
            validators[one.name] = EmbeddingValidator()
        else:
            validators[one.name] = LogitsValidator(delta, agreement)
    return validators


def _is_embedding(values: Array) -> bool:
    if values.ndim < 2 or values.shape[-1] < 2 or not values.size or not np.isfinite(values).all():
        return False
    return bool((np.abs(np.linalg.norm(values, axis=-1) - 1) < _UNIT_LENGTH_WITHIN).all())


def _unfit(candidate: Array, golden: Array) -> str:
    if candidate.shape != golden.shape:
        return _wrong_shape(candidate, golden)
    return _if(not np.isfinite(candidate).all(), "contains NaN or infinity, expected finite numbers")


def _wrong_shape(candidate: Array, golden: Array) -> str:
    return f"shape {candidate.shape}, expected {golden.shape}"


def _if(is_wrong: bool, reason: str) -> str:
    return reason if is_wrong else ""
