"""The contracts that every process shares: messages, names, broker, packages, catalog. Imports no other room."""

from __future__ import annotations

__all__: list[str] = []
