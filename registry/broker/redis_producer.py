"""The producers' end of Redis Streams: publish, read, cancel, expire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import Announced, CancelOutcome, JobRecord, Limits, Publication, Receipt, StreamEntry
from penstock.registry.broker.record import parse_record
from penstock.registry.broker.redis_connection import RedisConnection
from penstock.registry.queues import record_key

__all__ = ["RedisProducer"]


class RedisProducer(RedisConnection):
    """ProducerEnd on one Redis. Thread-safe."""

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        return scripts.receipts(slot, jobs, self._run(scripts.publish(slot, jobs, limits)))

    def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """See ProducerEnd.job_records."""
        if not job_ids:
            return []
        records = self._run(["MGET", *map(record_key, job_ids)])
        return [None if record is None else parse_record(record) for record in records]

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.job_record."""
        return scripts.parse_job_record(self._run(scripts.job_record(job_id, subscribe=subscribe)))

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.cancel."""
        return scripts.cancelled(self._run(scripts.cancel(job_id, tenant, sealed, self._result_ttl_ms)))

    def expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """See ProducerEnd.expire."""
        return bool(self._run(scripts.expire(job_id, tenant, sealed, self._result_ttl_ms)))

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """See ProducerEnd.read."""
        return scripts.entries(self._run(scripts.read(cursors, block_ms, count, self.timeout_s)))

    def trim(self, key: str, before: str) -> None:
        """See ProducerEnd.trim."""
        self._run(scripts.trim(key, before))

    def nudge(self, key: str) -> None:
        """See ProducerEnd.nudge."""
        for command in scripts.nudge(key):
            self._run(command)

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""
        found: bytes | None = self._run(scripts.spec(slot, version))
        return found

    def announced(self, slot: str) -> Announced:
        """See ProducerEnd.announced."""
        return scripts.parse_announced(self._run(scripts.announced(slot)))
