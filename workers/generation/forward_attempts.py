"""The forwards of a step: one, or several where one of all chunks fails or does not fit into the device's memory.

    chunks -> forward --it fits--> computed
                      --an exception--> each half alone, down to the chunk at fault, which has failed
                      --out of memory-> the same; a single chunk is cut; later forwards have fewer tokens for a while

A forward may run again: it writes the same keys and values to the same places. It raises OutOfMemory in place of the
device's own errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.registry.errors import OutOfMemory
from penstock.workers.generation.sampler import Sampled
from penstock.workers.generation.scheduler import Chunk
from penstock.workers.runtime.base import DeviceLost

__all__ = ["Attempted", "ForwardAttempts"]

logger = logging.getLogger("penstock.runtime")

_GROWS_AFTER: Final = 256
"""Steps without such an error after which forwards may have twice as many tokens: memory may be free again."""
Forward = Callable[[Sequence[Chunk]], dict[str, list[Sampled]]]
"""Chunks -> the sampled tokens of each request whose last token was computed."""


@dataclass(slots=True)
class Attempted:
    """What became of the chunks of a step. failed: with what the model raised."""

    found: dict[str, list[Sampled]] = field(default_factory=dict)
    computed: list[Chunk] = field(default_factory=list)
    failed: list[tuple[Chunk, Exception]] = field(default_factory=list)


class ForwardAttempts:
    """most_tokens: of a step."""

    def __init__(self, forward: Forward, most_tokens: int) -> None:
        self._forward: Final = forward
        self._whole: Final = most_tokens
        self._most = most_tokens
        """Tokens of one forward that are tried."""
        self._steps_since = 0

    @property
    def is_limited(self) -> bool:
        """Whether forwards have fewer tokens for a while."""
        return self._most < self._whole

    def run(self, chunks: Sequence[Chunk]) -> Attempted:
        """Computes as many of the chunks as can be computed. Raises DeviceLost, and what is no Exception."""
        attempted, before = Attempted(), self._most
        self._run(chunks, attempted)
        if any(isinstance(error, OutOfMemory) for _, error in attempted.failed):
            # A request that never fits says nothing about the steps of the others.
            self._most = before
        return attempted

    def _run(self, chunks: Sequence[Chunk], attempted: Attempted) -> None:
        if self._most == self._whole:
            self._try(chunks, attempted)
            return
        self._steps_since += 1
        if self._steps_since >= _GROWS_AFTER:
            self._most, self._steps_since = min(self._whole, 2 * self._most), 0
        group: list[Chunk] = []
        room = self._most
        for chunk in (_cut(chunk, self._most) for chunk in chunks):
            if chunk.num_tokens > room:
                self._try(group, attempted)
                group, room = [], self._most
            group.append(chunk)
            room -= chunk.num_tokens
        self._try(group, attempted)

    def _try(self, chunks: Sequence[Chunk], attempted: Attempted) -> None:
        if not chunks:
            return
        try:
            attempted.found |= self._forward(chunks)
            attempted.computed += chunks
            return
        except DeviceLost:
            raise
        except Exception as error:  # a model may raise anything; only its own request fails
            caught = error
        # Outside of `except`: an exception in handling keeps everything that the failed forward had on the device.
        if is_exhausted := isinstance(caught, OutOfMemory):
            caught = OutOfMemory(str(caught))
            self._shrink(chunks)
        if len(chunks) > 1:
            middle = len(chunks) // 2
            self._try(chunks[:middle], attempted)
            self._try(chunks[middle:], attempted)
        elif is_exhausted and chunks[0].num_tokens > 1:
            self._try([_cut(chunks[0], chunks[0].num_tokens // 2)], attempted)
        else:
            logger.warning("a request of generation failed", exc_info=caught)
            attempted.failed.append((chunks[0], caught))

    def _shrink(self, chunks: Sequence[Chunk]) -> None:
        tokens = sum(chunk.num_tokens for chunk in chunks)
        self._most, self._steps_since = max(1, min(self._most, tokens // 2)), 0
        logger.warning("a step did not fit into the memory and is cut", extra={"tokens": tokens})


def _cut(chunk: Chunk, most: int) -> Chunk:
    """The beginning of a chunk. Drafts are left out first."""
    if chunk.num_tokens <= most:
        return chunk
    return Chunk(chunk.sequence, chunk.start, min(most, chunk.num_tokens - len(chunk.drafts)))
