"""A broker in the memory of this process: the rules of base.py without a server, for tests and simulations.

No thread and no sleep: time is the clock that is passed in, and moving it lets leases lapse. `connect` makes another
connection to the same broker. Each worker needs its own one, because an armed claim belongs to a connection. The
state ends with the process.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from penstock.registry.broker.base import (
    ALL_BANDS,
    Announced,
    CancelOutcome,
    Claim,
    Commit,
    CommitStatus,
    Delivery,
    Emission,
    Held,
    JobRecord,
    Limits,
    Position,
    Publication,
    Quarantined,
    Rating,
    Receipt,
    Renewal,
    State,
    StreamEntry,
)
from penstock.registry.broker.limits import DEAD_LETTERS_BYTES, FORGET_MS, OBSERVATIONS_TTL_MS, REPLY_CAP, REPLY_TTL_MS
from penstock.registry.broker.memory_entry_ids import parse_entry_id
from penstock.registry.broker.memory_operator import MemoryOperatorEnd
from penstock.registry.broker.memory_queue import NO_OWNER, owner_for
from penstock.registry.broker.memory_record import StoredRecord, with_rating
from penstock.registry.broker.memory_state import ArmedClaim, MemoryState
from penstock.registry.broker.memory_streams import Clock
from penstock.registry.queues import crashes_key, events_key, experiment_key, ratings_key, slot_of

__all__ = ["MemoryBroker"]


class MemoryBroker(MemoryOperatorEnd):
    """A connection to a broker in memory. Thread-safe, except that one thread owns arm, fileno, collect and disarm."""

    def __init__(
        self,
        clock: Clock = time.time,
        *,
        result_ttl_ms: int = 3_600_000,
        dead_letters_bytes: int = DEAD_LETTERS_BYTES,
        shared: MemoryBroker | None = None,
    ) -> None:
        self._state = MemoryState(clock, dead_letters_bytes) if shared is None else shared._state
        self._changed, self._lock = self._state.changed, self._state.lock
        self._result_ttl_ms = result_ttl_ms
        self._armed: ArmedClaim | None = None
        self._answered: int | None = None
        self._last_report = b""

    def connect(self) -> MemoryBroker:
        """Another connection to the same broker."""
        return MemoryBroker(self._state.clock, result_ttl_ms=self._result_ttl_ms, shared=self)

    def lose_everything(self) -> None:
        """The server comes back empty. Connections and armed claims stay."""
        self.restore(MemoryState(self._state.clock, self._state.dead_letters_bytes).save())

    def save(self) -> dict[str, object]:
        """A snapshot of all data, for `restore`."""
        with self._lock:
            return self._state.save()

    def restore(self, saved: dict[str, object]) -> None:
        """The server comes back with the data of an earlier `save`. Connections and armed claims stay."""
        with self._lock:
            self._state.restore(saved)

    # Producers' end

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        with self._lock:
            refused = 0
            receipts = []
            for job in jobs:
                receipt = self._state.admit(slot, job, limits, refused + 1)
                refused += receipt.outcome in ("full", "tenant-full")
                receipts.append(receipt)
            self._state.serve_armed(slot)
            return receipts

    def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """See ProducerEnd.job_records."""
        with self._lock:
            records = [self._state.records.get(job_id) for job_id in job_ids]
            return [record.job_record() if record else None for record in records]

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.job_record."""
        with self._lock:
            record = self._state.records.get(job_id)
            if record is None:
                return None
            if record.state is not State.QUEUED:
                return record.job_record()
            record.is_followed |= subscribe
            left_ms = record.expires_ms - int(self._state.now_ms())
            lease = self._state.queue(slot_of(job_id), record.priority).leases.get(record.entry_id)
            return structs.replace(record.job_record(lease), left_ms=left_ms)

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.cancel."""
        with self._lock:
            record = self._state.records.get(job_id)
            if record is None:
                return CancelOutcome.UNKNOWN
            if record.state is not State.QUEUED:
                return record.job_record()
            if record.tenant != tenant:
                return CancelOutcome.UNKNOWN
            queue = self._state.queue(slot_of(job_id), record.priority)
            lease = queue.leases.get(record.entry_id)
            if lease is not None and lease.owner != NO_OWNER:
                record.is_cancel_requested = True
                return CancelOutcome.REQUESTED
            queue.remove(record.entry_id)
            self._state.slots[slot_of(job_id)].leave(tenant)
            self._state.settle(job_id, record, State.CANCELLED, sealed, self._result_ttl_ms)
            if record.reply:
                self._state.tell(slot_of(job_id), record.reply, [(job_id, record)])
            return CancelOutcome.CANCELLED

    def abandon(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.abandon."""
        with self._lock:
            record = self._state.records.get(job_id)
            is_live = record is not None and record.state is State.QUEUED and record.tenant == tenant
            if is_live and self._state.followers[job_id].values():
                return CancelOutcome.FOLLOWED
            return self.cancel(job_id, tenant, sealed)

    def follow(self, job_ids: Sequence[str], follower: str, ttl_ms: int) -> None:
        """See ProducerEnd.follow."""
        with self._lock:
            for job_id in job_ids:
                self._state.followers[job_id].put(follower, None, ttl_ms)

    def unfollow(self, job_ids: Sequence[str], follower: str) -> None:
        """See ProducerEnd.unfollow."""
        with self._lock:
            for job_id in job_ids:
                self._state.followers[job_id].pop(follower)

    def rate(self, job_id: str, experiment: str, version: str, quality: float) -> Rating:
        """See ProducerEnd.rate."""
        with self._lock:
            record = self._state.records.get(job_id)
            if record is None or record.state is State.QUEUED:
                return Rating.UNKNOWN
            if record.is_rated:
                return Rating.REPEATED
            record.is_rated = True
            key = ratings_key(slot_of(job_id), experiment)
            known = self._state.ratings.get(key) or {}
            self._state.ratings.put(
                key, {**known, version: with_rating(known.get(version, b""), quality)}, OBSERVATIONS_TTL_MS
            )
            return Rating.COUNTED

    def expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """See ProducerEnd.expire."""
        with self._lock:
            return self._state.expire(job_id, tenant, sealed, self._result_ttl_ms)

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """See ProducerEnd.read. It waits in real time, not by the clock."""
        after = {key: parse_entry_id(cursor) for key, cursor in cursors.items()}
        with self._lock:
            found = self._state.entries_after(after, count)
            if found or not block_ms:
                return found
            deadline = time.monotonic() + block_ms / 1000
            while not found and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                found = self._state.entries_after(after, count)
            return found

    def trim(self, key: str, before: str) -> None:
        """See ProducerEnd.trim."""
        with self._lock:
            stream = self._state.streams.get(key)
            if stream is not None:
                del stream.entries[: stream.position_after(parse_entry_id(before))]

    def nudge(self, key: str) -> None:
        """See ProducerEnd.nudge."""
        with self._lock:
            self._state.append(key, [b"", b""], cap=REPLY_CAP, ttl_ms=REPLY_TTL_MS)

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""
        return self._state.specs.get((slot, version))

    def announced(self, slot: str) -> Announced:
        """See ProducerEnd.announced."""
        with self._lock:
            return Announced(self.spec(slot), tuple(self._state.keyrings[slot].values()))

    # Workers' end

    def prepare(self, slots: Sequence[str]) -> None:
        """See WorkerEnd.prepare. Does nothing: a queue exists from its first use on."""

    def exchange(
        self,
        consumer: str,
        commits: Sequence[Commit],
        claims: Sequence[Claim],
        result_ttl_ms: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """See WorkerEnd.exchange."""
        with self._lock:
            statuses, finished = [], []
            for commit in commits:
                held = self._state.lease_of(consumer, commit.slot, commit.priority, commit.entry_id)
                statuses.append(self._state.commit(consumer, commit, result_ttl_ms))
                # A repeated commit is confirmed; the client was told at the first one.
                if held is not None and statuses[-1] is CommitStatus.COMMITTED:
                    finished.append(commit)
            self._tell_clients(finished)
            deliveries = [delivery for claim in claims for delivery in self._state.claim(consumer, claim)]
        if meanwhile is not None:
            meanwhile()
        return statuses, deliveries

    def _tell_clients(self, commits: Sequence[Commit]) -> None:
        finished: defaultdict[tuple[str, str], list[tuple[str, StoredRecord]]] = defaultdict(list)
        for commit in commits:
            record = self._state.records.get(commit.job_id)
            if commit.reply and record is not None:
                finished[commit.slot, commit.reply].append((commit.job_id, record))
        for (slot, reply), jobs in finished.items():
            self._state.tell(slot, reply, jobs)

    def arm(
        self, consumer: str, slots: Sequence[str], count: int, block_ms: int, bands: Mapping[str, int] = ALL_BANDS
    ) -> None:
        """See WorkerEnd.arm."""
        with self._lock:
            until_ms = self._state.now_ms() + (block_ms or math.inf)
            self._armed = ArmedClaim(consumer, tuple(slots), count, dict(bands), until_ms, self._wake)
            self._state.armed.append(self._armed)
            for slot in slots:
                self._state.serve_armed(slot)

    def _wake(self) -> None:
        if self._answered is not None:
            os.eventfd_write(self._answered, 1)

    def fileno(self) -> int:
        """See WorkerEnd.fileno. Jobs make it readable; the end of the time does not."""
        if self._answered is None:
            with self._lock:
                self._answered = os.eventfd(bool(self._armed and self._armed.claimed), os.EFD_NONBLOCK)
        return self._answered

    def collect(self) -> list[Delivery]:
        """See WorkerEnd.collect. Does not wait."""
        with self._lock:
            armed, self._armed = self._armed, None
            if armed is None:
                return []
            if not armed.claimed:
                self._state.armed.remove(armed)
            elif self._answered is not None:
                os.eventfd_read(self._answered)
            return armed.claimed

    def disarm(self) -> list[Delivery]:
        """See WorkerEnd.disarm."""
        return self.collect()

    def unblock(self) -> None:
        """See WorkerEnd.unblock."""
        with self._lock:
            if self._armed is not None:
                self._armed.until_ms = 0.0

    def drop_armed(self) -> None:
        """See WorkerEnd.drop_armed."""
        self.collect()

    def paused(self, slots: Sequence[str]) -> frozenset[str]:
        """See WorkerEnd.paused."""
        with self._lock:
            return frozenset(self._state.paused.intersection(slots))

    def renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        """See WorkerEnd.renew."""
        lost, cancelled = set(), set()
        with self._lock:
            for job in held:
                lease = self._state.lease_of(consumer, job.slot, job.priority, job.entry_id)
                if lease is None:
                    lost.add(job)
                    continue
                lease.since_ms = self._state.now_ms()
                record = self._state.records.get(job.job_id)
                if record is not None and record.is_cancel_requested:
                    cancelled.add(job.job_id)
        return Renewal(frozenset(lost), frozenset(cancelled))

    def take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        """See WorkerEnd.take_over."""
        with self._lock:
            before_ms = self._state.now_ms() - lease_ms
            if lease_ms < FORGET_MS:
                self._state.lease_ms[slot] = lease_ms
            return self._state.reassign(consumer, slot, lambda queue: queue.lapsed(before_ms), count)

    def adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        """See WorkerEnd.adopt."""
        receivers = {owner_for(version) for version in versions}
        with self._lock:
            return self._state.reassign(consumer, slot, lambda queue: queue.leased_to(receivers), count)

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        """See WorkerEnd.release."""
        with self._lock:
            for job in held:
                lease = self._state.lease_of(consumer, job.slot, job.priority, job.entry_id)
                if lease is not None:
                    lease.owner, lease.since_ms = NO_OWNER, -math.inf
                    if version:
                        lease.owner, lease.since_ms = owner_for(version), self._state.now_ms()
                    lease.deliveries -= 1

    def suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        """See WorkerEnd.suspect."""
        with self._lock:
            for job in jobs:
                if job.entry_id in self._state.queue(slot, job.priority).leases:
                    key = crashes_key(slot, job.priority, job.entry_id)
                    incidents = self._state.crashes.get(key) or frozenset()
                    self._state.crashes.put(key, incidents | {incident}, ttl_ms)

    def job_events(self, job_id: str) -> list[StreamEntry]:
        """See WorkerEnd.job_events."""
        with self._lock:
            return self._state.entries_after({events_key(job_id): (0, -1)}, 1 << 62)

    def emit(self, consumer: str, emissions: Sequence[Emission], ttl_ms: int, *, max_bytes: int) -> list[Position]:
        """See WorkerEnd.emit."""
        with self._lock:
            return [_emit(self._state, consumer, emission, ttl_ms, max_bytes) for emission in emissions]

    def dead_letter(
        self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b""
    ) -> bool:
        """See WorkerEnd.dead_letter."""
        with self._lock:
            slot, priority, entry_id = delivery.slot, delivery.priority, delivery.entry_id
            lease = self._state.lease_of(consumer, slot, priority, entry_id)
            if lease is None:
                return False
            record = self._state.records.get(job_id)
            is_job = record is not None and record.is_entry(priority, entry_id)
            self._state.add_dead_letter(delivery, reason, lease.deliveries, job_id if is_job else "")
            self._state.queue(slot, priority).remove(entry_id)
            if record is not None and is_job:
                self._state.slots[slot].leave(record.tenant)
                self._state.settle(job_id, record, State.DEAD, sealed, self._result_ttl_ms)
                if record.reply:
                    self._state.tell(slot, record.reply, [(job_id, record)])
            return True

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        """See WorkerEnd.put_spec."""
        with self._lock:
            if version or slot not in self._state.activated:
                self._state.specs[slot, version] = spec

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""
        with self._lock:
            return {slot: self._state.active(slot) for slot in slots}

    def announce(self, slot: str, spec: bytes, versions: Mapping[str, bytes], *, replaces: bool) -> None:
        """See WorkerEnd.announce."""
        with self._lock:
            specs = {} if slot in self._state.activated else {"": spec}
            for version, each in (specs | dict(versions)).items():
                if replaces or (slot, version) not in self._state.specs:
                    self._state.specs[slot, version] = each

    def report(self, worker: str, report: bytes, ttl_ms: int) -> bool:
        """See WorkerEnd.report."""
        with self._lock:
            known = self._state.reports.get(worker)
            self._state.reports.pop(worker)
            if report:
                self._state.reports.put(worker, report, ttl_ms)
            has_last = known is not None and known in (self._last_report, report)
            self._last_report = report
            return has_last

    def report_keys(self, slot: str, report: bytes, ttl_ms: int, *, is_live: bool = True) -> None:
        """See WorkerEnd.report_keys."""
        with self._lock:
            keyrings, name = self._state.keyrings[slot], report.decode()
            keyrings.pop(name)
            if is_live:
                keyrings.put(name, report, ttl_ms)

    def observe(self, slot: str, experiment: str, field: str, figures: bytes, ttl_ms: int) -> None:
        """See WorkerEnd.observe."""
        with self._lock:
            key = experiment_key(slot, experiment)
            known = self._state.experiments.get(key) or {}
            self._state.experiments.put(key, {**known, field: figures}, ttl_ms)

    def quarantine(self, slots: Sequence[str]) -> None:
        """See WorkerEnd.quarantine. No other program writes here."""

    def take_quarantined(self) -> list[Quarantined]:
        """See WorkerEnd.take_quarantined."""
        return []

    def now_ms(self) -> float:
        """See WorkerEnd.now_ms."""
        return self._state.now_ms()

    def close(self) -> None:
        """See Broker.close. The state lives as long as a connection does."""
        self.drop_armed()
        if self._answered is not None:
            os.close(self._answered)
            self._answered = None


def _emit(state: MemoryState, consumer: str, emission: Emission, ttl_ms: int, max_bytes: int) -> Position:
    held = emission.held
    record = state.records.get(held.job_id)
    if record is None or not state.lease_of(consumer, held.slot, held.priority, held.entry_id):
        return Position()
    record.is_followed = True
    return state.emit(emission, ttl_ms, max_bytes)
