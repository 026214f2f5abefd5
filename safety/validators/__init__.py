"""Validators: a candidate's output and the expected one -> figures, limits, a verdict.

comparison   Verdict, Figure, Comparison, and the interface Validator
builtin      one validator for each workload
selection    which validator judges which output
"""

from __future__ import annotations

from penstock.safety.validators.builtin import (
    ClassifierValidator,
    EmbeddingValidator,
    EncoderValidator,
    ExactValidator,
    GenerationValidator,
    RerankerValidator,
    TensorValidator,
)
from penstock.safety.validators.comparison import Comparison, Figure, Validator, Verdict, WorseSide
from penstock.safety.validators.selection import (
    BUILT_IN,
    WORKLOADS,
    Workload,
    changed_precision_validators,
    same_precision_validators,
    workload_of,
)

__all__ = [
    "BUILT_IN",
    "ClassifierValidator",
    "Comparison",
    "EmbeddingValidator",
    "EncoderValidator",
    "ExactValidator",
    "Figure",
    "GenerationValidator",
    "RerankerValidator",
    "TensorValidator",
    "Validator",
    "Verdict",
    "WORKLOADS",
    "Workload",
    "WorseSide",
    "changed_precision_validators",
    "same_precision_validators",
    "workload_of",
]
