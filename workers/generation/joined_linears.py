"""Linear layers of one input -> one product: a GPU reads a large weight at a higher rate than some small ones.

    q_proj, k_proj, v_proj of an attention -> one weight, of which each layer's weight is a part
    gate_proj, up_proj of a feed-forward   -> the same
    first of them that is called -> outputs of all; the others take theirs

The model's code stays as it is: it calls each layer. A layer that is called with another input computes for itself and
its neighbours, so a model that gives them different inputs is slower, and not wrong.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn.functional import linear

from penstock.workers.runtime.prepacked import is_plain

__all__ = ["JoinedLinear", "join_linears", "part_linears"]

_NEIGHBOURS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JoinedLinear(torch.nn.Linear):
    """A linear layer whose weight is a part of a larger one."""

    joined: _Joined
    place: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: (..., in_features) -> (..., out_features), a part of a wider tensor."""
        return self.joined.output(input, self.place)


class _Joined:
    """The weight of some layers, and their outputs for one input, until each is taken."""

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        self.weight: Final = torch.cat([one.weight.detach() for one in layers])
        has_bias = layers[0].bias is not None
        self.bias: Final = torch.cat([one.bias.detach() for one in layers]) if has_bias else None
        self.sizes: Final = [one.out_features for one in layers]
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, values: torch.Tensor, place: int) -> torch.Tensor:
        """values: (..., in_features) -> (..., out_features of the layer at this place)."""
        found = self._outputs[place] if values is self._input else None
        if found is None:
            outputs = linear(values, self.weight, self.bias).split_with_sizes(self.sizes, -1)
            found = outputs[place]
            self._input, self._outputs = values, [*outputs]
        self._outputs[place] = None
        if all(each is None for each in self._outputs):
            self._input = None
        return found


def join_linears(model: Any) -> int:
    """Changes the layers of a model in evaluation mode; their parameters become parts of the joined ones.

    Returns the number of joined weights.
    """
    number = 0
    for parent in model.modules():
        for names in _NEIGHBOURS:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if _are_alike(layers):
                _join(layers)
                number += 1
    return number


def part_linears(model: Any) -> None:
    """Makes joined layers plain linear layers again. Their weights remain parts of one tensor, with the same values."""
    for layer in model.modules():
        if type(layer) is JoinedLinear:
            layer.__class__ = torch.nn.Linear  # type: ignore[assignment] # it was one before
            for name in ("joined", "place"):
                del vars(layer)[name]


def _are_alike(layers: Sequence[Any]) -> bool:
    """Whether all are plain linear layers of one input size, dtype and device, each with its own weight."""
    if not all(type(one) is torch.nn.Linear and is_plain(one) for one in layers):
        return False
    kinds = {(one.in_features, one.weight.dtype, one.weight.device, one.bias is None) for one in layers}
    return len(kinds) == 1 and len({id(one.weight) for one in layers}) == len(layers)


def _join(layers: Sequence[torch.nn.Linear]) -> None:
    joined = _Joined(layers)
    weights = joined.weight.split_with_sizes(joined.sizes)
    biases = [None] * len(layers) if joined.bias is None else joined.bias.split_with_sizes(joined.sizes)
    for place, (layer, weight, bias) in enumerate(zip(layers, weights, biases, strict=True)):
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        # The same object: code of the model may hold the layer in a place where no child is looked for.
        vars(layer).update(joined=joined, place=place)
        layer.__class__ = JoinedLinear
