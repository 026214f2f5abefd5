"""Packages of format `torchscript`: a module that `torch.jit.save` wrote, run without its author's Python.

It is called like a module of format `pytorch`; see pytorch.py. TorchScript archives hold TorchScript code and no
Python, and torch reads them with an unpickler that makes no other objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.registry.errors import ConfigurationError
from penstock.registry.package.manifest import Manifest
from penstock.workers.runtime.pytorch import ModuleRuntime
from penstock.workers.runtime.torch_device import TorchDevice

if TYPE_CHECKING:
    import torch

__all__ = ["TorchScriptRuntime"]


class TorchScriptRuntime(ModuleRuntime):
    """Runs a scripted or traced module."""

    def _module(self, manifest: Manifest, device: TorchDevice) -> torch.nn.Module:
        import torch

        file = self._weights_file()
        load: Callable[..., torch.nn.Module] = torch.jit.load
        try:
            module = load(file, map_location=device.device)
        except RuntimeError as error:
            raise ConfigurationError(
                f"{self.spec.reference}: weights: {file.name} cannot be read, expected an archive of torch.jit.save"
            ) from error
        return module
