"""A compiled form: the library runs the shapes that it serves, and the module itself runs all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from penstock.workers.compilation.cuda_graphs import GraphReplays
from penstock.workers.runtime.compilable import Shapes
from penstock.workers.runtime.torch_device import sharing_weights

if TYPE_CHECKING:
    import torch

__all__ = ["Backend", "CompilationReport", "CompiledForward"]

Backend = Literal["inductor", "cudagraphs"]


@dataclass(frozen=True, slots=True)
class CompilationReport:
    """How a form was compiled.

    graph_breaks: those that dynamo found before the compilation. graphs: compiled graphs for all shapes together.
    compile_s: from the request until the form was checked. was_warm: whether a stored artefact was used.
    """

    backend: Backend
    graph_breaks: int
    graphs: int
    compile_s: float
    was_warm: bool
    memory_growth_mb: float


class CompiledForward:
    """Gives the same outputs as the module. For any thread, in inference mode. Never compiles."""

    def __init__(
        self, module: torch.nn.Module, shapes: Shapes, library: Callable[..., Any] | None, report: CompilationReport
    ) -> None:
        self.report = report
        self._module = module
        self._shapes = shapes
        self._library = library
        self._uncovered = count(1)
        self._uncovered_calls = 0

    @property
    def is_replayed(self) -> bool:
        """Whether CUDA graphs run it."""
        return self.report.backend == "cudagraphs"

    @property
    def made(self) -> dict[str, object]:
        """How it was made, as plain data."""
        return asdict(self.report)

    @property
    def uncovered_calls(self) -> int:
        """Calls with shapes beyond the examples, which the module ran."""
        return self._uncovered_calls

    @property
    def replays(self) -> int:
        """Calls that a CUDA graph ran."""
        return self._library.replays if isinstance(self._library, GraphReplays) else 0

    def counts(self) -> dict[str, int]:
        """See Counted: calls of shapes that the library does not serve, CUDA graphs, and their replays."""
        counts = {"uncovered_calls": self._uncovered_calls}
        if isinstance(self._library, GraphReplays):
            counts |= {"cuda_graphs": self._library.graphs, "replays": self._library.replays}
        return counts

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """The module's outputs for these tensors. Raises the errors of the device."""
        library = self._library
        if library is not None and self._shapes.cover(tensors):
            # The code was compiled for contiguous inputs and would misread others.
            return library(*(tensor.contiguous() for tensor in tensors))
        self._uncovered_calls = next(self._uncovered)
        return self._module(*tensors)

    def beside(self) -> CompiledForward:
        """See CompiledModule. Both share the library."""
        return CompiledForward(sharing_weights(self._module), self._shapes, self._library, self.report)

    def close(self) -> None:
        """Releases the library once the calls under way have returned. The module runs later calls."""
        self._library = None
