"""Whether two versions of a model answer the same jobs: their inputs and outputs, name by name."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import TensorSpec

__all__ = ["signature_difference"]


def signature_difference(candidate: ModelSpec, served: ModelSpec) -> str:
    """The first difference of inputs or outputs, as a message; empty: there is none.

    Names, dtypes and shapes are compared, and whether an input is optional. The order of tensors does not matter.
    """
    for side, ours, theirs in (
        ("input", candidate.inputs, served.inputs),
        ("output", candidate.outputs, served.outputs),
    ):
        if difference := _difference(side, ours, theirs):
            return f"{difference}, as {served.reference} has"
    if candidate.streams != served.streams:
        return f"streams: found {candidate.streams}, expected {served.streams}"
    return ""


def _difference(side: str, ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str:
    own, expected = {one.name: _kind(one) for one in ours}, {one.name: _kind(one) for one in theirs}
    for name, kind in expected.items():
        if name not in own:
            return f"{side} {name}: missing, expected {kind}"
        if own[name] != kind:
            return f"{side} {name}: found {own[name]}, expected {kind}"
    extra = [name for name in own if name not in expected]
    return f"{side} {extra[0]}: found {own[extra[0]]}, expected no such {side}" if extra else ""


def _kind(one: TensorSpec) -> str:
    shape = ", ".join(map(str, one.shape))
    return f"{'optional ' if one.optional else ''}{one.dtype} ({shape})"
