"""What may be believed and what may change: pure decisions on NumPy arrays, with callables for all else.

Only audit.py and keys.py touch files. Nothing here imports a framework, a broker or a model.
"""

from __future__ import annotations

__all__: list[str] = []
