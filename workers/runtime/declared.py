"""A module with outputs in any structure -> a module that returns a tuple in the order of the declared outputs.

Importing this module imports torch. Only an export imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

__all__ = ["Declared"]


class Declared(torch.nn.Module):
    """Calls a module and orders its outputs: a tensor, a sequence, or a mapping by the names of the outputs."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._names = tuple(names)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One tensor for each name."""
        outputs = self.module(*inputs)
        if isinstance(outputs, Mapping):
            return tuple(outputs[name] for name in self._names)
        return tuple(outputs) if isinstance(outputs, Sequence) else (outputs,)
