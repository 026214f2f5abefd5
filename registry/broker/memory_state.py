"""The state of the broker in memory: queues, leases, records, streams, dead letters. No thread, no sleep.

MemoryState            everything that a server would hold, behind one condition variable
  MemorySlot           one model: four queues, dead letters, jobs in flight, the rate of commits
    MemoryQueue        one priority: waiting jobs and leases
  StoredRecord         one job: its record, then its result
  EntryStream          one reply or event stream
"""

from __future__ import annotations

import heapq
import math
import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Generic, TypeAlias, TypeVar

from msgspec import structs

from penstock.registry.broker.base import (
    Claim,
    Commit,
    CommitStatus,
    DeadLetter,
    Delivery,
    Depth,
    Event,
    JobRecord,
    Limits,
    Publication,
    Receipt,
    Replay,
    State,
    StreamEntry,
    Withdrawal,
)
from penstock.registry.broker.incidents import exceeded_limit_s
from penstock.registry.broker.limits import (
    DEAD_LETTERS_CAP,
    DEFAULT_LEASE_MS,
    EVENTS_CAP,
    OUTLIVES_MS,
    REPLY_CAP,
    REPLY_TTL_MS,
)
from penstock.registry.broker.record import encode_result
from penstock.registry.queues import Priority, crashes_key, events_key, idempotency_key, lane_key, slot_of

__all__ = [
    "NO_OWNER",
    "ArmedClaim",
    "Clock",
    "EntryId",
    "EntryStream",
    "Lease",
    "MemoryQueue",
    "MemorySlot",
    "MemoryState",
    "StoredRecord",
    "owner_for",
    "parse_entry_id",
]

Clock: TypeAlias = Callable[[], float]
"""Seconds since the epoch, or since the beginning of a simulation."""
EntryId: TypeAlias = tuple[int, int]
Value = TypeVar("Value")

NO_OWNER: Final = ""
"""The owner of a job that was released."""
_OWNER_BY_VERSION: Final = "version "
_INLINE_BYTES: Final = 4096
"""The largest record that a reply entry carries."""
_RATE_AFTER_MS: Final = 500
_RATE_UNTIL_MS: Final = 30_000
"""The rate of commits is measured over spans between these two."""


@dataclass(slots=True)
class StoredRecord:
    """The record of a job. A terminal one is its result."""

    tenant: str
    priority: Priority
    entry_id: bytes
    reply: str
    idempotency_digest: str
    expires_ms: int
    """When its deadline or its lifetime passes."""
    state: State = State.QUEUED
    result: bytes = b""
    is_cancel_requested: bool = False
    is_followed: bool = False
    """A client subscribed or the job emitted events: its terminal state goes to its event stream."""

    def is_entry(self, priority: Priority, entry_id: bytes) -> bool:
        """Whether this is the record of a live job with this entry."""
        return (self.state, self.priority, self.entry_id) == (State.QUEUED, priority, entry_id)

    def job_record(self, lease: Lease | None = None) -> JobRecord:
        """The record as `job_record` returns it. A terminal record has its tenant inside its sealed result."""
        if self.state is not State.QUEUED:
            return JobRecord(self.state, "", self.result)
        record = JobRecord(self.state, self.tenant, cancel_requested=self.is_cancel_requested)
        if lease is None:
            return record
        holder = "" if lease.owner == NO_OWNER else lease.owner
        return structs.replace(record, is_claimed=bool(holder), deliveries=lease.deliveries, holder=holder)

    def encoded(self) -> bytes:
        """A terminal record as a reply carries it."""
        return encode_result(self.state, self.result)


@dataclass(slots=True)
class Lease:
    """A claimed job: its consumer, the time of the claim or the last renewal, and the number of claims."""

    sealed: bytes
    owner: str
    since_ms: float
    deliveries: int = 1


@dataclass(slots=True, eq=False)
class ArmedClaim:
    """The blocking claim of a worker. `claimed` is its answer; `wake` is called when it has one."""

    consumer: str
    slots: tuple[str, ...]
    count: int
    until_ms: float
    wake: Callable[[], None]
    claimed: list[Delivery] = field(default_factory=list)


