"""A torch module -> its linear layers with weights in the layout that oneDNN multiplies, erf GELU computed with them.

    copy of the module -> each plain nn.Linear -> PrepackedLinear, its weight packed once
                            '- only a GELU reads its output -> PrepackedLinear computes both, the GELU passes it on

The arithmetic is the same; sums are rounded in another order. The operators of torch are private. So they are used only
where they exist and gave right outputs in this process. A layer computes as nn.Linear does whenever a call is not one
that was packed for.

Measured with MiniLM in fp32, one thread, CPU time, 32 sentences of 32 tokens against the eager model: 1.27 times as
fast on an AMD EPYC, 0.9 to 1.2 times on a busy Intel Xeon, where MKL comes near the limit of the units. So a trial
decides. The build takes 0.1 s. Below 8 rows MKL was as fast or faster on dense weights.

Importing this module imports torch. Only a loaded torch model imports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

import torch
from torch.nn.functional import gelu, linear

from penstock.workers.runtime.compilable import CompilationRefused

__all__ = [
    "MOST_PACKED_BYTES",
    "PackedFailure",
    "Packing",
    "PrepackedLinear",
    "can_prepack",
    "is_exact_gelu",
    "is_plain",
    "pack_linears",
    "packable",
    "prepack",
    "unpack",
]

_DTYPES: Final = (torch.float32, torch.bfloat16)
_LEAST_ROWS: Final = 8
_PACKED_FOR_ROWS: Final = 256
"""The rows of the calls that oneDNN chooses the layout for. Calls of 64 to 4,096 rows were as fast by it."""
MOST_PACKED_BYTES: Final = 500_000_000
"""More packed weights are refused: as much growth as TorchCompileSafetyMonitor allows a compiled form."""
_PROBE_TOLERANCE: Final = 0.05
"""bf16 has 8 bits. An operator with another meaning differs by more from outputs of about 1."""


class PackedFailure(RuntimeError):
    """The operator of packed weights failed. The layer would compute the same with its dense weight."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What `prepack` did to a module. nbytes: of packed weights, beside the module's own."""

    layers: int
    activations: int
    nbytes: int

    @property
    def made(self) -> dict[str, object]:
        """How the form was made, as plain data."""
        return {
            "packed_layers": self.layers,
            "fused_activations": self.activations,
            "memory_growth_mb": self.nbytes / 1e6,
        }


class _Packed:
    """One weight in oneDNN's layout. Nothing changes it, so copies of a module share it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.source: Final = weight
        self.version: Final = weight._version
        self.weight: Final = _packed(weight.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Packed:
        return self


class PrepackedLinear(torch.nn.Linear):
    """A linear layer that multiplies by packed weights, and may apply the exact GELU to its outputs.

    `prepack` makes it of an nn.Linear. It keeps that layer's weight and bias.
    """

    packed: _Packed
    has_gelu: bool
    least_rows: int = _LEAST_ROWS
    """Calls of fewer rows compute with the dense weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: (..., in_features) -> (..., out_features). Raises PackedFailure."""
        if self._is_packed_for(input):
            try:
                return _multiply(input, self.packed.weight, self.bias, has_gelu=self.has_gelu)
            except (AttributeError, RuntimeError, TypeError) as error:
                # The operators are private: these are the errors of others of their name, and of a broken weight.
                raise PackedFailure(str(error)) from error
        outputs = super().forward(input)
        return gelu(outputs) if self.has_gelu else outputs

    def _is_packed_for(self, values: torch.Tensor) -> bool:
        """Whether the packed weight gives the layer's outputs for these values, and does not take longer."""
        weight, packed = self.weight, self.packed
        return (
            type(values) is torch.Tensor
            and values.dtype == weight.dtype
            and values.device == weight.device
            and values.layout == torch.strided
            and values.dim() > 1
            and values.shape[-1] == self.in_features
            and values.numel() >= self.least_rows * self.in_features
            # The model's own code may replace or change a weight.
            and weight is packed.source
            and weight._version == packed.version
            # The operator has no gradient, and no place in an autocast.
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )


def can_prepack(module: torch.nn.Module) -> bool:
    """Whether the module has a linear layer that can be packed in this process."""
    return any(_has_operators(one.weight.dtype) for one in _linears(module))


def prepack(module: torch.nn.Module) -> Packing:
    """Packs the linear layers of a module in evaluation mode. The module is changed, so it is a copy for this form.

    A layer remains as it is where it is a subclass, has hooks, is in training or lies on a GPU. Weights that layers
    share are packed once. Raises CompilationRefused where no layer can be packed, or the packed weights are too large.
    """
    linears = packable(module)
    nbytes = sum(weight.nbytes for weight in {id(one.weight): one.weight for one in linears}.values())
    if not linears:
        raise CompilationRefused("Found no linear layer that can be packed, expected one in fp32 or bf16 on a CPU")
    if nbytes > MOST_PACKED_BYTES:
        raise CompilationRefused(
            f"The packed weights would take {nbytes / 1e6:.0f} MB, expected at most {MOST_PACKED_BYTES / 1e6:.0f}"
        )
    pack_linears(linears)
    pairs = list(_pairs(module))
    for parent, layer, activation in pairs:
        vars(parent.get_submodule(layer)).update(has_gelu=True)
        parent.set_submodule(activation, torch.nn.Identity())
    return Packing(len(linears), len(pairs), nbytes)


def packable(module: torch.nn.Module) -> list[torch.nn.Linear]:
    """The layers that `prepack` packs; none where torch has no operators for them."""
    return [one for one in _linears(module) if _has_operators(one.weight.dtype)]


