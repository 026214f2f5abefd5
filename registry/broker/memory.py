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
from collections.abc import Mapping, Sequence

from msgspec import structs

from penstock.registry.broker.base import (
    Announced,
    CancelOutcome,
    Claim,
    Commit,
    CommitStatus,
    DeadLetter,
    Delivery,
    Depth,
    Event,
    Held,
    JobRecord,
    Limits,
    Publication,
    Receipt,
    Renewal,
    Replay,
    State,
    StreamEntry,
    WaitingEntry,
    Withdrawal,
)
from penstock.registry.broker.limits import DEAD_LETTERS_BYTES, FORGET_MS, REPLY_CAP, REPLY_TTL_MS
from penstock.registry.broker.memory_state import (
    NO_OWNER,
    ArmedClaim,
    Clock,
    EntryStream,
    MemoryState,
    StoredRecord,
    owner_for,
    parse_entry_id,
)
from penstock.registry.queues import Priority, crashes_key, events_key, slot_of

__all__ = ["MemoryBroker"]


class MemoryBroker:
    """A connection to a broker in memory. Thread-safe, except that one thread owns arm, fileno, collect and disarm."""

    def __init__(
        self,
        clock: Clock = time.time,
        *,
        result_ttl_ms: int = 3_600_000,
        dead_letters_bytes: int = DEAD_LETTERS_BYTES,
    ) -> None:
        self._state = MemoryState(clock, dead_letters_bytes)
        self._changed = self._state.changed
        self._result_ttl_ms = result_ttl_ms
        self._armed: ArmedClaim | None = None
        self._answered: int | None = None

    def connect(self) -> MemoryBroker:
        """Another connection to the same broker."""
        end = MemoryBroker(self._state.clock, result_ttl_ms=self._result_ttl_ms)
        end._state, end._changed = self._state, self._changed
        return end

    # Producers' end

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        with self._changed:
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
        with self._changed:
            records = [self._state.records.get(job_id) for job_id in job_ids]
            return [record.job_record() if record else None for record in records]

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.job_record."""
        with self._changed:
            record = self._state.records.get(job_id)
            if record is None:
                return None
            if record.state is not State.QUEUED:
                return record.job_record()
            record.is_followed |= subscribe
            left_ms = record.expires_ms - int(self._state.now_ms())
            found = structs.replace(record.job_record(), left_ms=left_ms)
            lease = self._state.queue(slot_of(job_id), record.priority).leases.get(record.entry_id)
            if lease is None:
                return found
            return structs.replace(record.job_record(lease), left_ms=left_ms)

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.cancel."""
        with self._changed:
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

    def expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """See ProducerEnd.expire."""
        with self._changed:
            return self._state.expire(job_id, tenant, sealed, self._result_ttl_ms)

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """See ProducerEnd.read. It waits in real time, not by the clock."""
        after = {key: parse_entry_id(cursor) for key, cursor in cursors.items()}
        with self._changed:
            found = self._state.entries_after(after, count)
            deadline = time.monotonic() + block_ms / 1000
            while not found and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                found = self._state.entries_after(after, count)
            return found

    def trim(self, key: str, before: str) -> None:
        """See ProducerEnd.trim."""
        with self._changed:
            stream = self._state.streams.get(key)
            if stream is not None:
                del stream.entries[: stream.position_after(parse_entry_id(before))]

    def nudge(self, key: str) -> None:
        """See ProducerEnd.nudge."""
        with self._changed:
            self._state.append(key, [b"", b""], cap=REPLY_CAP, ttl_ms=REPLY_TTL_MS)

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""
        return self._state.specs.get((slot, version))

    def announced(self, slot: str) -> Announced:
        """See ProducerEnd.announced."""
        with self._changed:
            return Announced(self.spec(slot), tuple(self._state.keyrings[slot].values()))

    # Workers' end

    def prepare(self, slots: Sequence[str]) -> None:
        """See WorkerEnd.prepare. Does nothing: a queue exists from its first use on."""

    def exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """See WorkerEnd.exchange."""
        with self._changed:
            statuses, finished = [], []
            for commit in commits:
                held = self._state.lease_of(consumer, commit.slot, commit.priority, commit.entry_id)
                statuses.append(self._state.commit(consumer, commit, result_ttl_ms))
                # A repeated commit is confirmed; the client was told at the first one.
                if held is not None and statuses[-1] is CommitStatus.COMMITTED:
                    finished.append(commit)
            self._tell_clients(finished)
            return statuses, [delivery for claim in claims for delivery in self._state.claim(consumer, claim)]

    def _tell_clients(self, commits: Sequence[Commit]) -> None:
        finished: defaultdict[tuple[str, str], list[tuple[str, StoredRecord]]] = defaultdict(list)
        for commit in commits:
            record = self._state.records.get(commit.job_id)
            if commit.reply and record is not None:
                finished[commit.slot, commit.reply].append((commit.job_id, record))
        for (slot, reply), jobs in finished.items():
            self._state.tell(slot, reply, jobs)

    def arm(self, consumer: str, slots: Sequence[str], count: int, block_ms: int) -> None:
        """See WorkerEnd.arm."""
        with self._changed:
            self._armed = ArmedClaim(
                consumer, tuple(slots), count, self._state.now_ms() + (block_ms or math.inf), self._wake
            )
            self._state.armed.append(self._armed)
            for slot in slots:
                self._state.serve_armed(slot)

    def _wake(self) -> None:
        if self._answered is not None:
            os.eventfd_write(self._answered, 1)

    def fileno(self) -> int:
        """See WorkerEnd.fileno. Jobs make it readable; the end of the time does not."""
        with self._changed:
            if self._answered is None:
                self._answered = os.eventfd(bool(self._armed and self._armed.claimed), os.EFD_NONBLOCK)
            return self._answered

    def collect(self) -> list[Delivery]:
        """See WorkerEnd.collect. Does not wait."""
        with self._changed:
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

    def drop_armed(self) -> None:
        """See WorkerEnd.drop_armed."""
        self.collect()

    def paused(self, slots: Sequence[str]) -> frozenset[str]:
        """See WorkerEnd.paused."""
        with self._changed:
            return frozenset(self._state.paused.intersection(slots))

    def renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        """See WorkerEnd.renew."""
        lost, cancelled = set(), set()
        with self._changed:
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
        with self._changed:
            before_ms = self._state.now_ms() - lease_ms
            if lease_ms < FORGET_MS:
                self._state.lease_ms[slot] = lease_ms
            return self._state.reassign(consumer, slot, lambda queue: queue.lapsed(before_ms), count)

    def adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        """See WorkerEnd.adopt."""
        receivers = {owner_for(version) for version in versions}
        with self._changed:
            return self._state.reassign(consumer, slot, lambda queue: queue.leased_to(receivers), count)

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        """See WorkerEnd.release."""
        with self._changed:
            for job in held:
                lease = self._state.lease_of(consumer, job.slot, job.priority, job.entry_id)
                if lease is not None:
                    lease.owner, lease.since_ms = NO_OWNER, -math.inf
                    if version:
                        lease.owner, lease.since_ms = owner_for(version), self._state.now_ms()
                    lease.deliveries -= 1

    def suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        """See WorkerEnd.suspect."""
        with self._changed:
            for job in jobs:
                if job.entry_id in self._state.queue(slot, job.priority).leases:
                    key = crashes_key(slot, job.priority, job.entry_id)
                    incidents = self._state.crashes.get(key) or frozenset()
                    self._state.crashes.put(key, incidents | {incident}, ttl_ms)

    def emit(self, consumer: str, held: Held, events: Sequence[Event], ttl_ms: int, *, after: int) -> int:
        """See WorkerEnd.emit."""
        with self._changed:
            record = self._state.records.get(held.job_id)
            if record is None or not self._state.lease_of(consumer, held.slot, held.priority, held.entry_id):
                return 0
            record.is_followed = True
            key = events_key(held.job_id)
            history = self._state.streams.get(key) or EntryStream((1, 0))
            attempt = consumer.encode() + b" " + held.entry_id
            if not history.contains(attempt, len(events), after):
                begin = [] if after else [Event("reset" if history.entries else "started", attempt)]
                for event in [*begin, *events]:
                    self._state.append_event(key, history, event, ttl_ms)
            return history.last_id[0]

    def dead_letter(
        self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b""
    ) -> bool:
        """See WorkerEnd.dead_letter."""
        with self._changed:
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
        with self._changed:
            if version or slot not in self._state.activated:
                self._state.specs[slot, version] = spec

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""
        with self._changed:
            return {slot: self._state.active(slot) for slot in slots}

    def report(self, worker: str, report: bytes, ttl_ms: int) -> None:
        """See WorkerEnd.report."""
        with self._changed:
            self._state.reports.pop(worker)
            if report:
                self._state.reports.put(worker, report, ttl_ms)

    def report_keys(self, slot: str, report: bytes, ttl_ms: int, *, is_live: bool = True) -> None:
        """See WorkerEnd.report_keys."""
        with self._changed:
            keyrings, name = self._state.keyrings[slot], report.decode()
            keyrings.pop(name)
            if is_live:
                keyrings.put(name, report, ttl_ms)

    def now_ms(self) -> float:
        """See WorkerEnd.now_ms."""
        return self._state.now_ms()

    # Operators

    def models(self) -> list[str]:
        """See FleetEnd.models."""
        with self._changed:
            return sorted({slot for slot, _ in self._state.specs})

    def depths(self, slot: str) -> list[Depth]:
        """See OperatorEnd.depths."""
        with self._changed:
            now_ms = self._state.now_ms()
            return [self._state.queue(slot, priority).depth(slot, priority, now_ms) for priority in Priority]

    def committed(self, slot: str) -> int:
        """See OperatorEnd.committed."""
        with self._changed:
            return self._state.slots[slot].committed

    def workers(self) -> list[bytes]:
        """See FleetEnd.workers."""
        with self._changed:
            return self._state.reports.values()

    def activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """See FleetEnd.activate."""
        with self._changed:
            known = self._state.activated.get(slot)
            if known is not None and known != (epoch, record) and known[0] >= epoch:
                return False
            self._state.activated[slot] = (epoch, record)
            self._state.specs[slot, ""] = self._state.specs[slot, version] = spec
            return True

    def pause(self, slot: str) -> None:
        """See OperatorEnd.pause. Armed claims are paused, too."""
        with self._changed:
            self._state.paused.add(slot)

    def resume(self, slot: str) -> None:
        """See OperatorEnd.resume."""
        with self._changed:
            self._state.paused.discard(slot)
            self._state.serve_armed(slot)

    def waiting(self, slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> list[WaitingEntry]:
        """See OperatorEnd.waiting."""
        cursor = parse_entry_id((after or b"0-0").decode())
        with self._changed:
            queue = self._state.queue(slot, priority)
            free = {entry_id: lease.sealed for entry_id, lease in queue.leases.items() if lease.owner == NO_OWNER}
            found = sorted(
                (parse_entry_id(entry_id.decode()), WaitingEntry(entry_id, sealed[:head_bytes]))
                for entry_id, sealed in {**free, **queue.waiting}.items()
            )
            return [waiting for order, waiting in found if order > cursor][:count]

    def queued_job(self, job_id: str) -> Delivery | None:
        """See OperatorEnd.queued_job."""
        with self._changed:
            return self._state.queued_job(job_id)

    def withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """See OperatorEnd.withdraw."""
        with self._changed:
            return sum(self._state.withdraw(slot, priority, job, result_ttl_ms) for job in jobs)

    def replay(
        self, slot: str, entry: str, job: Publication, job_ttl_ms: int, *, keeps_acceptance: bool = False
    ) -> Replay:
        """See OperatorEnd.replay."""
        with self._changed:
            outcome = self._state.replay(slot, entry, job, job_ttl_ms, keeps_acceptance)
            self._state.serve_armed(slot)
            return outcome

    def purge_dead(self, slot: str, entries: Sequence[str]) -> int:
        """See OperatorEnd.purge_dead."""
        with self._changed:
            letters = self._state.slots[slot].dead_letters
            return sum(letters.pop(entry, None) is not None for entry in entries)

    def dead_letters(self, slot: str, after: str = "", count: int = 100) -> list[DeadLetter]:
        """See OperatorEnd.dead_letters."""
        cursor = parse_entry_id(after or "0-0")
        with self._changed:
            letters = self._state.slots[slot].dead_letters.values()
            later = [letter for letter in letters if parse_entry_id(letter.entry) > cursor]
            return [structs.replace(letter, sealed=b"") for letter in later[:count]]

    def read_dead_letter(self, slot: str, entry: str) -> DeadLetter | None:
        """See OperatorEnd.read_dead_letter."""
        with self._changed:
            return self._state.slots[slot].dead_letters.get(entry)

    def close(self) -> None:
        """See Broker.close. The state lives as long as a connection does."""
        self.drop_armed()
        if self._answered is not None:
            os.close(self._answered)
            self._answered = None
