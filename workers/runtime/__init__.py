"""How a model is run: one seam, and a runtime for each package format."""

from __future__ import annotations

from workers.runtime.base import Prepared, Runtime, StreamContext
from workers.runtime.open import open_runtime

__all__ = ["Prepared", "Runtime", "StreamContext", "open_runtime"]