class MemoryQueue:
    """The jobs of one slot and priority: those that wait for their first claim, and those under a lease."""

    __slots__ = ("accepted_first_ms", "last_id", "leases", "waiting")

    def __init__(self) -> None:
        # An OrderedDict: a plain dict is slow to find its first key after many were removed at the front.
        self.waiting: OrderedDict[bytes, bytes] = OrderedDict()
        self.leases: dict[bytes, Lease] = {}
        self.accepted_first_ms: dict[bytes, int] = {}
        """The first acceptance of replayed dead letters that keep their deadline."""
        self.last_id: EntryId = (0, 0)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.leases)

    def add(self, sealed: bytes, now_ms: float) -> bytes:
        """Append an entry, and return its id."""
        self.last_id = _next_entry_id(self.last_id, now_ms)
        entry_id = b"%d-%d" % self.last_id
        self.waiting[entry_id] = sealed
        return entry_id

    def take(self, consumer: str, count: int, now_ms: float) -> list[tuple[bytes, bytes]]:
        """Lease the first `count` waiting jobs to the consumer; returns (entry id, sealed) of each."""
        taken = [self.waiting.popitem(last=False) for _ in range(min(count, len(self.waiting)))]
        for entry_id, sealed in taken:
            self.leases[entry_id] = Lease(sealed, consumer, now_ms)
        return taken

    def lapsed(self, before_ms: float) -> list[bytes]:
        """Ids of jobs that were claimed or renewed at or before `before_ms`, oldest job first."""
        return self._leased(lambda lease: lease.since_ms <= before_ms)

    def leased_to(self, owners: Collection[str]) -> list[bytes]:
        """Ids of jobs that one of these consumers holds, oldest job first."""
        return self._leased(lambda lease: lease.owner in owners)

    def _leased(self, is_meant: Callable[[Lease], bool]) -> list[bytes]:
        found = (entry_id for entry_id, lease in self.leases.items() if is_meant(lease))
        return sorted(found, key=lambda entry_id: parse_entry_id(entry_id.decode()))

    def remove(self, entry_id: bytes) -> None:
        """Delete the entry."""
        self.waiting.pop(entry_id, None)
        self.leases.pop(entry_id, None)
        self.accepted_first_ms.pop(entry_id, None)

    def has(self, entry_id: bytes) -> bool:
        """Whether the entry is in this queue, waiting or under a lease."""
        return entry_id in self.waiting or entry_id in self.leases

    def head_ms(self) -> int | None:
        """When the oldest waiting job was accepted; None without one."""
        return parse_entry_id(next(iter(self.waiting)).decode())[0] if self.waiting else None

    def depth(self, slot: str, priority: Priority, now_ms: float) -> Depth:
        """The depth of the queue, as `depths` returns it."""
        head_ms = self.head_ms()
        oldest_s = 0.0 if head_ms is None else max(0.0, now_ms - head_ms) / 1000
        return Depth(slot, priority, len(self), len(self.leases), oldest_s)


class MemorySlot:
    """The four queues of a slot, its dead letters, the jobs in flight of each tenant, and the rate of commits."""

    __slots__ = ("_mark", "_mark_ms", "_rate", "committed", "dead_letters", "in_flight", "last_dead_id", "queues")

    def __init__(self) -> None:
        self.queues = tuple(MemoryQueue() for _ in Priority)
        self.dead_letters: dict[str, DeadLetter] = {}
        self.last_dead_id: EntryId = (0, 0)
        self.in_flight: defaultdict[str, int] = defaultdict(int)
        self.committed = 0
        self._mark = 0
        self._mark_ms: float | None = None
        self._rate = 0.0

    def leave(self, tenant: str) -> None:
        """Count one job of the tenant less in flight."""
        self.in_flight[tenant] -= 1
        if self.in_flight[tenant] <= 0:
            del self.in_flight[tenant]

    def retry_after_s(self, jobs: int, now_ms: float) -> float:
        """The time until `jobs` more are committed, at the recent rate; 1 s while there is no rate."""
        elapsed_ms = -1.0 if self._mark_ms is None else now_ms - self._mark_ms
        if not 0 <= elapsed_ms <= _RATE_UNTIL_MS:
            self._mark, self._mark_ms = self.committed, now_ms
        elif elapsed_ms >= _RATE_AFTER_MS:
            self._rate = (self.committed - self._mark) / elapsed_ms
            self._mark, self._mark_ms = self.committed, now_ms
        if self._rate <= 0:
            return 1.0
        return max(10, min(30_000, math.ceil(jobs / self._rate))) / 1000