def pack_linears(linears: Sequence[torch.nn.Linear]) -> list[PrepackedLinear]:
    """Packs layers of `packable`, without activations. Weights that they share are packed once."""
    packed = {key: _Packed(weight) for key, weight in {id(one.weight): one.weight for one in linears}.items()}
    made = []
    for one in linears:
        # The same object: code of the module may hold the layer in a place where no child is looked for.
        vars(one).update(packed=packed[id(one.weight)], has_gelu=False)
        one.__class__ = PrepackedLinear
        made.append(cast(PrepackedLinear, one))
    return made


def unpack(layer: PrepackedLinear) -> None:
    """Makes it the nn.Linear again that it was before `pack_linears`."""
    layer.__class__ = torch.nn.Linear  # type: ignore[assignment]
    for name in ("packed", "has_gelu", "least_rows"):
        vars(layer).pop(name, None)


def _linears(module: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """The layers that compute what nn.Linear does and nothing more, each once."""
    return (one for one in module.modules() if type(one) is torch.nn.Linear and is_plain(one) and _is_packable(one))


def is_plain(module: torch.nn.Module) -> bool:
    """Whether a call of the module is one call of its class's `forward`."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not any(hooks) and not module.training and "forward" not in vars(module)


def _is_packable(layer: torch.nn.Linear) -> bool:
    """Whether weight and bias are ordinary parameters on the CPU, of one dtype that the operators know."""
    weight, bias = layer.weight, layer.bias
    parameters = [weight] if bias is None else [weight, bias]
    return (
        weight.dtype in _DTYPES
        and weight.numel() > 0
        and all(
            type(one) is torch.nn.Parameter
            and one.dtype == weight.dtype
            and one.device.type == "cpu"
            and one.layout == torch.strided
            # An inference tensor does not count its changes.
            and not one.is_inference()
            for one in parameters
        )
    )


# Activations


class _Token:
    """Stands for a tensor: code can pass it on, and fails if it does anything else with it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    given: _Token
    returned: _Token


class _Recorder(torch.nn.Module):
    """Stands for a child of a module, and notes its calls."""

    def __init__(self, name: str, calls: list[_Call]) -> None:
        super().__init__()
        self._child = name
        self._calls = calls

    def forward(self, given: _Token) -> _Token:
        self._calls.append(_Call(self._child, given, _Token()))
        return self._calls[-1].returned


def _pairs(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str]]:
    """(parent, packed layer, GELU) where the GELU is all that reads the layer's output."""
    registered = Counter(id(one) for _, one in module.named_modules(remove_duplicate=False))
    for parent in module.modules():
        children = {name: child for name, child in parent._modules.items() if child is not None}
        layers = {name for name, one in children.items() if type(one) is PrepackedLinear and registered[id(one)] == 1}
        activations = {name for name, child in children.items() if is_exact_gelu(child)}
        if layers and activations:
            for layer, activation in _neighbours(parent):
                if layer in layers and activation in activations:
                    yield parent, layer, activation


def _neighbours(parent: torch.nn.Module) -> list[tuple[str, str]]:
    """Children that are called once, of which the second reads what the first returns, and nothing else reads it.

    The parent's own `forward` shows it: it runs with tokens in place of tensors, and recorders in place of children.
    None are found where it does anything but call children.
    """
    calls: list[_Call] = []
    if "forward" in vars(parent) or type(parent).__call__ is not torch.nn.Module.__call__:
        return []
    probe = object.__new__(type(parent))
    vars(probe).update(vars(parent), _modules={name: _Recorder(name, calls) for name in parent._modules})
    result: object = None
    with suppress(Exception):
        result = probe.forward(_Token())
    if not isinstance(result, _Token):
        return []
    times = Counter(call.name for call in calls)
    readers = Counter([id(result), *(id(call.given) for call in calls)])
    return [
        (first.name, second.name)
        for first in calls
        for second in calls
        if second.given is first.returned
        and readers[id(first.returned)] == 1
        and times[first.name] == times[second.name] == 1
    ]


def is_exact_gelu(module: torch.nn.Module) -> bool:
    """Whether the module computes GELU by the error function: torch's own, or the class that transformers uses."""
    if not is_plain(module):
        return False
    if type(module) is torch.nn.GELU:
        return module.approximate == "none"
    kind = type(module)
    is_transformers = (kind.__module__, kind.__qualname__) == ("transformers.activations", "GELUActivation")
    return is_transformers and getattr(module, "act", None) is gelu


# Operators


@cache
def _has_operators(dtype: torch.dtype) -> bool:
    """Whether torch has the operators here, and they compute a linear layer in this dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    rows = torch.linspace(-1, 1, 2 * _LEAST_ROWS * 16).reshape(-1, 16).to(dtype)
    weight = torch.linspace(1, -1, 32 * 16).reshape(32, 16).sin().to(dtype)
    bias = torch.linspace(-1, 1, 32).to(dtype)
    expected = linear(rows, weight, bias)
    try:
        with torch.inference_mode():
            packed = _packed(weight)
            found = [_multiply(rows, packed, bias, has_gelu=has_gelu) for has_gelu in (False, True)]
            found.append(_multiply(rows, packed, None, has_gelu=False) + bias)
    except (AttributeError, RuntimeError, TypeError):
        # They are private: another version of torch may have removed or changed them.
        return False
    wanted = [expected, gelu(expected), expected]
    return all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.allclose(one, other, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE)
        for one, other in zip(found, wanted, strict=True)
    )


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """weight: (out_features, in_features) -> the same numbers in a layout that only `_multiply` reads."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _multiply(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, *, has_gelu: bool) -> torch.Tensor:
    """rows: (..., in_features) -> (..., out_features)."""
    post_op, algorithm = ("gelu", "none") if has_gelu else ("none", "")
    outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, post_op, [], algorithm)
    return outputs
