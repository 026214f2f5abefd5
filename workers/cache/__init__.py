"""Equal jobs: they share a forward while they are here together, and a cached answer afterwards."""

from __future__ import annotations

from penstock.workers.cache.answers import AnswerCache
from penstock.workers.cache.input_samples import InputSamples
from penstock.workers.cache.key import JobKeys
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.cache.l3 import L3Cache, L3CacheConfig
from penstock.workers.cache.memory import L1Cache
from penstock.workers.cache.single_flight import SingleFlight
from penstock.workers.cache.texts import CachedTexts, may_share_text
from penstock.workers.cache.tiers import SharedTiers

__all__ = [
    "AnswerCache",
    "CachedTexts",
    "InputSamples",
    "JobKeys",
    "L1Cache",
    "L2Cache",
    "L2CacheConfig",
    "L3Cache",
    "L3CacheConfig",
    "SharedTiers",
    "SingleFlight",
    "may_share_text",
]
