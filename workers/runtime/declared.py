"""A module whose answers come in whatever form -> one that returns a tuple in the order of the declared outputs.

Importing this module imports torch; an export does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

__all__ = ["Declared"]


class Declared(torch.nn.Module):
    """Calls a module, and sorts its answer: a tensor, a sequence, or a mapping by the names of its outputs."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._names = tuple(names)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One tensor for each name."""
        answer = self.module(*inputs)
        if isinstance(answer, Mapping):
            return tuple(answer[name] for name in self._names)
        return tuple(answer) if isinstance(answer, Sequence) else (answer,)
