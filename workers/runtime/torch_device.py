"""One torch device: threads, placement, precision, copies to and from it, and the meaning of its errors.

Importing this module does not import torch. A TorchDevice imports it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.errors import ConfigurationError, MissingRequirement, OutOfMemory
from penstock.registry.package.spec_sections import Precision
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import DeviceLost

if TYPE_CHECKING:
    import torch

__all__ = ["TorchDevice", "keeping_threads", "module_bytes", "own_weights", "sharing_weights"]

_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_EXHAUSTED = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
_CUDA_LOST = (
    *("illegal memory access", "device-side assert", "misaligned address", "illegal instruction", "illegal address"),
    *(
        "unspecified launch failure",
        "hardware stack error",
        "invalid program counter",
        "uncorrectable",
        "launch timed out",
    ),
)
"""Texts of CUDA errors after which the process's context stays unusable (CUDA runtime API, type cudaError: "this
leaves the process in an inconsistent state"). Its other errors concern one forward."""


class TorchDevice:
    """The device of a torch model. name: `cpu` or `cuda[:n]`. threads: CPU threads of a forward; None: the caller's."""

    def __init__(self, name: str, threads: int | None = None) -> None:
        """Imports torch and sets the caller's CPU threads. Raises ConfigurationError for a device that is missing."""
        try:
            import torch
        except ImportError:
            raise MissingRequirement("torch is not installed. Expected: pip install '.[torch]'") from None
        self._torch = torch
        self._threads = threads
        self._set_threads()
        try:
            self.device = torch.device(name)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise MissingRequirement(
                f"Device {name!r} cannot be used ({reason:.120}). Expected cpu or cuda:N"
            ) from None
        self.is_cuda = self.device.type == "cuda"

    def check_module(self, model: object, reference: str) -> None:
        """Raises ConfigurationError for anything but a torch module."""
        if not isinstance(model, self._torch.nn.Module):
            raise ConfigurationError(f"{reference}: found a {type(model).__name__}, expected a torch.nn.Module")

    def dtype(self, precision: Precision) -> torch.dtype | None:
        """The dtype of weights and floats in a precision; None for `auto`, which leaves them unchanged."""
        dtype: torch.dtype | None = None if precision == "auto" else getattr(self._torch, _DTYPES[precision])
        return dtype

    def converted(self, module: torch.nn.Module, precision: Precision) -> torch.nn.Module:
        """A copy of the module in a precision. It is made without a second copy in the module's own precision."""
        dtype = self.dtype(precision)
        floats: dict[int, Any] = {}
        for one in _tensors(module):
            if one.is_floating_point() and type(one) in (self._torch.Tensor, self._torch.nn.Parameter):
                # By the identity of the original, so that tied weights stay tied.
                cast = one.detach().to(dtype, copy=True)
                is_weight = isinstance(one, self._torch.nn.Parameter)
                floats[id(one)] = self._torch.nn.Parameter(cast, one.requires_grad) if is_weight else cast
        return copy.deepcopy(module, floats).to(dtype)

    @property
    def reduced_precision(self) -> Precision:
        """The half-size number format of this device: bf16, which has the range of fp32, unless the device lacks it."""
        if self.is_cuda and not self._torch.cuda.is_bf16_supported(including_emulation=False):
            return "fp16"
        return "bf16"

    def place(self, model: object, reference: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """The same module object, on this device, in evaluation mode and, with a dtype, in that precision.

        Raises ConfigurationError for anything but a torch module.
        """
        self.check_module(model, reference)
        module: torch.nn.Module = model  # type: ignore[assignment]
        return module.to(self.device, dtype).eval()

    def host_tensor(self, array: Array) -> torch.Tensor:
        """A tensor over a writable array's memory, or a pinned copy of it when the device is a GPU."""
        tensor = self._torch.from_numpy(array)
        return tensor.pin_memory() if self.is_cuda else tensor

    def upload(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor on this device, floats in `dtype` if there is one. The copy overlaps the device's other work."""
        placed = tensor.to(self.device, non_blocking=True) if self.is_cuda else tensor
        return placed.to(dtype) if dtype is not None and placed.is_floating_point() else placed

    def download(self, tensor: torch.Tensor) -> Array:
        """The tensor's values on the host, after a wait for the device. NumPy has no bfloat16: it becomes float32.

        The values are copied: a module may write its next outputs into the tensor while these are being sent.
        """
        held = tensor.detach() if tensor.requires_grad else tensor
        if held.dtype == self._torch.bfloat16:
            held = held.float()
        elif not self.is_cuda and held.device.type == "cpu":
            # Each call of torch costs a short forward more than NumPy's copy.
            array: Array = held.numpy().copy()
            return array
        elif held.device.type == "cpu":
            held = held.clone()
        array = held.cpu().numpy()
        return array

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to copy the tensor to the host. The returned function waits for the copy, and for nothing later."""
        if not self.is_cuda:
            return tensor.cpu
        host = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._torch.cuda.current_stream(self.device))

        def waited() -> torch.Tensor:
            copied.synchronize()
            return host

        return waited

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        """A floating tensor in the dtype of that name; any other tensor unchanged."""
        return tensor.to(getattr(self._torch, dtype)) if tensor.is_floating_point() else tensor

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Runs its body without autograd, on the threads of this device.

        Raises OutOfMemory and DeviceLost in place of the device's own errors.
        """
        self._set_threads()
        try:
            with self._torch.inference_mode():
                yield
        except (self._torch.OutOfMemoryError, MemoryError) as error:
            raise self._out_of_memory(error) from error
        except RuntimeError as error:
            if any(phrase in str(error) for phrase in _EXHAUSTED):
                raise self._out_of_memory(error) from error
            if self.is_cuda and any(phrase in str(error) for phrase in _CUDA_LOST):
                raise DeviceLost(f"{self.device}: {str(error).partition(chr(10))[0]:.200}") from error
            raise

    def release_memory(self) -> None:
        """Gives cached device memory back."""
        if self.is_cuda:
            self._torch.cuda.empty_cache()

    def _set_threads(self) -> None:
        # torch has a number for each thread, which begins with the one that any thread has set last. The read also
        # makes this beginning, which would replace a number that is set before it.
        if self._threads is not None and self._torch.get_num_threads() != self._threads:
            self._torch.set_num_threads(self._threads)

    def _out_of_memory(self, error: BaseException) -> OutOfMemory:
        self.release_memory()
        return OutOfMemory(f"The batch does not fit {self.device} ({type(error).__name__})")


@contextmanager
def keeping_threads(otherwise: int | None = None) -> Iterator[None]:
    """Restores the number of torch's CPU threads for the caller, and for threads that set none.

    otherwise: the number where the body imports torch; None: any.
    """
    torch = _imported_torch()
    before = otherwise if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        torch = _imported_torch()
        if torch is not None and before not in (None, torch.get_num_threads()):
            torch.set_num_threads(before)


def _imported_torch() -> Any:
    """The module torch; None where no thread has imported it."""
    torch = sys.modules.get("torch")
    # Another thread may be in the middle of the import.
    is_whole = hasattr(torch, "get_num_threads") and hasattr(torch, "set_num_threads")
    return torch if is_whole else None


def module_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters and buffers; those that share memory count once."""
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in _tensors(module)}
    return sum(held.values())


def own_weights(module: torch.nn.Module) -> None:
    """Copies the module's weights out of the file that they may be mapped from: a later write to it changes nothing."""
    for tensor in _tensors(module):
        tensor.data = tensor.data.clone()


def sharing_weights(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module that shares the parameters, and has its own buffers and other writable state."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
