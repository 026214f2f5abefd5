"""Memory and CPU of the processes of a soak run, sampled; kept as sums for each tenth of the run.

A worker that is killed and started again keeps its role: its memory is that of all its lives, its CPU their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.benchmarks import meter

__all__ = ["PARTS", "Level", "Resources"]

PARTS: Final = 10
"""Parts of the run, by jobs that have ended."""


@dataclass(slots=True)
class Level:
    """Bytes in one part of the run."""

    total: int = 0
    samples: int = 0
    most: int = 0

    def add(self, value: int) -> None:
        """One sample."""
        self.total += value
        self.samples += 1
        self.most = max(self.most, value)

    @property
    def mean(self) -> float:
        """0 without a sample."""
        return self.total / self.samples if self.samples else 0.0


@dataclass(slots=True)
class Resources:
    """By role: the memory in each part of the run, and CPU seconds."""

    memory: dict[str, list[Level]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    _cpu_before: dict[int, float] = field(default_factory=dict)

    def sample(self, part: int, pids: Mapping[str, int]) -> None:
        """All processes as they are now. part: from 0 to PARTS - 1."""
        now = {}
        for role, pid in pids.items():
            try:
                self.note(part, role, meter.resident_bytes(pid))
            except OSError:
                # It was killed a moment ago.
                continue
            now[pid] = meter.cpu_seconds([pid])
            self.cpu_s[role] = self.cpu_s.get(role, 0.0) + now[pid] - self._cpu_before.get(pid, 0.0)
        self._cpu_before = now

    def note(self, part: int, role: str, value: int) -> None:
        """One sample of a role's memory."""
        self.memory.setdefault(role, [Level() for _ in range(PARTS)])[part].add(value)
