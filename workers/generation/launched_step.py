"""A step whose tokens lie on the device: the next one is launched before the host has read them.

    step k: launched ---------------> tokens on the device ---> ids of step k + 1
                                              '--> host -------> read, while the device computes step k + 1

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from penstock.workers.generation.scheduler import Chunk
from penstock.workers.generation.scheduler import Sequence as Scheduled
from penstock.workers.runtime.torch_device import TorchDevice

__all__ = ["LaunchedStep"]


class LaunchedStep:
    """chunks: each chooses one token. sampled: (2, S) on the device, see `sample_on_device`."""

    def __init__(self, chunks: Sequence[Chunk], sampled: torch.Tensor, device: TorchDevice) -> None:
        self.chunks: Final = tuple(chunks)
        self._sampled: Final = sampled
        self._device: Final = device
        self._places: Final[dict[Scheduled, int]] = {chunk.sequence: at for at, chunk in enumerate(chunks)}
        self._download: Final = device.start_download(sampled)

    def tokens_of(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """(S,) on the device: what this step chooses for the requests of these chunks. It has all of them."""
        places = [self._places[chunk.sequence] for chunk in chunks]
        tokens = self._sampled[0]
        if places == [*range(len(self.chunks))]:
            return tokens
        return tokens.index_select(0, self._device.upload(self._device.host_tensor(np.array(places, np.int64))))

    def read(self) -> tuple[list[int], list[int]]:
        """Waits for the step: the token of each chunk, and whether its logits are finite. Later steps go on."""
        tokens, is_finite = self._download().tolist()
        return tokens, is_finite
