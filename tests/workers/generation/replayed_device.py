"""A device on the CPU that an engine takes for a GPU with graphs and a kernel: tests of what is decided about these.

    capture -> the operators that run are noted, with their tensors -> replay: the same operators over the same tensors

As in a CUDA graph, the code of the model does not run again: a value that it has read on the host stays as it was. It
shows nothing about CUDA: its kernels, its memory, and what it refuses to capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.workers.generation import paged_kernel
from penstock.workers.generation.attention import LayerPool, NewTokens, RowGroup
from penstock.workers.generation.layer_rules import LayerRule
from penstock.workers.runtime.torch_device import TorchDevice

__all__ = ["ReplayedDevice", "Tape", "attend", "provide"]


class ReplayedDevice(TorchDevice):
    """What an engine takes for a GPU. Use it after `provide`."""

    def __init__(self) -> None:
        super().__init__("cpu", torch.get_num_threads())
        self.is_cuda = True

    def host_tensor(self, array: Any) -> torch.Tensor:
        """Not pinned: only a GPU has pinned memory."""
        return torch.from_numpy(array)

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copied when it is read."""
        return tensor.cpu

    def release_memory(self) -> None:
        """Nothing is cached."""


class Tape(TorchDispatchMode):
    """In the place of a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        """The outputs have new values, at the same places."""
        with torch.inference_mode():
            for func, args, kwargs, found in self._calls:
                again = func(*args, **kwargs)
                olds, news = ((each if isinstance(each, tuple | list) else [each]) for each in (found, again))
                for old, new in zip(olds, news, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def attend(
    group: RowGroup,
    rule: LayerRule,
    queries: torch.Tensor,
    new: NewTokens,
    pool: LayerPool,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """A kernel without triton, for models without capped logits and sinks: it reads no value on the host."""
    pool.write(new)
    view, rows = group.views[rule], group.num_rows
    length = len(view.numbers) // rows * pool.keys.shape[1]
    keys, values = pool.gather(view.numbers, rows, length)
    places = view.starts[:, None] + torch.arange(length)
    visible = places <= group.first_positions[:, None]
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    found = scaled_dot_product_attention(
        queries[:, :, None], keys, values, attn_mask=visible[:, None, None], scale=scale
    )
    return found[:, :, 0]


@contextmanager
def provide(
    kernel: Any = attend, graph: Any = Tape, compiled: Callable[[Any], Any] = lambda model: model
) -> Iterator[None]:
    """Inside of it the device exists. compiled: what torch's compiler makes of a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        patch.setattr(torch.cuda, "CUDAGraph", graph)
        patch.setattr(torch.cuda, "graph", lambda made, pool: made)
        patch.setattr(torch.cuda, "device", lambda _device: nullcontext())
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch, "compile", compiled)
        patch.setattr(paged_kernel, "decode_attention", kernel)
        yield
