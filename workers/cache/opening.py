"""Settings -> the tiers of the cache behind a worker's memory: L2 on this machine's disk, L3 in Redis."""

from __future__ import annotations

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.cache.l3 import l3_of
from penstock.workers.cache.tier import Tier

__all__ = ["open_tiers"]


def open_tiers(settings: Settings, data_keys: DataKeys | None) -> list[Tier]:
    """The tiers of these settings, the nearest first; none in a privacy mode other than `persisted_encrypted`.

    No file is made and no connection opened where there is no tier. data_keys: None only where the settings encrypt
    nothing. Raises ConfigurationError for a tier that cannot be as the settings say.
    """
    inference = settings.inference
    cache, is_encrypted = inference.cache, inference.privacy.encrypt_at_rest
    if not inference.persists_answers:
        return []
    if is_encrypted and data_keys is None:
        raise ConfigurationError("The cache on disk has no data key. Expected one, or privacy.encrypt_at_rest = false")
    tiers: list[Tier] = []
    if cache.l2_max_bytes:
        config = L2CacheConfig(
            db_path=cache.l2_path,
            ttl_seconds=cache.ttl_seconds,
            encryption_key=data_keys if is_encrypted else None,
            max_bytes=cache.l2_max_bytes,
        )
        tiers.append(L2Cache(config))
    if (shared := l3_of(settings, data_keys)) is not None:
        tiers.append(shared)
    return tiers
