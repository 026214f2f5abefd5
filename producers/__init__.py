"""How work enters: clients that submit inference jobs and read their results. Programs import them from `penstock`."""

from __future__ import annotations

__all__: list[str] = []
