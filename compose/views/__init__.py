"""The state of the fleet, read from the broker and drawn as tables."""

from __future__ import annotations

__all__: list[str] = []
