"""Runs models: one interface, and a runtime for each package format."""

from __future__ import annotations

from penstock.workers.runtime.base import Prepared, Runtime, StreamContext
from penstock.workers.runtime.open import open_runtime

__all__ = ["Prepared", "Runtime", "StreamContext", "open_runtime"]
