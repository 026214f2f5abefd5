"""After a rotation of keys: entries on disk that an older key sealed -> sealed by the first key, beside the jobs.

Rekeying.begin, at the start of a worker --> its thread --> Upkeep.rekey, page by page, with a pause after each

It may end at any time: what is left is sealed again at the next start, or by another worker of the machine.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from penstock.registry.errors import ConfigurationError
from penstock.safety.keys import Audit
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l2 import L2Cache
from penstock.workers.cache.tier import Tier

__all__ = ["Rekeying"]

_PAUSE_S: Final = 0.05
"""After each page of entries: jobs and their look-ups come first."""

logger = logging.getLogger("penstock.server")


class _Stopped(Exception):
    """The worker ends."""


class Rekeying:
    """Seals the entries of one cache again, on a thread of its own. audit: records that; see safety/keys.py."""

    def __init__(self, cache: L2Cache, audit: Audit) -> None:
        self._cache = cache
        self._audit = audit
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache-rekey", daemon=True)

    @classmethod
    def begin(cls, tiers: Iterable[Tier], data_keys: DataKeys | None, audit: Audit) -> Rekeying | None:
        """Begin, if there is a tier on disk and more than one key; None if there is nothing to do."""
        on_disk = [tier for tier in tiers if isinstance(tier, L2Cache)]
        if not on_disk or data_keys is None or len(data_keys.ids) < 2:
            return None
        rekeying = cls(on_disk[0], audit)
        rekeying._thread.start()
        return rekeying

    def stop(self, timeout_s: float = 2.0) -> None:
        """End within one page."""
        self._is_stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            found = asdict(self._cache.rekey(self._wait))
            if found["resealed"]:
                logger.info("cached answers are sealed with the first key", extra=found)
                self._audit("reseal", "done", found)
        except _Stopped:
            pass
        except (sqlite3.Error, OSError, ConfigurationError) as error:
            logger.warning("cached answers keep the seals of older keys for now: %s", error)

    def _wait(self, _done: int, _total: int) -> None:
        if self._is_stopping.wait(_PAUSE_S):
            raise _Stopped
