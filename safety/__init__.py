"""Safety: the gate, its validators and samples, the operator's keys, the audit log.

Decisions are pure functions of NumPy arrays. Only audit.py and keys.py use files. No module imports a framework, a
broker or a model.
"""

from __future__ import annotations

__all__: list[str] = []
