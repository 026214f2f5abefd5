"""The state of the broker in memory: queues, leases, records, streams, dead letters. No thread, no sleep.

MemoryState      everything that a server would hold, behind one lock
  MemorySlot     memory_queue.py: one model: four queues, dead letters, jobs in flight, the rate of commits
  StoredRecord   memory_record.py: one job: its record, then its result
  MemoryStreams  memory_streams.py: reply and event streams
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from penstock.registry.broker.base import (
    Claim,
    Commit,
    CommitStatus,
    DeadLetter,
    Delivery,
    Limits,
    Publication,
    Receipt,
    Replay,
    State,
    Usage,
    Withdrawal,
)
from penstock.registry.broker.incidents import exceeded_limit_s
from penstock.registry.broker.limits import CLAIM_BYTES, DEAD_LETTERS_CAP, DEFAULT_LEASE_MS, OUTLIVES_MS
from penstock.registry.broker.memory_entry_ids import next_entry_id
from penstock.registry.broker.memory_expiring import Expiring
from penstock.registry.broker.memory_queue import BANDS, NO_OWNER, Lease, MemoryQueue, MemorySlot
from penstock.registry.broker.memory_record import StoredRecord, record_of
from penstock.registry.broker.memory_streams import Clock, EntryStream, MemoryStreams
from penstock.registry.broker.memory_webhooks import MemoryWebhooks
from penstock.registry.queues import Priority, crashes_key, events_key, idempotency_key, slot_of

__all__ = ["ArmedClaim", "MemoryState"]

_DATA: Final = (
    *("slots", "records", "idempotency", "streams", "reports", "keyrings", "crashes"),
    *("specs", "activated", "paused", "lease_ms", "webhooks", "experiments", "ratings"),
    *("usage", "followers"),
)
"""The attributes of MemoryState that hold data."""


@dataclass(slots=True, eq=False)
class ArmedClaim:
    """The blocking claim of a worker. `claimed` is its answer; `wake` is called when it has one."""

    consumer: str
    slots: tuple[str, ...]
    count: int
    bands: Mapping[str, int]
    until_ms: float
    wake: Callable[[], None]
    claimed: list[Delivery] = field(default_factory=list)


class MemoryState(MemoryStreams):
    """The state that a server would hold. The caller holds `lock` during every method: each is one step."""

    def __init__(self, clock: Clock, dead_letters_bytes: int) -> None:
        super().__init__(clock)
        self.dead_letters_bytes = dead_letters_bytes
        self.slots: defaultdict[str, MemorySlot] = defaultdict(MemorySlot)
        self.records: Expiring[StoredRecord] = Expiring(self.now_ms)
        self.idempotency: Expiring[tuple[str, str]] = Expiring(self.now_ms)
        """Fingerprint and job id by idempotency key."""
        self.reports: Expiring[bytes] = Expiring(self.now_ms)
        self.keyrings: defaultdict[str, Expiring[bytes]] = defaultdict(lambda: Expiring(self.now_ms))
        self.followers: defaultdict[str, Expiring[None]] = defaultdict(lambda: Expiring(self.now_ms))
        """The processes that wait for a job, by its id."""
        self.crashes: Expiring[frozenset[str]] = Expiring(self.now_ms)
        """Incidents by entry; see crashes_key."""
        self.experiments: Expiring[dict[str, bytes]] = Expiring(self.now_ms)
        """What workers have counted, by experiment_key and field."""
        self.ratings: Expiring[dict[str, bytes]] = Expiring(self.now_ms)
        """The quality that clients have reported, by ratings_key and version."""
        self.usage: defaultdict[str, dict[tuple[str, str], Usage]] = defaultdict(dict)
        """By slot, account and month."""
        self.specs: dict[tuple[str, str], bytes] = {}
        """By slot and version; the empty version stands for the active one."""
        self.activated: dict[str, tuple[int, bytes]] = {}
        """Epoch and record by slot."""
        self.paused: set[str] = set()
        self.armed: list[ArmedClaim] = []
        self.webhooks = MemoryWebhooks(self.now_ms)
        self.lease_ms: dict[str, int] = {}
        """By slot: the lease that its workers take."""

    def save(self) -> dict[str, object]:
        """A copy of the data that a server's disk would hold."""
        return copy.deepcopy({name: getattr(self, name) for name in _DATA})

    def restore(self, saved: Mapping[str, object]) -> None:
        """Put the data of `save` in the place of the present data."""
        for name, value in copy.deepcopy(dict(saved)).items():
            setattr(self, name, value)
        self.changed.notify_all()

    def queue(self, slot: str, priority: Priority) -> MemoryQueue:
        """The queue of this slot and priority."""
        return self.slots[slot].queues[priority]

    def active(self, slot: str) -> bytes:
        """The record of the active version, as deliveries carry it."""
        activated = self.activated.get(slot)
        return b"%d %s" % activated if activated else b""

    def lease_of(self, consumer: str, slot: str, priority: Priority, entry_id: bytes) -> Lease | None:
        """The lease of the entry, if this consumer holds it."""
        lease = self.queue(slot, priority).leases.get(entry_id)
        return lease if lease is not None and lease.owner == consumer else None

    def admit(self, slot: str, job: Publication, limits: Limits, refusals: int) -> Receipt:
        """Accept or refuse one job. `refusals`: refusals for want of room in this call, this job included."""
        if job.idempotency_digest and (first := self.idempotency.get(idempotency_key(slot, job.idempotency_digest))):
            fingerprint, first_id = first
            known = fingerprint == job.fingerprint
            return Receipt("known", first_id) if known else Receipt("conflict", job.job_id)
        if (record := self.records.get(job.job_id)) is not None:
            comes_here = record.state is State.QUEUED and (record.tenant, record.reply) == (job.tenant, job.reply)
            return Receipt("accepted" if comes_here else "exists", job.job_id)
        flow, queue = self.slots[slot], self.queue(slot, job.priority)
        most = limits.tenant_max_in_flight
        is_full = len(queue) >= limits.max_depth
        if is_full or (most and flow.in_flight.get(job.tenant, 0) >= most):
            retry_after_s = flow.retry_after_s(refusals, self.now_ms())
            return Receipt("full" if is_full else "tenant-full", job.job_id, retry_after_s)
        entry_id = queue.add(job.sealed, self.now_ms())
        # Not from the entry id: after a clock went back, ids stay ahead of it.
        expires_ms = int(self.now_ms()) + job.lifetime_ms(limits.job_ttl_ms)
        record = record_of(job, entry_id, expires_ms)
        self.records.put(job.job_id, record, limits.job_ttl_ms + OUTLIVES_MS)
        if job.idempotency_digest:
            self.idempotency.put(
                idempotency_key(slot, job.idempotency_digest),
                (job.fingerprint, job.job_id),
                limits.job_ttl_ms + OUTLIVES_MS,
            )
        flow.in_flight[job.tenant] += 1
        if job.account:
            self._use(slot, job.account, Usage(1, job.prompt_tokens))
        return Receipt("accepted", job.job_id)

    def _use(self, slot: str, account: str, more: Usage) -> None:
        month = datetime.fromtimestamp(self.now_ms() / 1000, UTC).strftime("%Y-%m")
        before = self.usage[slot].get((account, month), Usage())
        self.usage[slot][account, month] = Usage(*map(sum, zip(before, more, strict=True)))

    def claim(self, consumer: str, claim: Claim) -> list[Delivery]:
        """Claim jobs, most urgent first; see Claim for the reserve."""
        if claim.slot in self.paused or not self.slots[claim.slot].has_waiting:
            return []
        found: list[Delivery] = []
        bands, visited, left_bytes = BANDS[: claim.bands], 0, min(claim.credit_bytes, CLAIM_BYTES)
        urgent = claim.credit - claim.reserve

        def take(band: Priority, count: int) -> None:
            nonlocal left_bytes
            taken = self.hand_out(consumer, claim.slot, band, count, left_bytes)
            left_bytes -= sum(len(delivery.sealed) for delivery in taken)
            found.extend(taken)

        while len(found) < urgent and left_bytes > 0 and visited < len(bands):
            take(bands[visited], urgent - len(found))
            visited += 1
        if len(found) < urgent and left_bytes > 0:
            return found
        for band in self._aged(claim, bands[visited:]) if claim.credit > len(found) and claim.reserve else ():
            left_bytes = max(1, left_bytes)
            take(band, min(claim.reserve, claim.credit - len(found)))
        for band in bands[max(visited - 1, 0) :]:
            take(band, claim.credit - len(found))
        return found

    def _aged(self, claim: Claim, bands: Sequence[Priority]) -> list[Priority]:
        """The priority whose oldest job has waited longest, if that is longer than `ageing_ms`."""
        before_ms = self.now_ms() - claim.ageing_ms
        heads = [(head_ms, band) for band in bands if (head_ms := self.queue(claim.slot, band).head_ms()) is not None]
        aged = [(head_ms, band) for head_ms, band in heads if head_ms <= before_ms]
        return [min(aged)[1]] if aged else []

    def hand_out(
        self, consumer: str, slot: str, priority: Priority, count: int, nbytes: float = math.inf
    ) -> list[Delivery]:
        """Claim up to `count` waiting jobs of one queue, and no further one when they have reached `nbytes`."""
        queue = self.queue(slot, priority)
        if not queue.waiting:
            return []
        active = self.active(slot)
        return [
            Delivery(
                slot,
                priority,
                entry_id,
                sealed,
                accepted_first_ms=queue.accepted_first_ms.get(entry_id, 0),
                active=active,
            )
            for entry_id, sealed in queue.take(consumer, count, self.now_ms(), nbytes)
        ]

    def reassign(
        self, consumer: str, slot: str, choose: Callable[[MemoryQueue], Sequence[bytes]], count: int
    ) -> list[Delivery]:
        """Give up to `count` leased jobs of a slot to another consumer. `choose` names those of a queue."""
        found: list[Delivery] = []
        if slot in self.paused or not self.slots[slot].has_leases:
            return found
        for priority, queue in zip(BANDS, self.slots[slot].queues, strict=True):
            for entry_id in choose(queue)[: count - len(found)] if queue.leases else ():
                lease = queue.leases[entry_id]
                lease.owner, lease.since_ms = consumer, self.now_ms()
                lease.deliveries += 1
                incidents = self.crashes.get(crashes_key(slot, priority, entry_id)) or frozenset()
                found.append(
                    Delivery(
                        slot,
                        priority,
                        entry_id,
                        lease.sealed,
                        lease.deliveries,
                        len(incidents),
                        queue.accepted_first_ms.get(entry_id, 0),
                        self.active(slot),
                        exceeded_limit_s(incidents),
                    )
                )
        return found

    def queued_job(self, job_id: str) -> Delivery | None:
        """See OperatorEnd.queued_job."""
        record, slot = self.records.get(job_id), slot_of(job_id)
        if record is None or record.state is not State.QUEUED:
            return None
        priority, entry_id = record.priority, record.entry_id
        queue = self.queue(slot, priority)
        lease = queue.leases.get(entry_id)
        sealed = lease.sealed if lease is not None else queue.waiting[entry_id]
        incidents = self.crashes.get(crashes_key(slot, priority, entry_id)) or frozenset()
        return Delivery(
            slot,
            priority,
            entry_id,
            sealed,
            crashes=len(incidents),
            accepted_first_ms=queue.accepted_first_ms.get(entry_id, 0),
            exceeded_s=exceeded_limit_s(incidents),
        )

    def serve_armed(self, slot: str) -> None:
        """Answer armed claims with waiting jobs, in the order in which the claims were armed."""
        if not self.armed or slot in self.paused or not self.slots[slot].has_waiting:
            return
        now_ms = self.now_ms()
        for armed in [claim for claim in self.armed if slot in claim.slots and now_ms < claim.until_ms]:
            armed.claimed += [
                delivery
                for priority in BANDS[: armed.bands.get(slot)]
                for delivery in self.hand_out(armed.consumer, slot, priority, armed.count)
            ]
            if armed.claimed:
                self.armed.remove(armed)
                armed.wake()

    def commit(self, consumer: str, commit: Commit, result_ttl_ms: int) -> CommitStatus:
        """Commit one job; no effect unless the consumer holds it."""
        if self.lease_of(consumer, commit.slot, commit.priority, commit.entry_id) is None:
            settled = self.records.get(commit.job_id)
            is_ours = settled is not None and (settled.state, settled.result) == (commit.state, commit.sealed)
            return CommitStatus.COMMITTED if is_ours else CommitStatus.FENCED
        self.queue(commit.slot, commit.priority).remove(commit.entry_id)
        record = self.records.get(commit.job_id)
        if record is not None and record.state is not State.QUEUED:
            # The job was counted out when it ended. This entry was a second copy of its message.
            return CommitStatus.GONE
        self.slots[commit.slot].leave(commit.tenant)
        if record is None:
            return CommitStatus.GONE
        self.slots[commit.slot].committed += 1
        if commit.account:
            self._use(commit.slot, commit.account, Usage(0, commit.prompt_tokens, commit.generated_tokens))
        self.settle(commit.job_id, record, commit.state, commit.sealed, result_ttl_ms)
        return CommitStatus.COMMITTED

    def add_dead_letter(self, delivery: Delivery, reason: str, deliveries: int, job_id: str) -> None:
        """Add a dead letter, and delete the oldest ones beyond the limits. `job_id` is empty if it was no job."""
        slot, priority, entry_id = delivery.slot, delivery.priority, delivery.entry_id
        place = self.slots[slot]
        place.last_dead_id = next_entry_id(place.last_dead_id, self.now_ms())
        key = crashes_key(slot, priority, entry_id)
        record = self.records.get(job_id) if job_id else None
        letter = DeadLetter(
            slot,
            "{}-{}".format(*place.last_dead_id),
            reason,
            priority,
            entry_id.decode(),
            delivery.accepted_ms,
            deliveries,
            len(self.crashes.get(key) or ()),
            len(delivery.sealed),
            job_id,
            record.tenant if record else "",
            delivery.sealed,
        )
        self.crashes.pop(key)
        letters = place.dead_letters
        letters[letter.entry] = letter
        size = sum(each.size for each in letters.values())
        while len(letters) > 1 and (len(letters) > DEAD_LETTERS_CAP or size > self.dead_letters_bytes):
            size -= letters.pop(next(iter(letters))).size

    def withdraw(self, slot: str, priority: Priority, job: Withdrawal, ttl_ms: int) -> bool:
        """Remove an entry that no consumer holds, and end its job if that has a record."""
        queue = self.queue(slot, priority)
        lease = queue.leases.get(job.entry_id)
        if lease.owner != NO_OWNER if lease else job.entry_id not in queue.waiting:
            return False
        queue.remove(job.entry_id)
        record = self.records.get(job.job_id)
        if record is not None and record.is_entry(priority, job.entry_id):
            self.slots[slot].leave(record.tenant)
            self.settle(job.job_id, record, job.state, job.sealed, ttl_ms)
            if record.reply:
                self.tell(slot, record.reply, [(job.job_id, record)])
        elif record is None and job.tenant:
            # The record has expired, but the job still counts as in flight.
            self.slots[slot].leave(job.tenant)
        return True

    def replay(self, slot: str, entry: str, job: Publication, job_ttl_ms: int, keeps_acceptance: bool) -> Replay:
        """Put a dead letter back into its queue."""
        letters = self.slots[slot].dead_letters
        record, letter = self.records.get(job.job_id), letters.get(entry)
        is_live = record is not None and record.state is State.QUEUED
        if letter is None:
            return Replay.REPLAYED if is_live else Replay.MISSING
        queue = self.queue(slot, job.priority)
        accepted_as = letter.accepted_as.encode()
        is_orphan = record is not None and record.is_entry(job.priority, accepted_as) and not queue.has(accepted_as)
        if is_live and not is_orphan:
            return Replay.LIVE
        if record is not None and record.state not in (State.QUEUED, State.DEAD):
            return Replay.SETTLED
        key = idempotency_key(slot, job.idempotency_digest) if job.idempotency_digest else ""
        if key and (first := self.idempotency.get(key)) and first[1] != job.job_id:
            return Replay.SUPERSEDED
        entry_id = queue.add(letter.sealed, self.now_ms())
        if keeps_acceptance:
            queue.accepted_first_ms[entry_id] = letter.accepted_ms
        accepted_ms = letter.accepted_ms if keeps_acceptance else int(self.now_ms())
        expires_ms = accepted_ms + job.lifetime_ms(job_ttl_ms)
        fresh = record_of(job, entry_id, expires_ms)
        self.records.put(job.job_id, fresh, job_ttl_ms + OUTLIVES_MS)
        self.streams.pop(events_key(job.job_id))
        if key:
            self.idempotency.extend(key, job_ttl_ms + OUTLIVES_MS)
        if not is_orphan:
            self.slots[slot].in_flight[job.tenant] += 1
        del letters[entry]
        return Replay.REPLAYED

    def expire(self, job_id: str, tenant: str, sealed: bytes, ttl_ms: int) -> bool:
        """End a job whose time has passed and that no consumer holds."""
        record, slot, now_ms = self.records.get(job_id), slot_of(job_id), self.now_ms()
        if record is None or record.state is not State.QUEUED or record.tenant != tenant or now_ms <= record.expires_ms:
            return False
        queue = self.queue(slot, record.priority)
        lease = queue.leases.get(record.entry_id)
        lease_ms = self.lease_ms.get(slot, DEFAULT_LEASE_MS)
        if lease and not lease.is_released and lease.may_be_held(now_ms, lease_ms):
            return False
        queue.remove(record.entry_id)
        self.slots[slot].leave(tenant)
        self.settle(job_id, record, State.EXPIRED, sealed, ttl_ms)
        if record.reply:
            self.tell(slot, record.reply, [(job_id, record)])
        return True

    def settle(self, job_id: str, record: StoredRecord, state: State, sealed: bytes, ttl_ms: int) -> None:
        """Turn the record into the result, and append the terminal event for subscribers."""
        record.state, record.result = state, sealed
        self.records.extend(job_id, ttl_ms)
        if record.idempotency_digest:
            self.idempotency.extend(idempotency_key(slot_of(job_id), record.idempotency_digest), ttl_ms)
        if record.is_followed:
            # Numbers 1 and 2 stand for `queued` and `started`, which are not written.
            history = self.streams.get(events_key(job_id)) or EntryStream((2, 0))
            self._append_event(events_key(job_id), history, state.value, b"", 1, ttl_ms)
        if record.webhook:
            self.webhooks.add(job_id, state, record.webhook)
