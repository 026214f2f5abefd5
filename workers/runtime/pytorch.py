"""Packages of format `pytorch`: an entry point that builds a `torch.nn.Module`.

`forward` receives the declared inputs as tensors, by position in declared order, None for an absent optional one. It
returns a tensor, a sequence of tensors in the order of the declared outputs, or a mapping by name.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from registry.errors import ConfigurationError, ModelError
from registry.package import ModelSpec, Package
from registry.tensors import STRING, Array
from workers.runtime.base import Prepared, StreamContext, concatenate, stream_whole, warm_up
from workers.runtime.entrypoint import build_model, forget_modules
from workers.runtime.torch_device import TorchDevice

if TYPE_CHECKING:
    import torch

__all__ = ["PyTorchRuntime"]


class PyTorchRuntime:
    """Runs a module as its author built it, in inference mode."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._names = tuple(spec.name for spec in package.spec.inputs)
        self._outputs = tuple(spec.name for spec in package.spec.outputs)
        self._device: TorchDevice | None = None
        self.model: torch.nn.Module | None = None
        """What `build()` returned; None until loaded."""

    @property
    def spec(self) -> ModelSpec:
        """What the package declares."""
        return self._package.spec

    @property
    def version(self) -> str:
        """The model version that answers."""
        return self._package.spec.version

    def load(self, device: str, threads: int) -> None:
        """Builds the module, moves it to the device in evaluation mode, and runs it once."""
        self._device = TorchDevice(device, threads)
        if any(spec.dtype == STRING for spec in (*self.spec.inputs, *self.spec.outputs)):
            raise ConfigurationError(f"{self.spec.reference}: found a string tensor, expected numbers for pytorch")
        model = build_model(self._package)
        self.model = self._device.place(model, self.spec.reference)
        warm_up(self)

    def length(self, inputs: Mapping[str, Array]) -> int:
        """The extent of `length_input`; 1 without one."""
        return self.spec.signature.length(inputs)

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Concatenates the rows of jobs into tensors, pinned when the device is a GPU."""
        inputs = concatenate(jobs)
        rows = self.spec.signature.rows(inputs)
        device = self._loaded_device
        return Prepared(rows, [device.host_tensor(inputs[name]) if name in inputs else None for name in self._names])

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward of the module."""
        if self.model is None:
            raise RuntimeError(f"{self.spec.reference} is not loaded")
        device = self._loaded_device
        with device.inference():
            outputs = self.model(*(None if one is None else device.upload(one) for one in prepared.payload))
            arrays = {name: device.download(tensor) for name, tensor in self._named(outputs)}
        self.spec.signature.check_outputs(arrays, prepared.rows)
        return arrays

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """No chunks, then the outputs."""
        return stream_whole(self, inputs)

    def close(self) -> None:
        """Lets go of the module and its device memory."""
        self.model = None
        forget_modules(self._package)
        if self._device is not None:
            self._device.release_memory()

    @property
    def _loaded_device(self) -> TorchDevice:
        if self._device is None:
            raise RuntimeError(f"{self.spec.reference} is not loaded")
        return self._device

    def _named(self, outputs: Any) -> Sequence[tuple[str, torch.Tensor]]:
        if isinstance(outputs, Mapping):
            return list(outputs.items())
        tensors = outputs if isinstance(outputs, Sequence) else (outputs,)
        if len(tensors) != len(self._outputs):
            raise ModelError(
                f"The model returned {len(tensors)} output(s). Declared outputs: {', '.join(self._outputs)}"
            )
        return list(zip(self._outputs, tensors, strict=True))
