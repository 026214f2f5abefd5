"""A torch module that `build()` of a `python` package returned -> a function of arrays, as its other models are.

    named arrays -> named tensors on the device -> module(**tensors), in inference mode -> its outputs

Importing this module does not import torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import STRING, Array
from penstock.workers.runtime.torch_device import TorchDevice

if TYPE_CHECKING:
    import torch

__all__ = ["ModuleFunction", "host_array", "is_module", "is_tensor"]


def is_module(model: object) -> bool:
    """Whether the object is a torch module. Its code imported torch, so this need not."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def is_tensor(value: object) -> bool:
    """Whether the object is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def host_array(tensor: Any) -> Array:
    """The values of a tensor on the host, in its own memory if they lie there. NumPy has no bfloat16: it is widened."""
    held = tensor.detach()
    array: Array = (held.float() if str(held.dtype) == "torch.bfloat16" else held).cpu().numpy()
    return array


class ModuleFunction:
    """Calls a module, which it places on a device in evaluation mode.

    Raises ConfigurationError for a model of text, and for a module whose `forward` does not take the declared inputs by
    name.
    """

    def __init__(self, module: Any, spec: ModelSpec, device: TorchDevice) -> None:
        if any(one.dtype == STRING for one in (*spec.inputs, *spec.outputs)):
            raise ConfigurationError(
                f"{spec.reference}: found a string tensor, expected numbers for a torch.nn.Module. A function that "
                "build() returns may take text"
            )
        _check_arguments(module, spec)
        self._device = device
        self.module: torch.nn.Module = device.place(module, spec.reference)

    def __call__(self, inputs: Mapping[str, Array]) -> object:
        """What the module returns for these inputs. An absent optional input is not passed."""
        device = self._device
        with device.inference():
            tensors = {name: device.upload(device.host_tensor(values)) for name, values in inputs.items()}
            return self.module(**tensors)


def _check_arguments(module: Any, spec: ModelSpec) -> None:
    names = [one.name for one in spec.inputs if not one.optional], [one.name for one in spec.inputs]
    try:
        takes = inspect.signature(module.forward)
    except ValueError:
        # A module without a Python signature shows at its first forward whether it takes the inputs.
        return
    try:
        for given in names:
            takes.bind(**dict.fromkeys(given))
    except TypeError as error:
        raise ConfigurationError(
            f"{spec.reference}: entrypoint {spec.entrypoint}: forward() of {type(module).__name__}: {error}, expected "
            f"the declared inputs as arguments: {', '.join(names[1])}"
        ) from None
