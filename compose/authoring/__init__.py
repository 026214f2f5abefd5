"""For authors of model packages: check a package, write a new one, write one from a model in memory."""

from __future__ import annotations

__all__: list[str] = []
