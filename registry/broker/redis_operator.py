"""The operators' end of Redis Streams: queues, pauses, dead letters, versions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.registry.broker import meters
from penstock.registry.broker import redis_letters as letters
from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import (
    DeadLetter,
    Delivery,
    Depth,
    Publication,
    Quarantined,
    Replay,
    Usage,
    WaitingEntry,
    Withdrawal,
)
from penstock.registry.broker.foreign_keys import parse_quarantined
from penstock.registry.broker.record import parse_place
from penstock.registry.broker.redis_specs import RedisSpecs
from penstock.registry.queues import (
    MODELS_KEY,
    WORKERS_KEY,
    Priority,
    experiment_key,
    flow_key,
    paused_key,
    quarantine_key,
    ratings_key,
    record_key,
    slot_of,
    stream_key,
    worker_key,
)

__all__ = ["RedisOperator"]

_DELETES_PER_CALL = 256
"""Dead letters that one call deletes, so that no call holds the server for long."""


class RedisOperator(RedisSpecs):
    """OperatorEnd on one Redis. Thread-safe."""

    def models(self) -> list[str]:
        """See FleetEnd.models."""
        return sorted(name.decode() for name in self._run(["SMEMBERS", MODELS_KEY]))

    def depths(self, slot: str) -> list[Depth]:
        """See OperatorEnd.depths."""
        begun = time.monotonic()
        answer = self._run(scripts.depths(slot))
        self._note_clock(answer[0], begun)
        return scripts.measured(slot, answer)

    def usage(self, slot: str) -> dict[tuple[str, str], Usage]:
        """See OperatorEnd.usage."""
        return meters.parse_usage(self._run(meters.usage(slot)))

    def committed(self, slot: str) -> int:
        """See OperatorEnd.committed."""
        found = self._run(["HGET", flow_key(slot), "done"]) or b""
        # Another program may have written to the field.
        return int(found) if found.isdigit() else 0

    def workers(self) -> list[bytes]:
        """See FleetEnd.workers."""
        names = [name.decode() for name in self._run(["ZRANGE", WORKERS_KEY, 0, -1])]
        if not names:
            return []
        reports = self._run(["MGET", *map(worker_key, names)])
        gone = [name for name, report in zip(names, reports, strict=True) if report is None]
        if gone:
            self._run(["ZREM", WORKERS_KEY, *gone])
        return [report for report in reports if report is not None]

    def activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """See FleetEnd.activate."""
        is_active = bool(self._run(scripts.activate(slot, epoch, record, version, spec)))
        self._run(["SADD", MODELS_KEY, slot])
        return is_active

    def observations(self, slot: str, experiment: str) -> dict[str, bytes]:
        """See FleetEnd.observations."""
        answer = self._run(["HGETALL", experiment_key(slot, experiment)])
        fields = [field.decode(errors="replace") for field in answer[::2]]
        return dict(zip(fields, answer[1::2], strict=True))

    def ratings(self, slot: str, experiment: str) -> dict[str, bytes]:
        """See FleetEnd.ratings."""
        answer = self._run(["HGETALL", ratings_key(slot, experiment)])
        fields = [field.decode(errors="replace") for field in answer[::2]]
        return dict(zip(fields, answer[1::2], strict=True))

    def pause(self, slot: str) -> None:
        """See OperatorEnd.pause."""
        # With GET, SET refuses a key of another type.
        self._run(["SET", paused_key(slot), int(self.now_ms()), "GET"])

    def resume(self, slot: str) -> None:
        """See OperatorEnd.resume."""
        # GET refuses a key of another type. It is quarantined and not deleted.
        self._run(["GET", paused_key(slot)])
        self._run(["DEL", paused_key(slot)])

    def waiting(self, slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> list[WaitingEntry]:
        """See OperatorEnd.waiting."""
        return letters.parse_waiting(self._run(letters.waiting(slot, priority, after, count, head_bytes)))

    def newest_entry(self, slot: str, priority: Priority) -> bytes:
        """See OperatorEnd.newest_entry."""
        newest = self._run(["XREVRANGE", stream_key(slot, priority), "+", "-", "COUNT", 1])
        entry_id: bytes = newest[0][0] if newest else b""
        return entry_id

    def queued_job(self, job_id: str) -> Delivery | None:
        """See OperatorEnd.queued_job."""
        record = self._run(["GET", record_key(job_id)])
        place = parse_place(record) if record else None
        if place is None:
            return None
        slot, (priority, entry_id) = slot_of(job_id), place
        entries, incidents = (self._run(call) for call in scripts.queued_job(slot, priority, entry_id))
        return scripts.parse_queued_job(slot, priority, entries, incidents)

    def withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """See OperatorEnd.withdraw."""
        return letters.withdrawn(self._run(letters.withdraw(slot, priority, jobs, result_ttl_ms))) if jobs else 0

    def replay(
        self, slot: str, entry: str, job: Publication, job_ttl_ms: int, *, keeps_acceptance: bool = False
    ) -> Replay:
        """See OperatorEnd.replay."""
        return letters.replayed(self._run(letters.replay(slot, entry, job, job_ttl_ms, keeps_acceptance)))

    def purge_dead(self, slot: str, entries: Sequence[str]) -> int:
        """See OperatorEnd.purge_dead."""
        starts = range(0, len(entries), _DELETES_PER_CALL)
        chunks = [entries[start : start + _DELETES_PER_CALL] for start in starts]
        return sum(self._run(letters.purge_dead(slot, chunk)) for chunk in chunks)

    def dead_letters(self, slot: str, after: str = "", count: int = 100) -> list[DeadLetter]:
        """See OperatorEnd.dead_letters."""
        return letters.listed_dead(slot, self._run(letters.list_dead(slot, after, count)))

    def read_dead_letter(self, slot: str, entry: str) -> DeadLetter | None:
        """See OperatorEnd.read_dead_letter."""
        return letters.parse_dead_letter(slot, self._run(letters.read_dead_letter(slot, entry)))

    def quarantined(self, slot: str = "") -> list[Quarantined]:
        """See OperatorEnd.quarantined."""
        names = self._run(["ZRANGE", quarantine_key(slot), 0, -1])
        return [parse_quarantined(name.decode(errors="replace")) for name in names if self._run(["EXISTS", name])]
