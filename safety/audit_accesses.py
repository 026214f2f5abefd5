"""Look-ups in the response cache -> entries of the audit log: counts by model, tenant and tier, or a sample.

count -- any thread, takes no time --> flush, once a minute --> counted: one entry per model, version, tenant and tier
                                                                sampled: one entry for every 100th look-up
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from penstock.safety.audit import CACHE_ACCESS, AuditLogger

__all__ = ["AccessAudit", "CacheAccessAudit"]

AccessAudit = Literal["counted", "sampled", "off"]

_SAMPLE_EVERY: Final = 100
_MAX_KINDS: Final = 1000
_OTHERS: Final = "(others)"

logger = logging.getLogger("penstock.audit")


class _Kind(NamedTuple):
    model: str
    version: str
    tenant: str
    tier: str
    is_hit: bool


class CacheAccessAudit:
    """Records the look-ups of one worker. Without a record look-ups go on: failures are counted.

    on_failure: called when entries could not be written; they are tried again. clock: unix seconds.
    """

    def __init__(
        self,
        log: AuditLogger,
        how: AccessAudit,
        *,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._how = how
        self._on_failure = on_failure
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[_Kind] = Counter()
        self._rest: Counter[_Kind] = Counter()
        """Look-ups since the last sampled one, by kind."""
        self._since = clock()

    def count(self, model: str, version: str, tenant: str, tier: str, *, is_hit: bool, count: int) -> None:
        """Notes look-ups. Tenants beyond the first thousand kinds of a minute are counted together."""
        if self._how == "off":
            return
        kind = _Kind(model, version, tenant, tier, is_hit)
        with self._lock:
            if kind not in self._counts and len(self._counts) >= _MAX_KINDS:
                kind = kind._replace(tenant=_OTHERS)
            self._counts[kind] += count

    def flush(self) -> None:
        """Writes the entries of the look-ups since the last call. It may wait for the disk."""
        now = self._clock()
        with self._lock:
            counts, self._counts = self._counts, Counter()
            since, self._since = self._since, now
        try:
            if self._how == "sampled":
                self._write_samples(counts)
            else:
                self._write_counts(counts, since)
        except OSError as error:
            with self._lock:
                self._counts.update(counts)
                self._since = since
            self._on_failure()
            logger.warning("cache accesses could not be recorded", extra={"reason": error.strerror})

    def _write_counts(self, counts: Counter[_Kind], since: float) -> None:
        """Takes from `counts` the look-ups that were recorded. Raises OSError."""
        for model, version, tenant, tier in sorted({kind[:4] for kind in counts}):
            hit, miss = (_Kind(model, version, tenant, tier, is_hit) for is_hit in (True, False))
            details = {
                "version": version,
                "tenant": tenant,
                "tier": tier,
                "since": since,
                "hits": counts[hit],
                "misses": counts[miss],
            }
            self._log.log_event(CACHE_ACCESS, model, "cache", "counted", details)
            del counts[hit], counts[miss]

    def _write_samples(self, counts: Counter[_Kind]) -> None:
        """As `_write_counts`."""
        for kind in sorted(counts):
            details = {
                "version": kind.version,
                "tenant": kind.tenant,
                "tier": kind.tier,
                "sampled": f"1 of {_SAMPLE_EVERY}",
            }
            while self._rest[kind] + counts[kind] >= _SAMPLE_EVERY:
                self._log.log_event(CACHE_ACCESS, kind.model, "cache", "hit" if kind.is_hit else "miss", details)
                counts[kind] -= _SAMPLE_EVERY
            self._rest[kind] += counts.pop(kind)
        if len(self._rest) > 2 * _MAX_KINDS:
            self._rest.clear()
