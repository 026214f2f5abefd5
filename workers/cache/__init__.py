"""Equal jobs: they share a forward while they are here together, and a cached answer afterwards."""

from __future__ import annotations

from penstock.workers.cache.answers import AnswerCache
from penstock.workers.cache.key import key_of
from penstock.workers.cache.memory import L1Cache
from penstock.workers.cache.single_flight import SingleFlight

__all__ = ["AnswerCache", "L1Cache", "SingleFlight", "key_of"]
