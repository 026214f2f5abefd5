"""A torch module -> its file in a package: TorchScript, or safetensors. The caller's module stays unchanged.

A script is compiled from the module's source. A module that cannot be compiled is traced, unless the trace depends on
the values of its example. The file is compared with the module on inputs of other sizes before it is used.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.registry.errors import ConfigurationError, MissingRequirement
from penstock.registry.package.signature import Signature, TensorSpec
from penstock.registry.tensors import Array

__all__ = ["save_built", "save_script"]

_WITH_BUILD = "expected a module that TorchScript can hold, or build=, a function that makes the module"


def save_built(module: Any, folder: Path) -> None:
    """Writes the weights of a module as model.safetensors."""
    try:
        from safetensors.torch import save_model
    except ImportError:
        raise MissingRequirement("safetensors is not installed. Expected: pip install '.[torch]'") from None
    save_model(copy.deepcopy(module).cpu(), str(folder / "model.safetensors"))


def save_script(module: Any, signature: Mapping[str, Any], folder: Path) -> None:
    """Writes a module as model.pt. Raises ConfigurationError when TorchScript cannot hold it."""
    import torch

    own = copy.deepcopy(module).cpu().eval()
    inputs_of, outputs_of = (tuple(map(TensorSpec.model_validate, signature[kind])) for kind in ("inputs", "outputs"))
    declared = Signature(inputs_of, outputs_of)
    script = own if isinstance(own, torch.jit.ScriptModule) else _scripted(own, declared)
    for rows, length in ((1, 3), (3, 5)):
        inputs = _tensors(declared, rows, length)
        with torch.inference_mode():
            for wanted, found in zip(_flat(own(*inputs)), _flat(script(*inputs)), strict=True):
                if wanted.shape != found.shape or not torch.allclose(wanted, found, 1e-4, 1e-5, equal_nan=True):
                    raise ConfigurationError(
                        f"{type(module).__name__}: its TorchScript gives other outputs for {rows} rows, {_WITH_BUILD}"
                    )
    script.save(str(folder / "model.pt"))


def _scripted(module: Any, declared: Signature) -> Any:
    import torch

    # Warnings are kept: torch asks its users to leave TorchScript, and tells what a trace does not hold.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            return torch.jit.script(module)
        except Exception:  # the compiler raises many classes of errors
            traced = _traced(module, _tensors(declared, 2, 4))
    if any(one.category.__name__ == "TracerWarning" for one in told):
        raise ConfigurationError(
            f"{type(module).__name__}: its trace depends on the values of the example, {_WITH_BUILD}"
        )
    return traced


def _traced(module: Any, inputs: tuple[Any, ...]) -> Any:
    import torch

    trace: Any = torch.jit.trace
    try:
        with torch.inference_mode():
            return trace(module, inputs, check_trace=False)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"{type(module).__name__}: cannot be traced ({type(error).__name__}: {reason:.120}), {_WITH_BUILD}"
        ) from None


def _tensors(declared: Signature, rows: int, length: int) -> tuple[Any, ...]:
    """Inputs by position: random floats, and for other dtypes the examples of the signature."""
    import torch

    chance = np.random.default_rng(0)
    given = declared.example(rows, length)

    def filled(spec: TensorSpec, values: Array) -> Array:
        if values.dtype.kind != "f" or spec.min is not None or spec.max is not None:
            return values
        return chance.standard_normal(values.shape).astype(values.dtype)

    return tuple(torch.from_numpy(filled(spec, given[spec.name])) for spec in declared.inputs if not spec.optional)


def _flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, Mapping):
        return [outputs[name] for name in sorted(outputs)]
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]
