"""The state of the fleet and of the registry: read as plain data for JSON, and drawn as tables."""

from __future__ import annotations

__all__: list[str] = []
