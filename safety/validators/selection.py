"""A model's outputs -> the workload of each one -> the built-in validators with the limits of the occasion.

same precision     every element within the tolerance; text and integers exactly
other precision    by workload: the direction of embeddings, the ranking and size of logits
shadow, canary     by workload, with the validators' own limits; see validator_registry.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

import numpy as np

from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import Array
from penstock.safety.validators.builtin import (
    ClassifierValidator,
    EmbeddingValidator,
    EncoderValidator,
    ExactValidator,
    GenerationValidator,
    RerankerValidator,
    TensorValidator,
)
from penstock.safety.validators.comparison import Validator

__all__ = [
    "BUILT_IN",
    "WORKLOADS",
    "Workload",
    "changed_precision_validators",
    "same_precision_validators",
    "workload_of",
]

Workload = Literal["embedding", "classifier", "reranker", "generation", "encoder", "exact"]
WORKLOADS: Final[tuple[Workload, ...]] = get_args(Workload)
"""`exact`: integers, booleans and labels, which have no other use."""

BUILT_IN: Final[Mapping[str, Validator]] = {
    "embedding": EmbeddingValidator(),
    "classifier": ClassifierValidator(),
    "reranker": RerankerValidator(),
    "generation": GenerationValidator(),
    "encoder": EncoderValidator(),
    "exact": ExactValidator(0.99),
}
"""The validator of each workload, with limits for a candidate that need not be equal."""

_OF_TASKS: Final[Mapping[str, Workload]] = {
    "text-generation": "generation",
    "text2text-generation": "generation",
    "summarization": "generation",
    "translation": "generation",
    "text-ranking": "reranker",
}
"""The workload of a pipeline's task, where the outputs do not tell it."""
_UNIT_LENGTH_WITHIN: Final = 1e-3
"""Rows whose length differs less from 1 are embeddings: the rows of logits do not all have unit length."""
_REDUCED_DELTA: Final = 0.02
_REDUCED_AGREEMENT: Final = 0.99
_INT8_DELTA: Final = 0.1
_INT8_AGREEMENT: Final = 0.98


def workload_of(output: TensorSpec, expected: Array, task: str | None = None) -> Workload:
    """The use of an output, by the task of its model and by its numbers.

    Rows of unit length are embeddings, three axes are hidden states, other floats are logits. A model of another kind
    has a validator registered under its name.
    """
    if task is not None and task in _OF_TASKS:
        # The scores of a reranker are floats; generated tokens and texts are not.
        workload = _OF_TASKS[task]
        if (workload == "reranker") == output.dtype.startswith("float"):
            return workload
    if not output.dtype.startswith("float"):
        return "exact"
    if _is_embedding(expected):
        return "embedding"
    return "encoder" if expected.ndim > 2 else "classifier"


def same_precision_validators(outputs: Sequence[TensorSpec], tolerance: float) -> dict[str, Validator]:
    """For a candidate with the same number format. tolerance: both atol and rtol."""
    return {
        one.name: TensorValidator(tolerance, tolerance) if one.dtype.startswith("float") else ExactValidator()
        for one in outputs
    }


def changed_precision_validators(
    outputs: Sequence[TensorSpec], expected: Mapping[str, Array], *, is_int8: bool = False
) -> dict[str, Validator]:
    """For a candidate of lower precision, by the use of each output: rows of unit length are embeddings.

    is_int8: the logits of int8 candidates may change more. Embeddings may not: they are compared with stored ones.
    """
    delta, agreement = (_INT8_DELTA, _INT8_AGREEMENT) if is_int8 else (_REDUCED_DELTA, _REDUCED_AGREEMENT)
    validators: dict[str, Validator] = {}
    for one in outputs:
        if not one.dtype.startswith("float"):
            validators[one.name] = ExactValidator(agreement)
        elif _is_embedding(expected[one.name]):
            validators[one.name] = EmbeddingValidator()
        else:
            validators[one.name] = ClassifierValidator(delta, agreement)
    return validators


def _is_embedding(values: Array) -> bool:
    if values.ndim < 2 or values.shape[-1] < 2 or not values.size or not np.isfinite(values).all():
        return False
    return bool((np.abs(np.linalg.norm(values, axis=-1) - 1) < _UNIT_LENGTH_WITHIN).all())
