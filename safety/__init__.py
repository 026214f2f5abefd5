"""Safety: the gate, its validators and samples, privacy, the keys, cached answers at rest, the audit log.

Decisions are pure functions of NumPy arrays. Only the modules of the audit log and of keys use files, and only hsm.py
uses a device. No module imports a framework, a broker or a model.
"""

from __future__ import annotations

__all__: list[str] = []
