"""A compiled forward -> the same forward, replayed as a CUDA graph: one launch instead of one for each kernel.

A graph is captured when a combination of shapes first comes, on the thread of that call. Any thread may replay it. The
graphs of torch.compile cannot do that: they belong to the thread that compiled.
See https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

__all__ = ["GraphReplays"]

_MOST_GRAPHS: Final = 64
_WARM_UP_CALLS: Final = 2
_capturing: Final = threading.Lock()
"""A capture begins with a wait for the device, which breaks another capture under way."""


class GraphReplays:
    """Replays `forward` on one CUDA device. Beyond `most_graphs`, further shapes run without a graph."""

    def __init__(self, forward: Callable[..., Any], device: torch.device, most_graphs: int = _MOST_GRAPHS) -> None:
        self.replays = 0
        """Calls that a replay answered."""
        self._forward = forward
        self._device = device
        self._most_graphs = most_graphs
        self._captured: dict[tuple[torch.Size, ...], _Captured] = {}
        self._pool: Any = None
        """The memory pool of all graphs. They are replayed one at a time, and their outputs are copied."""
        # A graph has one set of inputs and outputs.
        self._lock = threading.Lock()

    @property
    def graphs(self) -> int:
        """Combinations of shapes that have a graph."""
        return len(self._captured)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """A copy of the outputs of `forward`."""
        shapes = tuple(tensor.shape for tensor in tensors)
        with self._lock:
            captured = self._captured.get(shapes)
            if captured is None:
                if len(self._captured) >= self._most_graphs:
                    return self._forward(*tensors)
                captured = _Captured(self._forward, tensors, self._device, self._pool)
                self._captured[shapes], self._pool = captured, captured.pool
            self.replays += 1
            return captured.replay(tensors)


class _Captured:
    """The graph of one combination of shapes."""

    def __init__(
        self, forward: Callable[..., Any], tensors: tuple[torch.Tensor, ...], device: torch.device, pool: Any
    ) -> None:
        import torch
        from torch.utils import _pytree

        self._map = _pytree.tree_map
        self._inputs = [tensor.clone() for tensor in tensors]
        self._graph = torch.cuda.CUDAGraph()
        # A failed capture leaves its stream as the current one, so the other stream is restored here.
        with _capturing, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            # The allocations and choices of a first call must come before the capture.
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_CALLS):
                    forward(*self._inputs)
            torch.cuda.current_stream().wait_stream(side)
            # Other threads use the device meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._outputs = forward(*self._inputs)
        self.pool = self._graph.pool()
        """The memory pool of the graph."""

    def replay(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The outputs for these inputs, copied before the next replay overwrites them."""
        for kept, given in zip(self._inputs, tensors, strict=True):
            kept.copy_(given)
        self._graph.replay()
        return self._map(lambda output: output.clone(), self._outputs)
