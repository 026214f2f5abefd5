"""Packages of format `pytorch`: an entry point that builds a `torch.nn.Module`, and its weights as safetensors.

    build() -> module [<- weights, every one in its place] -> device and precision -> forward

`forward` receives the declared inputs as tensors, by position in declared order, None for an absent optional one. It
returns a tensor, a sequence of tensors in the order of the declared outputs, or a mapping by name. A model with a
precision of its own (fp32, bf16, fp16) computes in it: input floats are cast to it, and outputs are cast back to their
declared dtype. A model without one runs unchanged.

Other forms of the module: with packed weights on a CPU; compiled; in bf16 where the device is fast at it; and on a CPU
as an ONNX graph, also in int8.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.errors import ConfigurationError, MissingRequirement, ModelError, shown
from penstock.registry.package import Package
from penstock.registry.package.manifest import Manifest
from penstock.registry.package.spec_sections import Precision
from penstock.registry.tensors import DTYPES, STRING, Array
from penstock.workers.batching.buckets import row_bucket
from penstock.workers.frameworks.adapters import adapt
from penstock.workers.runtime.base import Prepared, concatenate
from penstock.workers.runtime.compilable import (
    Compilable,
    CompilationRefused,
    CompiledModule,
    ModelCompiler,
    Shapes,
)
from penstock.workers.runtime.cpu import has_fast_bf16
from penstock.workers.runtime.entrypoint import PackageModules
from penstock.workers.runtime.export import Exportable, Graph, can_export, open_exported
from penstock.workers.runtime.forms import Forms, Forward, WithProvenance, finite_outputs
from penstock.workers.runtime.loading import LoadOptions, PackageRuntime
from penstock.workers.runtime.module_arrays import ModuleArrays
from penstock.workers.runtime.torch_device import TorchDevice, module_bytes, sharing_weights

if TYPE_CHECKING:
    import torch

__all__ = ["ModuleRuntime", "PyTorchRuntime"]

_COMPILED_ROWS: Final = 64
"""Rows of the largest batch that a compiled form covers, where the package does not name a larger one."""
_COMPILED_LENGTH: Final = 512
"""The longest free dimension that a compiled form covers, where the package does not name a limit."""
_MOST_NAMES: Final = 4
"""The most weights that an error names."""


class ModuleRuntime(PackageRuntime):
    """Runs a module on tensors, in inference mode. Subclasses say where the module comes from."""

    def __init__(self, package: Package, options: LoadOptions | None = None) -> None:
        super().__init__(package, options)
        self._names = tuple(spec.name for spec in package.spec.inputs)
        self._outputs = {spec.name: spec.dtype for spec in package.spec.outputs}
        self._device: TorchDevice | None = None
        self._threads = 1
        self._dtype: torch.dtype | None = None
        self.model: torch.nn.Module | None = None
        """The module; None until loaded."""

    @property
    def may_change_threads(self) -> bool:
        """See Runtime. CUDA has a current device and a current stream for each thread."""
        return self._device is not None and not self._device.is_cuda

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Concatenates the rows of jobs into tensors, pinned when the device is a GPU."""
        inputs = concatenate(jobs)
        rows = self.spec.signature.rows(inputs)
        device = self._loaded_device
        return Prepared(rows, [device.host_tensor(inputs[name]) if name in inputs else None for name in self._names])

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward of the module."""
        return self._forward(prepared, self._called, self._dtype)

    @abstractmethod
    def _module(self, manifest: Manifest, device: TorchDevice) -> object:
        """The module, unchanged. Raises ConfigurationError."""

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        if any(spec.dtype == STRING for spec in (*self.spec.inputs, *self.spec.outputs)):
            raise ConfigurationError(
                f"{self.spec.reference}: found a string tensor, expected numbers for {self.spec.format}"
            )
        self._device = TorchDevice(device, threads)
        self._threads = threads
        self._dtype = self._device.dtype(self.precision)
        module = self._module(manifest, self._device)
        self.model = self._device.place(module, self.spec.reference, self._dtype)
        self._adapter = adapt(self.model)
        return module_bytes(self.model)

    def _release(self) -> None:
        self.model = self._adapter = None
        if self._device is not None:
            self._device.release_memory()

    @property
    def _loaded_device(self) -> TorchDevice:
        if self._device is None:
            raise self._not_loaded()
        return self._device

    @property
    def _loaded(self) -> torch.nn.Module:
        if self.model is None:
            raise self._not_loaded()
        return self.model

    def _forward(self, prepared: Prepared, module: Callable[..., Any], dtype: torch.dtype | None) -> dict[str, Array]:
        """One call of `module`, with input floats in `dtype` if there is one."""
        device = self._loaded_device
        with device.inference():
            outputs = module(*(None if one is None else device.upload(one, dtype) for one in prepared.payload))
            arrays = {
                name: device.download(self._declared(name, tensor, dtype)) for name, tensor in self._named(outputs)
            }
        self.spec.signature.check_outputs(arrays, prepared.rows)
        return arrays

    def _named(self, outputs: Any) -> Iterable[tuple[str, torch.Tensor]]:
        if isinstance(outputs, Mapping):
            return outputs.items()
        tensors = outputs if isinstance(outputs, Sequence) else (outputs,)
        if len(tensors) != len(self._outputs):
            raise ModelError(
                f"The model returned {len(tensors)} output(s). Declared outputs: {', '.join(self._outputs)}"
            )
        return zip(self._outputs, tensors, strict=True)

    def _declared(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """The output in its declared dtype, where the module runs in another precision than its own."""
        declared = self._outputs.get(name, "")
        is_cast = dtype is not None and declared.startswith("float")
        return self._loaded_device.cast(tensor, declared) if is_cast else tensor


class PyTorchRuntime(ModuleRuntime):
    """Runs the module that a package's own Python builds."""

    def __init__(self, package: Package, options: LoadOptions | None = None) -> None:
        super().__init__(package, options)
        self._modules: PackageModules | None = None
        self._arrays: ModuleArrays | None = None
        self.forms: Final = Forms(_Eager(self), finite_outputs(package.spec))
        """The model's forms; every forward goes through them."""

    def load(self, device: str, threads: int) -> None:
        """See Runtime.load."""
        super().load(device, threads)
        if self._modules is not None:
            # Behind the warm-up, which makes what is made once.
            self._arrays = ModuleArrays(self._modules.loaded())

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward, by the form in use."""
        return self.forms.run(prepared)

    def second_instance(self, module: torch.nn.Module, dtype: torch.dtype | None) -> _Instance:
        """The forward of another instance of a module, for another thread; see ThreadCopyable.

        Raises ConfigurationError where two forwards at the same time would disturb each other.
        """
        if self._arrays is not None and (changed := self._arrays.changed()):
            raise ConfigurationError(
                f"{self.spec.reference}: its forwards change {_listed(changed)}, which all instances share, "
                "expected such arrays as attributes of the module"
            )
        return _Instance(self, sharing_weights(module), dtype)

    def counts(self) -> dict[str, int]:
        """See Counted: calls of the eager model, and the counters of the form in use."""
        return {**super().counts(), **self.forms.counts()}

    def candidates(self, compiler: ModelCompiler | None) -> dict[str, Callable[[], Forward]]:
        """See Tunable. Where the package or the settings name a precision, no form changes it."""
        device = self._loaded_device
        found: dict[str, Callable[[], Forward]] = {}
        if compiler is not None and self._has_fixed_inputs:
            found["compiled"] = lambda: self._compiled(compiler, "compiled")
        may_change = self.precision == "auto"
        is_fp32 = self.precision in ("auto", "fp32")
        if is_fp32 and not device.is_cuda and self._can_prepack:
            found["prepacked"] = self._prepacked
        if may_change and (device.is_cuda or has_fast_bf16()):
            reduced = device.reduced_precision
            found[reduced] = lambda: self._reduced_forward(reduced)
            if compiler is not None and self._has_fixed_inputs and device.is_cuda and reduced == "bf16":
                found["compiled-bf16"] = lambda: self._compiled(compiler, "compiled-bf16")
        if device.is_cuda or not self._has_fixed_inputs or not can_export():
            return found
        if is_fp32:
            found["onnx"] = lambda: self._exported(is_int8=False)
        if may_change:
            found["int8"] = lambda: self._exported(is_int8=True)
        return found

    def compilable(self, form: str) -> Compilable:
        """The declared inputs, by position -> the declared outputs, for every batch up to the largest."""
        dtype = self._loaded_device.dtype("bf16") if form == "compiled-bf16" else self._dtype
        module = self._reduced("bf16") if form == "compiled-bf16" else self._loaded
        longest = self.spec.batching.max_length or _COMPILED_LENGTH
        corners = ((2, 4), (1, 2), (self._compiled_rows, longest))
        return Compilable(module, tuple(self._example_tensors(*corner, dtype) for corner in corners))

    def exportable(self) -> Exportable:
        """The declared inputs, by position -> the declared outputs."""
        if not self._has_fixed_inputs:
            raise ConfigurationError(
                f"{self.spec.reference}: cannot be exported to ONNX: found optional inputs, expected none"
            )
        examples = self._example_tensors(2, 4, self._dtype), self._example_tensors(3, 5, self._dtype)
        return Exportable(self._loaded, examples, self._names, tuple(self._outputs))

    @property
    def _compiled_rows(self) -> int:
        """Rows of the largest batch that a compiled form covers."""
        return max(_COMPILED_ROWS, self.spec.batching.max_batch_size)

    @property
    def _has_fixed_inputs(self) -> bool:
        """Whether every call has the same tensors: a graph has no place for an absent one."""
        return not any(spec.optional for spec in self.spec.inputs)

    def _example_tensors(self, rows: int, length: int, dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
        inputs = self._example(rows, length)
        device = self._loaded_device
        return tuple(device.upload(device.host_tensor(inputs[name]), dtype) for name in self._names)

    def _reduced(self, precision: Precision) -> torch.nn.Module:
        """A second copy of the model, in another precision."""
        return self._loaded_device.converted(self._loaded, precision)

    def _reduced_forward(self, precision: Precision) -> Forward:
        """The module in another precision, on a CPU with packed weights where that can be."""
        from penstock.workers.runtime.prepacked import prepack

        module = self._reduced(precision)
        made: Mapping[str, object] = {}
        with suppress(CompilationRefused):
            made = prepack(module).made
        return WithProvenance(_Instance(self, module, self._loaded_device.dtype(precision)), made, dict)

    @property
    def _can_prepack(self) -> bool:
        from penstock.workers.runtime.prepacked import can_prepack

        return can_prepack(self._loaded)

    def _prepacked(self) -> Forward:
        """The module with packed weights beside its own."""
        from penstock.workers.runtime.prepacked import prepack

        module = sharing_weights(self._loaded)
        packing = prepack(module)
        return WithProvenance(_Instance(self, module, self._dtype), packing.made, dict)

    def _compiled(self, compiler: ModelCompiler, form: str) -> Forward:
        dtype = self._loaded_device.dtype("bf16") if form == "compiled-bf16" else self._dtype
        # The module that was compiled is the one that serves.
        compiled = compiler.compile(self, form).beside()
        return WithProvenance(_Compiled(self, compiled, dtype), compiled.made, compiled.counts)

    def _in_few_shapes(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The same for batches filled up to a bucket of rows, because each number of rows needs its own CUDA graph.

        They are filled with copies of the last row, because any other row might be invalid input.
        """
        import torch
        from torch.utils import _pytree

        most_rows = self._compiled_rows

        def call(*tensors: torch.Tensor) -> Any:
            rows = len(tensors[0])
            more = row_bucket(rows, most_rows) - rows
            if not more:
                return compiled(*tensors)
            whole = (torch.cat([one, one[-1:].expand(more, *one.shape[1:])]) for one in tensors)
            return _pytree.tree_map(lambda output: output[:rows], compiled(*whole))

        return call

    def _exported(self, *, is_int8: bool) -> Forward:
        graph = open_exported(self, self._threads, is_int8=is_int8)
        shapes = Shapes.of(self.compilable("compiled").examples)
        exported = _Exported(self, graph, shapes, _Instance(self, sharing_weights(self._loaded), self._dtype))
        return WithProvenance(exported, {}, exported.counts)

    def answer_by(self, graph: Graph, tensors: Sequence[torch.Tensor], rows: int) -> dict[str, Array]:
        """The outputs of an exported graph."""
        answers = graph(dict(zip(self._names, [one.numpy() for one in tensors], strict=True)))
        arrays = {
            name: array if self._dtype is None else array.astype(DTYPES[self._outputs[name]], copy=False)
            for name, array in zip(self._outputs, answers, strict=True)
        }
        self.spec.signature.check_outputs(arrays, rows)
        return arrays

    def _module(self, manifest: Manifest, device: TorchDevice) -> object:
        self._modules = PackageModules(self._package, manifest)
        module = self._modules.build()
        device.check_module(module, self.spec.reference)
        if self.spec.weights is not None:
            self._load_weights(module)
        return module

    def _release(self) -> None:
        self.forms.reset("unloaded")
        super()._release()
        if self._modules is not None:
            self._modules.forget()

    def _load_weights(self, module: torch.nn.Module) -> None:
        """Copies the weights into the module. Raises ConfigurationError unless both have equal names and shapes."""
        file = self._weights_file()
        reference = f"{self.spec.reference}: weights: {file.name}"
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_model
        except ImportError:
            raise MissingRequirement("safetensors is not installed. Expected: pip install '.[torch]'") from None
        try:
            missing, unexpected = load_model(module, file, strict=False)
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"{reference} cannot be read, expected safetensors") from error
        except RuntimeError as error:
            # torch lists every weight of another shape, one a line.
            listed = str(error).splitlines()[1:] or [str(error)]
            raise ConfigurationError(f"{reference}: {listed[0].strip():.200}") from None
        if missing or unexpected:
            raise ConfigurationError(
                f"{reference}: lacks {_listed(missing)}; has beyond the module's {_listed(unexpected)}, "
                "expected exactly the module's weights"
            )


