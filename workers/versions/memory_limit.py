"""The memory of all loaded versions together, and the versions to unload when it exceeds the setting."""

from __future__ import annotations

from typing import Final

from penstock.workers.versions.table import VersionTable
from penstock.workers.versions.version import ServedVersion

__all__ = ["MemoryLimit"]

_MIB: Final = 1 << 20


class MemoryLimit:
    """The limit `model_memory_mb`, in MiB; 0: none. The I/O thread owns it; `fits` is for any thread."""

    def __init__(self, limit_mb: int, table: VersionTable) -> None:
        self._limit = limit_mb * _MIB
        self._table = table

    def fits(self, version: ServedVersion) -> bool:
        """Whether the version fits beside the active versions, arms and requested ones; others can be unloaded."""
        if not self._limit:
            return True
        active = self._table.answering()
        staying = [each for each in tuple(self._table.turns) if each.is_ready and (each.is_wanted or each in active)]
        taken = sum(each.runtime.memory_bytes for each in staying if not each.shares_model)
        return taken + (version.spec.memory_mb or 0) * _MIB <= self._limit

    def excess_bytes(self) -> int:
        """The memory of the loaded versions beyond the limit."""
        loaded = [version for version in self._table.turns if version.is_ready and not version.shares_model]
        taken = sum(version.runtime.memory_bytes for version in loaded)
        return max(0, taken - self._limit) if self._limit else 0

    def to_unload(self) -> list[ServedVersion]:
        """The versions to unload now.

        Versions that no operator requested come first, active versions and arms come last; among equals the least
        recently used one comes first. Versions with jobs stay, and the most recently used version stays.
        """
        excess = self.excess_bytes()
        if not excess:
            return []
        active = self._table.answering()
        ready = [version for version in self._table.turns if version.is_ready and not version.shares_model]
        idle = [version for version in ready if version.is_idle and version.runtime.memory_bytes]
        idle.sort(key=lambda version: (version in active, version.is_wanted, version.used_at))
        latest = max((version.used_at for version in ready), default=0.0)
        chosen = []
        for version in idle:
            if excess > 0 and version.used_at < latest:
                chosen.append(version)
                excess -= version.runtime.memory_bytes
        return chosen
