"""The versions of models in one worker: which ones it has, which one answers, and how they are loaded."""

from __future__ import annotations

__all__: list[str] = []