class _Expiring(Generic[Value]):
    """Values by key, each with its own time of expiry."""

    __slots__ = ("_due", "_now_ms", "_values")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._values: dict[str, tuple[float, Value]] = {}
        self._due: list[tuple[float, str]] = []

    def __getitem__(self, key: str) -> Value:
        return self._values[key][1]

    def get(self, key: str) -> Value | None:
        """The value, or None when there is none or it has expired."""
        found = self._values.get(key)
        return found[1] if found is not None and found[0] > self._now_ms() else None

    def values(self) -> list[Value]:
        """The values that have not expired, in the order in which they were put."""
        now_ms = self._now_ms()
        return [value for until_ms, value in self._values.values() if until_ms > now_ms]

    def put(self, key: str, value: Value, ttl_ms: float) -> None:
        """Keep the value for `ttl_ms` from now. Expired values are deleted."""
        now_ms = self._now_ms()
        while self._due and self._due[0][0] <= now_ms:
            _, due = heapq.heappop(self._due)
            if due in self._values and self._values[due][0] <= now_ms:
                del self._values[due]
        self._values[key] = (now_ms + ttl_ms, value)
        heapq.heappush(self._due, (now_ms + ttl_ms, key))

    def extend(self, key: str, ttl_ms: float) -> None:
        """Keep the value, if it has not expired, for `ttl_ms` from now."""
        value = self.get(key)
        if value is not None:
            self.put(key, value, ttl_ms)

    def pop(self, key: str) -> None:
        """Delete the value."""
        self._values.pop(key, None)


class EntryStream:
    """Entries of a reply or event stream, in order of their ids."""

    __slots__ = ("entries", "last_id")

    def __init__(self, last_id: EntryId = (0, 0)) -> None:
        self.entries: list[tuple[EntryId, list[bytes]]] = []
        self.last_id = last_id

    def append(self, entry_id: EntryId, fields: list[bytes], cap: float) -> None:
        """Append an entry, and delete the oldest one beyond `cap`."""
        self.last_id = entry_id
        self.entries.append((entry_id, fields))
        if len(self.entries) > cap:
            del self.entries[0]

    def contains(self, attempt: bytes, count: int, after: int) -> bool:
        """Whether the attempt's `count` events after the number `after` (0: its first ones) are in the stream."""
        if after:
            return self.last_id != (after, 0)
        began = (self.last_id[0] - count, 0)
        return any(entry_id == began and fields[3] == attempt for entry_id, fields in self.entries[-count - 1 :])

    def position_after(self, entry_id: EntryId) -> int:
        """The number of entries up to and including `entry_id`."""
        return bisect_right(self.entries, entry_id, key=itemgetter(0))


