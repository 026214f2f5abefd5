"""The shadow queue: workers mirror answered jobs to it, and a shadow worker runs the candidate on them."""

from __future__ import annotations

__all__: list[str] = []
