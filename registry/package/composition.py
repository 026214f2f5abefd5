"""A pipeline's declaration and those of its steps -> the spec that is served. Pure: no file is read here.

    ModelSpec of the pipeline + ModelSpec of each step -> composed: tensors fit from step to step -> ModelSpec

A tensor may change its dtype between two steps by the rule of registry/package/conversion.py: numbers to numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.registry.package.signature import TensorSpec, shape_text
from penstock.registry.package.spec import PIPELINE, ModelSpec
from penstock.registry.package.steps import Step
from penstock.registry.tensors import DTYPES

__all__ = ["composed"]

_NUMBERS: Final = "iuf"
"""The kinds of dtypes that conversion.py converts into each other."""


def composed(pipeline: ModelSpec, steps: Sequence[ModelSpec]) -> ModelSpec:
    """The pipeline's spec with the limits of its steps. `steps` are in the order of `pipeline.steps`.

    max_batch_size: the smallest of the steps, unless the pipeline has its own. memory_mb: their sum, likewise.
    deterministic: where every step is. Raises ValueError with the field for steps that do not fit each other.
    """
    declared = pipeline.steps or ()
    known = {tensor.name: tensor for tensor in pipeline.inputs}
    for number, (step, spec) in enumerate(zip(declared, steps, strict=True)):
        _check_kind(f"steps[{number}].package", step, spec)
        _check_inputs(f"steps[{number}].inputs", step, spec, known)
        known |= _outputs(f"steps[{number}].outputs", step, spec)
    for tensor in pipeline.outputs:
        _check_fit(f"outputs: {tensor.name}", known[tensor.name], tensor, "the pipeline")
    return pipeline.model_copy(update=_limits(pipeline, steps))


def _check_kind(where: str, step: Step, spec: ModelSpec) -> None:
    if spec.format == PIPELINE:
        raise ValueError(f"{where}: found {step.package!r:.80}, a pipeline itself, expected another format")
    if spec.streams:
        raise ValueError(f"{where}: found {step.package!r:.80}, which streams, expected a package without streams")


def _check_inputs(where: str, step: Step, spec: ModelSpec, known: Mapping[str, TensorSpec]) -> None:
    takes = {tensor.name: tensor for tensor in spec.inputs}
    _check_known(where, step.inputs, takes, step)
    for name, tensor in takes.items():
        if name not in step.inputs:
            if not tensor.optional:
                raise ValueError(f"{where}.{name}: missing, expected a value for each input of {step.package}")
            continue
        found = known[step.inputs[name]]
        if found.optional and not tensor.optional:
            raise ValueError(
                f"{where}.{name}: found {found.name!r}, which jobs may omit, expected an input of every job as "
                f"{step.package} declares"
            )
        _check_fit(f"{where}.{name}", found, tensor, step.package)


def _outputs(where: str, step: Step, spec: ModelSpec) -> dict[str, TensorSpec]:
    """The outputs of a step under their names in the pipeline. Raises ValueError."""
    makes = {tensor.name: tensor for tensor in spec.outputs}
    _check_known(where, step.outputs, makes, step)
    return {name: makes[own].model_copy(update={"name": name}) for own, name in step.outputs.items()}


def _check_known(where: str, named: Iterable[str], declared: Mapping[str, TensorSpec], step: Step) -> None:
    for name in named:
        if name not in declared:
            raise ValueError(
                f"{where}.{name}: unknown name, expected one of {step.package}: {', '.join(declared) or 'none'}"
            )


def _check_fit(where: str, found: TensorSpec, wanted: TensorSpec, package: str) -> None:
    kinds = {DTYPES[found.dtype].kind, DTYPES[wanted.dtype].kind}
    if found.dtype != wanted.dtype and not kinds.issubset(_NUMBERS):
        raise ValueError(
            f"{where}: found {found.name} of dtype {found.dtype}, expected {wanted.dtype} as {package} declares"
        )
    fits = len(found.shape) == len(wanted.shape) and all(
        isinstance(extent, str) or isinstance(other, str) or extent == other
        for extent, other in zip(found.shape, wanted.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{where}: found {found.name} of shape {shape_text(found.shape)}, expected {shape_text(wanted.shape)} as "
            f"{package} declares"
        )


def _limits(pipeline: ModelSpec, steps: Sequence[ModelSpec]) -> dict[str, Any]:
    """The fields of the pipeline that depend on its steps. Raises ValueError."""
    own = pipeline.batching
    named = zip(pipeline.steps or (), steps, strict=True)
    limits = {step.package: spec.batching.max_batch_size for step, spec in named if spec.batching.max_batch_size}
    least, package = min(((most, path) for path, most in limits.items()), default=(0, ""))
    if least and own.max_batch_size > least:
        raise ValueError(
            f"batching.max_batch_size: found {own.max_batch_size}, expected at most {least} as {package} declares"
        )
    memory_mb = sum(spec.memory_mb or 0 for spec in steps)
    return {
        "batching": own.model_copy(update={"max_batch_size": own.max_batch_size or least}),
        "memory_mb": pipeline.memory_mb or memory_mb or None,
        "deterministic": pipeline.deterministic and all(spec.deterministic for spec in steps),
    }