class MemoryState:
    """The state that a server would hold. The caller holds `changed` during every method: each is one step."""

    def __init__(self, clock: Clock, dead_letters_bytes: int) -> None:
        self.clock = clock
        self.dead_letters_bytes = dead_letters_bytes
        self.changed = threading.Condition()
        self.slots: defaultdict[str, MemorySlot] = defaultdict(MemorySlot)
        self.records: _Expiring[StoredRecord] = _Expiring(self.now_ms)
        self.idempotency: _Expiring[tuple[str, str]] = _Expiring(self.now_ms)
        """Fingerprint and job id by idempotency key."""
        self.streams: _Expiring[EntryStream] = _Expiring(self.now_ms)
        self.reports: _Expiring[bytes] = _Expiring(self.now_ms)
        self.keyrings: defaultdict[str, _Expiring[bytes]] = defaultdict(lambda: _Expiring(self.now_ms))
        self.crashes: _Expiring[frozenset[str]] = _Expiring(self.now_ms)
        """Incidents by entry; see crashes_key."""
        self.specs: dict[tuple[str, str], bytes] = {}
        """By slot and version; the empty version stands for the active one."""
        self.activated: dict[str, tuple[int, bytes]] = {}
        """Epoch and record by slot."""
        self.paused: set[str] = set()
        self.armed: list[ArmedClaim] = []
        self.lease_ms: dict[str, int] = {}
        """By slot: the lease that its workers take."""

    def now_ms(self) -> float:
        """The clock in milliseconds."""
        return self.clock() * 1000

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
        if self.records.get(job.job_id) is not None:
            return Receipt("accepted", job.job_id)
        flow, queue = self.slots[slot], self.queue(slot, job.priority)
        most = limits.tenant_max_in_flight
        is_full = len(queue) >= limits.max_depth
        if is_full or (most and flow.in_flight.get(job.tenant, 0) >= most):
            retry_after_s = flow.retry_after_s(refusals, self.now_ms())
            return Receipt("full" if is_full else "tenant-full", job.job_id, retry_after_s)
        entry_id = queue.add(job.sealed, self.now_ms())
        # Not from the entry id: after a clock went back, ids stay ahead of it.
        expires_ms = int(self.now_ms()) + job.lifetime_ms(limits.job_ttl_ms)
        record = StoredRecord(job.tenant, job.priority, entry_id, job.reply, job.idempotency_digest, expires_ms)
        self.records.put(job.job_id, record, limits.job_ttl_ms + OUTLIVES_MS)
        if job.idempotency_digest:
            self.idempotency.put(
                idempotency_key(slot, job.idempotency_digest),
                (job.fingerprint, job.job_id),
                limits.job_ttl_ms + OUTLIVES_MS,
            )
        flow.in_flight[job.tenant] += 1
        return Receipt("accepted", job.job_id)

    def claim(self, consumer: str, claim: Claim) -> list[Delivery]:
        """Claim jobs, most urgent first; see Claim for the reserve."""
        if claim.slot in self.paused:
            return []
        found: list[Delivery] = []
        bands, visited = tuple(Priority), 0
        urgent = claim.credit - claim.reserve
        while len(found) < urgent and visited < len(bands):
            found += self.hand_out(consumer, claim.slot, bands[visited], urgent - len(found))
            visited += 1
        if len(found) < urgent:
            return found
        for band in [*self._aged(claim, bands[visited:]), *bands[max(visited - 1, 0) :]]:
            found += self.hand_out(consumer, claim.slot, band, claim.credit - len(found))
        return found

    def _aged(self, claim: Claim, bands: Sequence[Priority]) -> list[Priority]:
        """The priority whose oldest job has waited longest, if that is longer than `ageing_ms`."""
        before_ms = self.now_ms() - claim.ageing_ms
        heads = [(head_ms, band) for band in bands if (head_ms := self.queue(claim.slot, band).head_ms()) is not None]
        aged = [(head_ms, band) for head_ms, band in heads if head_ms <= before_ms]
        return [min(aged)[1]] if aged else []

    def hand_out(self, consumer: str, slot: str, priority: Priority, count: int) -> list[Delivery]:
        """Claim up to `count` waiting jobs of one queue."""
        queue, active = self.queue(slot, priority), self.active(slot)
        return [
            Delivery(
                slot,
                priority,
                entry_id,
                sealed,
                accepted_first_ms=queue.accepted_first_ms.get(entry_id, 0),
                active=active,
            )
            for entry_id, sealed in queue.take(consumer, count, self.now_ms())
        ]

    def reassign(
        self, consumer: str, slot: str, choose: Callable[[MemoryQueue], Sequence[bytes]], count: int
    ) -> list[Delivery]:
        """Give up to `count` leased jobs of a slot to another consumer. `choose` names those of a queue."""
        found: list[Delivery] = []
        for priority in Priority if slot not in self.paused else ():
            queue = self.queue(slot, priority)
            for entry_id in choose(queue)[: count - len(found)]:
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
        if not self.armed or slot in self.paused:
            return
        now_ms = self.now_ms()
        for armed in [claim for claim in self.armed if slot in claim.slots and now_ms < claim.until_ms]:
            armed.claimed += [
                delivery
                for priority in Priority
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
        self.settle(commit.job_id, record, commit.state, commit.sealed, result_ttl_ms)
        return CommitStatus.COMMITTED

    def add_dead_letter(self, delivery: Delivery, reason: str, deliveries: int, job_id: str) -> None:
        """Add a dead letter, and delete the oldest ones beyond the limits. `job_id` is empty if it was no job."""
        slot, priority, entry_id = delivery.slot, delivery.priority, delivery.entry_id
        place = self.slots[slot]
        place.last_dead_id = _next_entry_id(place.last_dead_id, self.now_ms())
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
        fresh = StoredRecord(job.tenant, job.priority, entry_id, job.reply, job.idempotency_digest, expires_ms)
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
        if lease is not None and self._is_held(lease, slot):
            return False
        queue.remove(record.entry_id)
        self.slots[slot].leave(tenant)
        self.settle(job_id, record, State.EXPIRED, sealed, ttl_ms)
        if record.reply:
            self.tell(slot, record.reply, [(job_id, record)])
        return True

    def _is_held(self, lease: Lease, slot: str) -> bool:
        """Whether its owner may still renew the lease. After a pause of the broker it needs some time for that."""
        is_free = lease.owner == NO_OWNER or lease.owner.startswith(_OWNER_BY_VERSION)
        return not is_free and self.now_ms() - lease.since_ms < 2 * self.lease_ms.get(slot, DEFAULT_LEASE_MS)

    def settle(self, job_id: str, record: StoredRecord, state: State, sealed: bytes, ttl_ms: int) -> None:
        """Turn the record into the result, and append the terminal event for subscribers."""
        record.state, record.result = state, sealed
        self.records.extend(job_id, ttl_ms)
        if record.idempotency_digest:
            self.idempotency.extend(idempotency_key(slot_of(job_id), record.idempotency_digest), ttl_ms)
        if record.is_followed:
            # Numbers 1 and 2 stand for `queued` and `started`, which are not written.
            history = self.streams.get(events_key(job_id)) or EntryStream((2, 0))
            self.append_event(events_key(job_id), history, Event(state.value), ttl_ms)

    def tell(self, slot: str, reply: str, finished: Sequence[tuple[str, StoredRecord]]) -> None:
        """Append one entry for a client's finished jobs. Those of the Celery task endpoint stay until they are read."""
        fields: list[bytes] = []
        for job_id, record in finished:
            encoded = record.encoded()
            fields += (job_id.rpartition(".")[2].encode(), encoded if len(encoded) <= _INLINE_BYTES else b"")
        if reply == lane_key(slot):
            self.append(reply, fields, cap=math.inf, ttl_ms=math.inf)
        else:
            self.append(reply, fields, cap=REPLY_CAP, ttl_ms=REPLY_TTL_MS)

    def append(self, key: str, fields: list[bytes], *, cap: float, ttl_ms: float) -> None:
        """Append an entry with an id of the present time."""
        stream = self.streams.get(key) or EntryStream()
        self._append(key, stream, _next_entry_id(stream.last_id, self.now_ms()), fields, cap, ttl_ms)

    def append_event(self, key: str, history: EntryStream, event: Event, ttl_ms: float) -> None:
        """Append an event with the next sequence number."""
        fields = [b"t", event.type.encode(), b"d", event.sealed]
        self._append(key, history, (history.last_id[0] + 1, 0), fields, EVENTS_CAP, ttl_ms)

    def _append(
        self, key: str, stream: EntryStream, entry_id: EntryId, fields: list[bytes], cap: float, ttl_ms: float
    ) -> None:
        stream.append(entry_id, fields, cap)
        self.streams.put(key, stream, ttl_ms)
        self.changed.notify_all()

    def entries_after(self, cursors: Mapping[str, EntryId], count: int) -> list[StreamEntry]:
        """Up to `count` entries of each stream."""
        found = []
        for key, cursor in cursors.items():
            stream = self.streams.get(key)
            if stream is not None:
                first = stream.position_after(cursor)
                for (milliseconds, number), fields in stream.entries[first : first + count]:
                    found.append(StreamEntry(key, f"{milliseconds}-{number}", fields))
        return found


def owner_for(version: str) -> str:
    """The owner of jobs that were released for workers that have this version."""
    return _OWNER_BY_VERSION + version


def parse_entry_id(entry_id: str) -> EntryId:
    """`<ms>-<n>` as numbers; a missing `n` is 0."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)


def _next_entry_id(last_id: EntryId, now_ms: float) -> EntryId:
    """An id after `last_id`, also when the clock went back."""
    return (int(now_ms), 0) if int(now_ms) > last_id[0] else (last_id[0], last_id[1] + 1)
