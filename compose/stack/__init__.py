"""The embedded stack: Redis, workers and Flower as children of one supervisor."""

from __future__ import annotations

__all__: list[str] = []
