"""What exists: the contracts that every process shares, and the models. Imports nothing from the rooms above."""

from __future__ import annotations

__all__: list[str] = []
