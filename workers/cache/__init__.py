"""Answers that are kept so that an equal job needs no forward."""

from __future__ import annotations

from penstock.workers.cache.key import key_of
from penstock.workers.cache.memory import L1Cache

__all__ = ["L1Cache", "key_of"]
