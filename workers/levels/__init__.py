"""Optimization levels: faster variants of loaded models are built, compared with the original, and enabled."""

from __future__ import annotations

__all__: list[str] = []