@dataclass(frozen=True, slots=True)
class _Eager:
    """The forward of the eager module; see ThreadCopyable."""

    runtime: PyTorchRuntime

    def __call__(self, prepared: Prepared) -> dict[str, Array]:
        return ModuleRuntime.run(self.runtime, prepared)

    def thread_copy(self) -> Forward:
        """The forward of a new instance."""
        return self.runtime.second_instance(self.runtime._loaded, self.runtime._dtype)


@dataclass(frozen=True, slots=True)
class _Instance:
    """The forward of another instance of the module, with floats cast to `dtype`; see ThreadCopyable."""

    runtime: PyTorchRuntime
    module: torch.nn.Module
    dtype: torch.dtype | None

    def __call__(self, prepared: Prepared) -> dict[str, Array]:
        return self.runtime._forward(prepared, self.module, self.dtype)

    def thread_copy(self) -> Forward:
        """The forward of a new instance."""
        return self.runtime.second_instance(self.module, self.dtype)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The forward of a compiled form; see ThreadCopyable."""

    runtime: PyTorchRuntime
    compiled: CompiledModule
    dtype: torch.dtype | None
    _called: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        called = self.runtime._in_few_shapes(self.compiled) if self.compiled.is_replayed else self.compiled
        object.__setattr__(self, "_called", called)

    def __call__(self, prepared: Prepared) -> dict[str, Array]:
        return self.runtime._forward(prepared, self._called, self.dtype)

    def thread_copy(self) -> Forward:
        """The forward with another instance for the shapes that the library does not serve."""
        return _Compiled(self.runtime, self.compiled.beside(), self.dtype)


class _Exported:
    """The forward of an exported graph. A graph has no guards, and the module may take another path for shapes that
    were not looked at: it runs these itself; see ThreadCopyable."""

    def __init__(self, runtime: PyTorchRuntime, graph: Graph, shapes: Shapes, others: _Instance) -> None:
        self._runtime = runtime
        self._graph = graph
        self._shapes = shapes
        self._others = others
        self._uncovered = count(1)
        self._uncovered_calls = 0

    def __call__(self, prepared: Prepared) -> dict[str, Array]:
        device = self._runtime._loaded_device
        tensors = [device.upload(one, self._runtime._dtype) for one in prepared.payload]
        if self._shapes.cover(tensors):
            return self._runtime.answer_by(self._graph, tensors, prepared.rows)
        self._uncovered_calls = next(self._uncovered)
        return self._others(prepared)

    def counts(self) -> dict[str, int]:
        """See Counted."""
        return {"uncovered_calls": self._uncovered_calls}

    def thread_copy(self) -> Forward:
        """The forward of the same graph, with another instance for other shapes."""
        others = self._runtime.second_instance(self._others.module, self._others.dtype)
        return _Exported(self._runtime, self._graph, self._shapes, others)


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return ", ".join([*map(shown, names[:_MOST_NAMES]), *more]) or "none"
