"""The producers' end of Redis Streams: publish, read, cancel, expire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import (
    Announced,
    CancelOutcome,
    JobRecord,
    Limits,
    Publication,
    Rating,
    Receipt,
    StreamEntry,
)
from penstock.registry.broker.redis_connection import RedisConnection
from penstock.registry.broker.redis_reads import Steps, T, read_job_record, read_job_records
from penstock.registry.errors import BrokerDamaged

__all__ = ["RedisProducer"]


class RedisProducer(RedisConnection):
    """ProducerEnd on one Redis. Thread-safe."""

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        if (call := scripts.webhook_slot(slot, jobs)) is not None:
            self._run(call)
        return scripts.receipts(slot, jobs, self._run(scripts.publish(slot, jobs, limits)))

    def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """See ProducerEnd.job_records."""
        return self._run_steps(read_job_records(job_ids))

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.job_record."""
        try:
            return self._run_steps(read_job_record(job_id, subscribe=subscribe))
        except BrokerDamaged:
            # Another program has overwritten the record, and this user may not quarantine it. The job is lost.
            return None

    def _run_steps(self, steps: Steps[T]) -> T:
        answer: Any = None
        try:
            while True:
                answer = self._run(steps.send(answer))
        except StopIteration as end:
            found: T = end.value
            return found

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.cancel."""
        return self._cancel(job_id, tenant, sealed, unless_followed=False)

    def abandon(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.abandon."""
        return self._cancel(job_id, tenant, sealed, unless_followed=True)

    def _cancel(self, job_id: str, tenant: str, sealed: bytes, *, unless_followed: bool) -> CancelOutcome | JobRecord:
        call = scripts.cancel(job_id, tenant, sealed, self._result_ttl_ms, unless_followed=unless_followed)
        return scripts.cancelled(self._run(call))

    def follow(self, job_ids: Sequence[str], follower: str, ttl_ms: int) -> None:
        """See ProducerEnd.follow."""
        for call in scripts.follow(job_ids, follower, ttl_ms):
            self._run(call)

    def unfollow(self, job_ids: Sequence[str], follower: str) -> None:
        """See ProducerEnd.unfollow."""
        self.follow(job_ids, follower, 0)

    def expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """See ProducerEnd.expire."""
        return bool(self._run(scripts.expire(job_id, tenant, sealed, self._result_ttl_ms)))

    def rate(self, job_id: str, experiment: str, version: str, quality: float) -> Rating:
        """See ProducerEnd.rate."""
        return scripts.rated(self._run(scripts.rate(job_id, experiment, version, quality)))

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

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""
        return scripts.parse_actives(slots, self._run(scripts.actives(slots)))
