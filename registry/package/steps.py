"""The section `steps` of a pipeline's model.yaml: which packages run, in which order, on which tensors. Pure.

    steps -> check_names: every name is made before it is used, once, and is used

registry/package/composition.py compares the steps with the declarations of their packages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Final

from pydantic import Field

from penstock.registry.package.signature import TensorName
from penstock.registry.package.spec_sections import InsidePath, Section

__all__ = ["MAX_STEPS", "Step", "check_names"]

MAX_STEPS: Final = 64


class Step(Section):
    """One step of a pipeline: a package, the names of its inputs, and names for its outputs."""

    package: InsidePath
    """The folder of the step's package inside the pipeline's folder."""
    inputs: Annotated[dict[TensorName, TensorName], Field(min_length=1)]
    """Input of the step -> the input of the pipeline, or the output of an earlier step, that it takes."""
    outputs: Annotated[dict[TensorName, TensorName], Field(min_length=1)]
    """Output of the step -> its name in the pipeline. Outputs without a name are dropped."""


def check_names(steps: Sequence[Step], inputs: Collection[str], outputs: Collection[str]) -> None:
    """Raises ValueError unless each name has one origin before its first use, and each step has a use.

    inputs, outputs: the names of the pipeline's own.
    """
    origin = _origins(steps, inputs)
    known = list(inputs)
    for number, step in enumerate(steps):
        for own, name in step.inputs.items():
            if name not in known:
                maker = origin.get(name)
                later = f", which {_maker_text(maker, number)} makes" if maker is not None else ""
                raise ValueError(
                    f"steps[{number}].inputs.{own}: found {name!r:.80}{later}, expected an input of the pipeline or an "
                    f"output of an earlier step: {', '.join(known)}"
                )
        known += step.outputs.values()
    made = [name for step in steps for name in step.outputs.values()]
    for name in outputs:
        if name not in made:
            raise ValueError(f"outputs: {name}: found no step that makes it, expected one of: {', '.join(made)}")
    _check_uses(steps, inputs, outputs)


def _origins(steps: Sequence[Step], inputs: Collection[str]) -> dict[str, int | None]:
    """The number of the step that makes each name; None for an input. Raises ValueError for a name that has two."""
    origin: dict[str, int | None] = dict.fromkeys(inputs)
    for number, step in enumerate(steps):
        for own, name in step.outputs.items():
            if name in origin:
                maker = origin[name]
                first = "an input of the pipeline" if maker is None else f"made by {_maker_text(maker, number)}"
                raise ValueError(
                    f"steps[{number}].outputs.{own}: found {name!r:.80}, which is {first} already, expected a new name"
                )
            origin[name] = number
    return origin


def _maker_text(maker: int, reader: int) -> str:
    return "the same step" if maker == reader else f"steps[{maker}]"


def _check_uses(steps: Sequence[Step], inputs: Collection[str], outputs: Collection[str]) -> None:
    """Raises ValueError for a step whose outputs, or an input that, nothing takes."""
    used = {name for step in steps for name in step.inputs.values()}
    for name in inputs:
        if name not in used:
            raise ValueError(f"inputs: {name}: found no step that takes it, expected one, or no such input")
    for number, step in enumerate(steps):
        if used.union(outputs).isdisjoint(step.outputs.values()):
            raise ValueError(
                f"steps[{number}]: found no use of {', '.join(step.outputs.values())}, expected a later step or an "
                "output of the pipeline that takes it"
            )
