"""One worker process: its device, heartbeat, stall detector, exit status and crash journal, and operators' requests."""

from __future__ import annotations

__all__: list[str] = []
