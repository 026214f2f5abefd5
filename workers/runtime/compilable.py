"""What a compiler needs to know of a loaded model: its module, and the shapes that one compiled graph serves.

    runtime.compilable(form) -> Compilable: a module with examples -> Shapes: the extents that the examples span
    ModelCompiler.compile(runtime, form) -> CompiledModule

A dimension whose extent differs between the examples is dynamic. One graph serves every extent from the smallest to the
largest of them. So there is one graph, whatever jobs come, and no thread that serves ever compiles.

Measured with MiniLM and torch 2.13 on a CPU: `torch.compile(dynamic=True)` made four graphs in 59 s for the five shapes
32x32, 8x16, 1x128, 1x8, 32x1, because it specialises on 1 and on extents that are equal by chance. A graph exported
with both dimensions marked dynamic served all five.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.registry.package import Package
from penstock.registry.package.spec_sections import Precision

if TYPE_CHECKING:
    import torch

__all__ = [
    "Compilable",
    "CompilableRuntime",
    "CompilationRefused",
    "CompiledModule",
    "ModelCompiler",
    "Shapes",
    "Span",
]

_LEAST_TRACED: Final = 2
"""Tracing with an extent of 0 or 1 yields a graph for that extent alone."""


class CompilationRefused(Exception):
    """There is no compiled form, and the text says why. The model keeps the form that it has."""


@dataclass(frozen=True, slots=True)
class Compilable:
    """A module, and inputs for the corners of the shapes that it serves.

    module: called with positional tensors that are on its device. It computes the same as the runtime's form, and has
    the same parameter names whenever it is made from the same package. examples: at least one has every dynamic
    dimension at 2 or more.
    """

    module: torch.nn.Module
    examples: tuple[tuple[torch.Tensor, ...], ...]


class CompilableRuntime(Protocol):
    """A loaded runtime whose model can be compiled."""

    @property
    def package(self) -> Package:
        """The package that was loaded."""

    @property
    def content_hash(self) -> str:
        """The hash of the files that were loaded."""

    @property
    def precision(self) -> Precision:
        """The number format that was asked for."""

    def compilable(self, form: str) -> Compilable:
        """The module and the examples of this form. Raises CompilationRefused where there is no such form."""


class CompiledModule(Protocol):
    """A compiled form, called like the module that it was compiled from."""

    @property
    def is_replayed(self) -> bool:
        """Whether CUDA graphs run it: one is captured for each combination of shapes."""

    @property
    def made(self) -> Mapping[str, object]:
        """How it was made, as plain data."""

    def counts(self) -> Mapping[str, int]:
        """See Counted of base.py."""

    def beside(self) -> CompiledModule:
        """The same for another thread: where the module itself runs, it is another instance of it."""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """The module's outputs for these tensors."""


class ModelCompiler(Protocol):
    """Compiles loaded models: TorchCompiler of workers/compilation/compiler.py."""

    def compile(self, runtime: CompilableRuntime, form: str) -> CompiledModule:
        """The compiled form; may take a minute. Raises CompilationRefused."""


class Span(NamedTuple):
    """The extents of one dimension, both included."""

    low: int
    high: int

    @property
    def is_dynamic(self) -> bool:
        """Whether the extent may differ between calls."""
        return self.low < self.high


@dataclass(frozen=True, slots=True)
class Shapes:
    """Which inputs a compiled graph serves: for each argument its dtype, and a span for each dimension.

    equal: groups of (argument, dimension) that had the same extent in every example.
    """

    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    spans: tuple[tuple[Span, ...], ...]
    equal: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, examples: Sequence[Sequence[torch.Tensor]]) -> Shapes:
        """What the examples span. Raises CompilationRefused if they differ in more than extents."""
        if not examples or not examples[0]:
            raise CompilationRefused("No example was given. Expected at least one with at least one tensor")
        kinds = {tuple((one.dtype, one.device, one.dim()) for one in example) for example in examples}
        if len(kinds) > 1:
            raise CompilationRefused("The examples differ in dtype, device or rank. Expected them to differ in extents")
        extents: dict[tuple[int, int], tuple[int, ...]] = {
            (argument, dimension): tuple(example[argument].shape[dimension] for example in examples)
            for argument, tensor in enumerate(examples[0])
            for dimension in range(tensor.dim())
        }
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for place, seen in extents.items():
            if len(set(seen)) > 1:
                groups.setdefault(seen, []).append(place)
        return cls(
            tuple(tensor.dtype for tensor in examples[0]),
            examples[0][0].device,
            tuple(
                tuple(Span(min(extents[argument, d]), max(extents[argument, d])) for d in range(tensor.dim()))
                for argument, tensor in enumerate(examples[0])
            ),
            tuple(tuple(places) for places in groups.values()),
        )

    def cover(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the graph serves these inputs."""
        if len(tensors) != len(self.dtypes):
            return False
        for tensor, dtype, spans in zip(tensors, self.dtypes, self.spans, strict=True):
            shape = tensor.shape
            if tensor.dtype != dtype or len(shape) != len(spans) or tensor.device != self.device:
                return False
            for extent, span in zip(shape, spans, strict=True):
                if not span.low <= extent <= span.high:
                    return False
        for (argument, dimension), *others in self.equal:
            extent = tensors[argument].shape[dimension]
            if any(tensors[other].shape[d] != extent for other, d in others):
                return False
        return True

    def traced(self, examples: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """The example to trace with. Raises CompilationRefused if each has a dynamic extent below 2."""
        for example in examples:
            extents = [example[places[0][0]].shape[places[0][1]] for places in self.equal]
            if all(extent >= _LEAST_TRACED for extent in extents):
                return example
        raise CompilationRefused("Every example has a dynamic extent below 2. Expected one without")

    def sweep(self) -> Iterator[list[list[int]]]:
        """Shapes that together take each dynamic dimension through all its extents, with the others at either end."""
        for number in range(len(self.equal)):
            span = self._span(number)
            for others in ("low", "high"):
                ends = [getattr(self._span(n), others) for n in range(len(self.equal))]
                for extent in range(span.low, span.high + 1):
                    ends[number] = extent
                    yield self._shapes(ends)
        if not self.equal:
            yield self._shapes([])

    def as_data(self) -> list[object]:
        """The same as plain data, for keys."""
        return [
            [str(dtype), [list(span) for span in spans]] for dtype, spans in zip(self.dtypes, self.spans, strict=True)
        ]

    def _span(self, group: int) -> Span:
        argument, dimension = self.equal[group][0]
        return self.spans[argument][dimension]

    def _shapes(self, extents: Sequence[int]) -> list[list[int]]:
        shapes = [[span.low for span in spans] for spans in self.spans]
        for places, extent in zip(self.equal, extents, strict=True):
            for argument, dimension in places:
                shapes[argument][dimension] = extent
        return shapes
