"""A device that this machine has not, for tests: its tensors hold values of the CPU, and mix with no tensor of the CPU.

    to(device) -> OnDevice -> each operator: all tensors on the device? -> on the values -> OnDevice
    to("cpu"), item(), tolist() -> copies to the host, which are counted

Its name is `meta`, because torch knows the name everywhere and has no kernels for it. It shows where tensors lie and
what is copied. It shows nothing about CUDA: its kernels, their precision, and their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from penstock.workers.runtime.torch_device import TorchDevice

__all__ = ["SecondDevice", "copies"]

_META: Final = torch.device("meta")
_HISTOGRAM: Final = torch.ops.aten.histc.default
_READ: Final = torch.ops.aten._local_scalar_dense.default


class OnDevice(torch.Tensor):
    """A tensor of the second device. held: its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        # A view of an ordinary tensor must be one, too, and the model's forward runs in inference mode.
        with torch.inference_mode(False):
            made: OnDevice = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=_META,
            )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _apply(func, args, kwargs or {})


class _Placing(TorchDispatchMode):
    """Places what is made on the device, and counts copies."""

    def __init__(self) -> None:
        super().__init__()
        self.to_device = 0
        self.to_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors, is_on_device, goes = _places(args, kwargs)
        if tensors and is_on_device != goes:
            self.to_device += goes
            self.to_host += is_on_device
        self.to_host += func is _READ and is_on_device
        return _apply(func, args, kwargs)


class _Filling(TorchFunctionMode):
    """`torch.tensor` leaves the values of a meta tensor out: here they are copied to it, as to a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == _META:
            return torch.tensor(*args, **{**kwargs, "device": None}).to(_META)
        return func(*args, **kwargs)


def _places(args: Any, kwargs: Any) -> tuple[list[torch.Tensor], bool, bool]:
    """The tensors of a call, whether one is on the device, and whether its results are."""
    flat, _ = tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    is_on_device = any(isinstance(each, OnDevice) for each in tensors)
    named = [each for each in flat if isinstance(each, torch.device)]
    return tensors, is_on_device, named[0] == _META if named else is_on_device


def _apply(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, is_on_device, goes = _places(args, kwargs)
    # A GPU takes a number of the CPU: it becomes an argument of the kernel.
    if is_on_device and any(not isinstance(each, OnDevice) and each.dim() for each in tensors):
        raise RuntimeError(f"{func}: found tensors of two devices, expected one")
    inner, named = tree_map_only(OnDevice, lambda each: each.held, (args, kwargs))
    inner, named = tree_map_only(torch.device, lambda _: torch.device("cpu"), (inner, named))
    if func is _HISTOGRAM:
        # A GPU counts integers, the CPU only floats.
        inner = (inner[0].float(), *inner[1:])
    result = func(*inner, **named)
    if tensors and is_on_device != goes:
        result = result.clone()
    if not goes or func is _READ:
        return result
    owners = {id(each.held): each for each in tensors if isinstance(each, OnDevice)}
    return tree_map_only(torch.Tensor, lambda each: owners[id(each)] if id(each) in owners else OnDevice(each), result)


class SecondDevice(TorchDevice):
    """What an engine takes for a GPU. Use it inside of `copies`."""

    def __init__(self) -> None:
        super().__init__("cpu", torch.get_num_threads())
        self.device = _META
        self.is_cuda = True

    def host_tensor(self, array: Any) -> torch.Tensor:
        """Not pinned: only a GPU has pinned memory."""
        return torch.from_numpy(array)

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copied when it is read: only a GPU copies while the program goes on."""
        return tensor.cpu

    def release_memory(self) -> None:
        """Nothing is cached."""


@contextmanager
def copies() -> Iterator[_Placing]:
    """Inside of it the device exists. Yields the numbers of copies to it and from it."""
    with _Filling(), _Placing() as placing:
        yield placing
