"""Packages of format `pytorch`: an entry point that builds a `torch.nn.Module`, and its weights as safetensors.

    build() -> module [<- weights, every one in its place] -> device and precision -> forward

`forward` receives the declared inputs as tensors, by position in declared order, None for an absent optional one. It
returns a tensor, a sequence of tensors in the order of the declared outputs, or a mapping by name. With a precision
of its own (fp32, bf16, fp16) a model computes in it: floats are cast on their way in and back to the declared dtype on
their way out. Without one it is run as its author built it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from registry.errors import ConfigurationError, ModelError, shown
from registry.manifest import Manifest
from registry.package import Package
from registry.tensors import STRING, Array
from workers.runtime.base import Prepared, concatenate
from workers.runtime.entrypoint import PackageModules
from workers.runtime.loading import Loading, PackageRuntime
from workers.runtime.torch_device import TorchDevice, module_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["ModuleRuntime", "PyTorchRuntime"]

_MOST_NAMES: Final = 4
"""Weights that an error names."""


class ModuleRuntime(PackageRuntime):
    """Runs a module on tensors, in inference mode. Subclasses say where the module comes from."""

    def __init__(self, package: Package, loading: Loading | None = None) -> None:
        super().__init__(package, loading)
        self._names = tuple(spec.name for spec in package.spec.inputs)
        self._outputs = {spec.name: spec.dtype for spec in package.spec.outputs}
        self._device: TorchDevice | None = None
        self._dtype: torch.dtype | None = None
        self.model: torch.nn.Module | None = None
        """The module; None until loaded."""

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        """Concatenates the rows of jobs into tensors, pinned when the device is a GPU."""
        inputs = concatenate(jobs)
        rows = self.spec.signature.rows(inputs)
        device = self._loaded_device
        return Prepared(rows, [device.host_tensor(inputs[name]) if name in inputs else None for name in self._names])

    def run(self, prepared: Prepared) -> dict[str, Array]:
        """One forward of the module."""
        model, device = self.model, self._loaded_device
        if model is None:
            raise self._not_loaded()
        with device.inference():
            outputs = model(*(None if one is None else device.upload(one, self._dtype) for one in prepared.payload))
            arrays = {name: device.download(self._declared(name, tensor)) for name, tensor in self._named(outputs)}
        self.spec.signature.check_outputs(arrays, prepared.rows)
        return arrays

    @abstractmethod
    def _module(self, manifest: Manifest, device: TorchDevice) -> object:
        """The module as its author made it. Raises ConfigurationError."""

    def _build(self, manifest: Manifest, device: str, threads: int) -> int:
        if any(spec.dtype == STRING for spec in (*self.spec.inputs, *self.spec.outputs)):
            raise ConfigurationError(
                f"{self.spec.reference}: found a string tensor, expected numbers for {self.spec.format}"
            )
        self._device = TorchDevice(device, threads)
        self._dtype = self._device.dtype(self.precision)
        module = self._module(manifest, self._device)
        self.model = self._device.place(module, self.spec.reference, self._dtype)
        return module_bytes(self.model)

    def _release(self) -> None:
        self.model = None
        if self._device is not None:
            self._device.release_memory()

    @property
    def _loaded_device(self) -> TorchDevice:
        if self._device is None:
            raise self._not_loaded()
        return self._device

    def _named(self, outputs: Any) -> Iterable[tuple[str, torch.Tensor]]:
        if isinstance(outputs, Mapping):
            return outputs.items()
        tensors = outputs if isinstance(outputs, Sequence) else (outputs,)
        if len(tensors) != len(self._outputs):
            raise ModelError(
                f"The model returned {len(tensors)} output(s). Declared outputs: {', '.join(self._outputs)}"
            )
        return zip(self._outputs, tensors, strict=True)

    def _declared(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The output in its declared dtype, where the precision is ours and not the author's."""
        declared = self._outputs.get(name, "")
        is_cast = self._dtype is not None and declared.startswith("float")
        return self._loaded_device.cast(tensor, declared) if is_cast else tensor


class PyTorchRuntime(ModuleRuntime):
    """Runs the module that a package's own Python builds."""

    def __init__(self, package: Package, loading: Loading | None = None) -> None:
        super().__init__(package, loading)
        self._modules: PackageModules | None = None

    def _module(self, manifest: Manifest, device: TorchDevice) -> object:
        self._modules = PackageModules(self._package, manifest)
        module = self._modules.build()
        device.check_module(module, self.spec.reference)
        if self.spec.weights is not None:
            self._load_weights(module)
        return module

    def _release(self) -> None:
        super()._release()
        if self._modules is not None:
            self._modules.forget()

    def _load_weights(self, module: torch.nn.Module) -> None:
        """Copies the weights into the module. Raises ConfigurationError unless both have the same, of like shapes."""
        file = self._weights_file()
        reference = f"{self.spec.reference}: weights: {file.name}"
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_model
        except ImportError:
            raise ConfigurationError("safetensors is not installed. Expected: pip install 'penstock[torch]'") from None
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


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return ", ".join([*map(shown, names[:_MOST_NAMES]), *more]) or "none"
