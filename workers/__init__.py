"""How work leaves: `drain.py` follows a job from its claim to its commit; `app.py` is the process around it."""

from __future__ import annotations

__all__: list[str] = []
