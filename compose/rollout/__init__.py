"""A change of version across all workers: packages, keys, control commands, and the wait for every replica."""

from __future__ import annotations

__all__: list[str] = []
