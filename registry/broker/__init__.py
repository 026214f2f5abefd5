"""The broker: `base` is the protocol with its rules. `redis_streams` and `memory` implement it."""

from __future__ import annotations

__all__: list[str] = []
