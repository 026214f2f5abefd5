"""One worker process: its device, its heartbeat, its exit status, its crash journal, and operators' remote calls."""

from __future__ import annotations

__all__: list[str] = []
