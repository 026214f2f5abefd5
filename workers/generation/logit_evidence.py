"""Logits of a form and of the plain model over the same tokens -> evidence for the gate.

Importing this module imports torch.
"""

from __future__ import annotations

from typing import Final

import torch

from penstock.safety.orchestrator import GateEvidence

__all__ = ["logit_evidence"]

_MOST_DIFFERENCES: Final = {torch.float32: 1e-3, torch.bfloat16: 0.045}
"""Of a row of logits, by its length: what a cosine of 0.999 allows in bf16, and far more than rounding in fp32."""


def logit_evidence(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> GateEvidence:
    """found, expected: (S, V) of the form and of the plain model. dtype: of the weights.

    Speaks against the form where a row differs by more than rounding. Rows with NaN differ.
    """
    lengths = torch.linalg.vector_norm(expected, dim=-1)
    differences = torch.linalg.vector_norm(found - expected, dim=-1)
    most = _MOST_DIFFERENCES.get(dtype, 0.0)
    alike = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
    # Equal rows of zeros are equal.
    difference = float(torch.where(differences == 0, 0.0, differences / lengths).max())
    problems: tuple[str, ...] = ()
    if not difference <= most:
        problems = (f"a row of logits differs by {difference:.3g} of its length, expected at most {most:g}",)
    figures = {"logits_difference": difference, "token_agreement": alike, "rows": float(len(expected))}
    return GateEvidence(problems, figures=figures)
