"""Jobs as a worker sees them, and a subscriber to those that stream."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from penstock.registry.tensors import Array, decode, encode

Chunk = dict[str, Array]


@dataclass
class Listener:
    """A subscriber's end of a streaming job."""

    job_id: str = "counter.0"
    tenant: str = "acme"
    is_cancelled: bool = False
    fractions: list[float] = field(default_factory=list)

    def progress(self, fraction: float) -> None:
        self.fractions.append(fraction)


def received(job: Mapping[str, Array]) -> dict[str, Array]:
    """The job as it is decoded: read-only views of the received bytes."""
    return decode(*encode(job))


def drained(stream: Generator[Chunk, None, dict[str, Array]]) -> tuple[list[Chunk], dict[str, Array]]:
    """(chunks, outputs) of a stream."""
    chunks = []
    while True:
        try:
            chunks.append(next(stream))
        except StopIteration as end:
            return chunks, end.value
