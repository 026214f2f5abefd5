"""The versions of models in one worker: which it has, which is active, and how they are loaded."""

from __future__ import annotations

__all__: list[str] = []
