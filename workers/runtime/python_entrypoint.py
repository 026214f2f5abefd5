"""Packages of format `python`: any callable over NumPy arrays, batched or streaming, or a torch module.

A batched entry point is `(inputs) -> outputs`: mappings of arrays with the rows of all jobs. A streaming one is a
generator function `(inputs, ctx)` that runs one job: each mapping it yields is a chunk, and the mapping it returns
holds the declared outputs. A torch module is called with tensors by name; see module_function.py. A model with one
output may return it without a mapping.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from penstock.registry.errors import ConfigurationError, JobFailed, ModelError
from penstock.registry.package import Package
from penstock.registry.package.manifest import Manifest
from penstock.registry.tensors import Array
from penstock.workers.frameworks.inference_proxy import InferenceProxy
from penstock.workers.runtime.base import Prepared, StreamContext, concatenate
from penstock.workers.runtime.closing import close_stream
from penstock.workers.runtime.entrypoint import PackageModules
from penstock.workers.runtime.loading import LoadOptions, NullContext, PackageRuntime
from penstock.workers.runtime.module_function import ModuleFunction, host_array, is_module, is_tensor
from penstock.workers.runtime.torch_device import TorchDevice, module_bytes

__all__ = ["PythonRuntime"]

logger = logging.getLogger("penstock.runtime")


class PythonRuntime(PackageRuntime):
    """Runs a package's own Python code, which decides on device, threads and precision."""

    def __init__(self, package: Package, options: LoadOptions | None = None) -> None:
        super().__init__(package, options)
        self._modules: PackageModules | None = None
        self._device: TorchDevice | None = None
        self.model: Callable[..., Any] | None = None
        """The object that `build()` returned; None until loaded."""

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Concatenates the rows of jobs; a streaming entry point takes one job."""
        inputs = concatenate(jobs)
        return Prepared(self.spec.signature.rows(inputs), inputs)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One call of a batched entry point; of a streaming one, the result without its chunks."""
        if self.spec.streams:
            return _result_of(self.stream(prepared.payload, NullContext()))
        outputs = _arrays(self._named(self._called(prepared.payload)))
        self.spec.signature.check_outputs(outputs, prepared.rows)
        return outputs

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """The chunks that a streaming entry point yields, then the outputs that it returns.

        The caller may throw a JobFailed that refuses a chunk.
        """
        if not self.spec.streams:
            return (yield from super().stream(inputs, context))
        generator = self._called(concatenate([inputs]), context)
        try:
            while True:
                try:
                    chunk = next(generator)
                except StopIteration as end:
                    outputs = _arrays({} if end.value is None else end.value)
                    self.spec.signature.check_outputs(outputs, self.spec.signature.rows(inputs))
                    return outputs
                try:
                    yield _arrays(chunk)
                except JobFailed as refusal:
                    _refuse(generator, refusal)
        finally:
            close_stream(generator)

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        self._refuse_precision("its own code decides")
        self._modules = PackageModules(self._package, manifest)
        model = self._modules.build(device)
        self._check_kind(model)
        if getattr(model, "training", False) and callable(getattr(model, "eval", None)):
            facts = {"model": self.spec.name, "version": self.version}
            logger.info("the model was built in training mode and is set to evaluation mode", extra=facts)
            model.eval()
        self.model = model
        memory_bytes = (self.spec.memory_mb or 0) << 20
        if not is_module(model):
            self._adapter = InferenceProxy(model)
            return memory_bytes
        self._device = TorchDevice(device, threads)
        self._adapter = InferenceProxy(ModuleFunction(model, self.spec, self._device))
        return memory_bytes or module_bytes(model)

    def _named(self, outputs: object) -> object:
        """The outputs by name: the only output may come without its name."""
        is_array = hasattr(outputs, "__array__") and not isinstance(outputs, Mapping)
        return {self.spec.outputs[0].name: outputs} if is_array and len(self.spec.outputs) == 1 else outputs

    def _release(self) -> None:
        self.model = self._adapter = None
        if self._device is not None:
            self._device.release_memory()
        if self._modules is not None:
            self._modules.forget()

    def _check_kind(self, model: object) -> None:
        is_generator = inspect.isgeneratorfunction(model) or inspect.isgeneratorfunction(
            getattr(model, "__call__", None)  # noqa: B004 - only the method itself shows that it is a generator
        )
        if not callable(model) or is_generator != self.spec.streams:
            expected = "a generator function (inputs, ctx)" if self.spec.streams else "a function (inputs) -> outputs"
            found = "a generator function" if is_generator else type(model).__name__
            raise ConfigurationError(
                f"{self.spec.reference}: entrypoint {self.spec.entrypoint}: build() returned {found}, "
                f"expected {expected} as streams says"
            )


def _result_of(stream: Generator[dict[str, Array], None, dict[str, Array]]) -> dict[str, Array]:
    while True:
        try:
            next(stream)
        except StopIteration as end:
            outputs: dict[str, Array] = end.value
            return outputs


def _refuse(generator: Generator[Any, Any, Any], refusal: JobFailed) -> NoReturn:
    """Raises the refusal of a chunk at its `yield`, so that the traceback has the line; the model cannot prevent it."""
    with suppress(BaseException):
        generator.throw(refusal)
    raise refusal


def _arrays(values: object) -> dict[str, Array]:
    # `dict` first: a check against an abstract class takes longer.
    if not isinstance(values, (dict, Mapping)):
        raise ModelError(f"The entry point returned {type(values).__name__}. Expected a mapping of names to arrays")
    return {str(name): _array(value) for name, value in values.items()}


def _array(value: object) -> Array:
    # A copy, because an entry point may write its next outputs into the same array while these are being sent.
    array = np.array(host_array(value) if is_tensor(value) else value)
    return array.astype(object) if array.dtype.kind in "UT" else array
