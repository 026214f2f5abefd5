"""Single jobs as the commands handle them: inputs and outputs as JSON, dead letters, and the purge of a queue."""

from __future__ import annotations

__all__: list[str] = []
