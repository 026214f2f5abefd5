"""A broker in the memory of this process: the rules of base.py without a server, for tests and simulations.

No thread and no sleep: time is the clock that is passed in, so whoever moves the clock decides when a lease
lapses. `connect` gives a further end of the same broker, as a second connection to one server would be; a worker
needs an end of its own, since an armed claim belongs to one. Nothing outlives the process.
"""

from __future__ import annotations

import heapq
import math
import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Generic, TypeAlias, TypeVar

from msgspec import structs

from penstock.registry.broker.base import (
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
    Waiting,
    Withdrawal,
)
from penstock.registry.broker.redis_scripts import (
    DEAD_LETTERS_BYTES,
    DEAD_LETTERS_CAP,
    EVENTS_CAP,
    OUTLIVES_MS,
    REPLY_CAP,
    REPLY_TTL_MS,
)
from penstock.registry.queues import Priority, crashes_key, events_key, idempotency_key, lane_key, slot_of

__all__ = ["MemoryBroker"]

Clock: TypeAlias = Callable[[], float]
"""Seconds since the epoch, or since whatever a simulation calls its beginning."""
EntryId: TypeAlias = tuple[int, int]
Value = TypeVar("Value")

_INLINE_BYTES: Final = 4096
"""The largest record that a reply entry carries."""
_RATE_AFTER_MS: Final = 500
_RATE_UNTIL_MS: Final = 30_000
"""The drain rate is measured over spans between these two."""
_NOBODY: Final = ""


class MemoryBroker:
    """One end of a broker in memory; thread-safe, except that one thread owns arm, fileno, collect and disarm."""

    def __init__(
        self,
        clock: Clock = time.time,
        *,
        result_ttl_ms: int = 3_600_000,
        dead_letters_bytes: int = DEAD_LETTERS_BYTES,
    ) -> None:
        self._state = _State(clock, dead_letters_bytes)
        self._changed = self._state.changed
        self._result_ttl_ms = result_ttl_ms
        self._armed: _ArmedClaim | None = None
        self._answered: int | None = None

    def connect(self) -> MemoryBroker:
        """Another end of the same broker."""
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
        """See ProducerEnd.standings."""
        with self._changed:
            records = [self._state.records.get(job_id) for job_id in job_ids]
            return [record.job_record() if record else None for record in records]

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.standing."""
        with self._changed:
            record = self._state.records.get(job_id)
            if record is None:
                return None
            if record.state is not State.QUEUED:
                return record.job_record()
            record.is_followed |= subscribe
            lease = self._state.queue(slot_of(job_id), record.priority).leases.get(record.entry_id)
            if lease is None:
                return record.job_record()
            return structs.replace(record.job_record(), is_claimed=lease.owner != _NOBODY, deliveries=lease.deliveries)

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome:
        """See ProducerEnd.cancel."""
        with self._changed:
            record = self._state.records.get(job_id)
            if record is None:
                return CancelOutcome.UNKNOWN
            if record.state is not State.QUEUED:
                return CancelOutcome.SETTLED
            if record.tenant != tenant:
                return CancelOutcome.UNKNOWN
            queue = self._state.queue(slot_of(job_id), record.priority)
            lease = queue.leases.get(record.entry_id)
            if lease is not None and lease.owner != _NOBODY:
                record.is_cancel_requested = True
                return CancelOutcome.REQUESTED
            queue.remove(record.entry_id)
            self._state.slots[slot_of(job_id)].leave(tenant)
            self._state.settle(job_id, record, State.CANCELLED, sealed, self._result_ttl_ms)
            if record.reply:
                self._state.tell(slot_of(job_id), record.reply, [(job_id, record)])
            return CancelOutcome.CANCELLED

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """See ProducerEnd.read. The wait is real time, whatever the clock says."""
        after = {key: _parse_entry_id(cursor) for key, cursor in cursors.items()}
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
                del stream.entries[: stream.position_after(_parse_entry_id(before))]

    def nudge(self, key: str) -> None:
        """See ProducerEnd.nudge."""
        with self._changed:
            self._state.append(key, [b"", b""], cap=REPLY_CAP, ttl_ms=REPLY_TTL_MS)

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""
        return self._state.specs.get((slot, version))

    # Workers' end

    def prepare(self, slots: Sequence[str]) -> None:
        """See WorkerEnd.prepare. Nothing to do: queues are there when they are first named."""

    def exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """See WorkerEnd.exchange."""
        with self._changed:
            statuses, news = [], []
            for commit in commits:
                held = self._state.lease_of(consumer, commit.slot, commit.priority, commit.entry_id)
                statuses.append(self._state.commit(consumer, commit, result_ttl_ms))
                # A repeat of our own commit is confirmed, and its client was told the first time.
                if held is not None and statuses[-1] is CommitStatus.COMMITTED:
                    news.append(commit)
            self._tell_clients(news)
            return statuses, [delivery for wish in claims for delivery in self._state.claim(consumer, wish)]

    def _tell_clients(self, commits: Sequence[Commit]) -> None:
        finished: defaultdict[tuple[str, str], list[tuple[str, _Record]]] = defaultdict(list)
        for commit in commits:
            record = self._state.records.get(commit.job_id)
            if commit.reply and record is not None:
                finished[commit.slot, commit.reply].append((commit.job_id, record))
        for (slot, reply), jobs in finished.items():
            self._state.tell(slot, reply, jobs)

    def arm(self, consumer: str, slots: Sequence[str], count: int, block_ms: int) -> None:
        """See WorkerEnd.arm."""
        with self._changed:
            self._armed = _ArmedClaim(
                consumer, tuple(slots), count, self._state.now_ms() + (block_ms or math.inf), self._wake
            )
            self._state.armed.append(self._armed)
            for slot in slots:
                self._state.serve_armed(slot)

    def _wake(self) -> None:
        if self._answered is not None:
            os.eventfd_write(self._answered, 1)

    def fileno(self) -> int:
        """See WorkerEnd.fileno. Jobs make it readable; that the time ran out only the clock says."""
        with self._changed:
            if self._answered is None:
                self._answered = os.eventfd(bool(self._armed and self._armed.handed), os.EFD_NONBLOCK)
            return self._answered

    def collect(self) -> list[Delivery]:
        """See WorkerEnd.collect. Does not wait."""
        with self._changed:
            armed, self._armed = self._armed, None
            if armed is None:
                return []
            if not armed.handed:
                self._state.armed.remove(armed)
            elif self._answered is not None:
                os.eventfd_read(self._answered)
            return armed.handed

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
            return self._state.pass_on(consumer, slot, lambda queue: queue.lapsed(before_ms), count)

    def adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        """See WorkerEnd.adopt."""
        receivers = {_receiver(version) for version in versions}
        with self._changed:
            return self._state.pass_on(consumer, slot, lambda queue: queue.leased_to(receivers), count)

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        """See WorkerEnd.release."""
        with self._changed:
            for job in held:
                lease = self._state.lease_of(consumer, job.slot, job.priority, job.entry_id)
                if lease is not None:
                    lease.owner, lease.since_ms = _NOBODY, -math.inf
                    if version:
                        lease.owner, lease.since_ms = _receiver(version), self._state.now_ms()
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
            history = self._state.streams.get(key) or _Stream((1, 0))
            attempt = consumer.encode() + b" " + held.entry_id
            if not history.has_heard(attempt, len(events), after):
                begin = [] if after else [Event("reset" if history.entries else "started", attempt)]
                for event in [*begin, *events]:
                    self._state.append_event(key, history, event, ttl_ms)
            return history.last_id[0]

    def bury(self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b"") -> bool:
        """See WorkerEnd.bury."""
        with self._changed:
            slot, priority, entry_id = delivery.slot, delivery.priority, delivery.entry_id
            lease = self._state.lease_of(consumer, slot, priority, entry_id)
            if lease is None:
                return False
            record = self._state.records.get(job_id)
            is_job = record is not None and record.is_entry(priority, entry_id)
            self._state.put_aside(delivery, reason, lease.deliveries, job_id if is_job else "")
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

    def now_ms(self) -> float:
        """See WorkerEnd.now_ms."""
        return self._state.now_ms()

    # Operators

    def models(self) -> list[str]:
        """See Broker.models."""
        with self._changed:
            return sorted({slot for slot, _ in self._state.specs})

    def depths(self, slot: str) -> list[Depth]:
        """See Broker.depths."""
        with self._changed:
            now_ms = self._state.now_ms()
            return [self._state.queue(slot, priority).depth(slot, priority, now_ms) for priority in Priority]

    def drained(self, slot: str) -> int:
        """See Broker.drained."""
        with self._changed:
            return self._state.slots[slot].drained

    def workers(self) -> list[bytes]:
        """See Broker.workers."""
        with self._changed:
            return self._state.reports.values()

    def activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """See Broker.activate."""
        with self._changed:
            known = self._state.activated.get(slot)
            if known is not None and known != (epoch, record) and known[0] >= epoch:
                return False
            self._state.activated[slot] = (epoch, record)
            self._state.specs[slot, ""] = self._state.specs[slot, version] = spec
            return True

    def pause(self, slot: str) -> None:
        """See Broker.pause. It holds for armed claims, too."""
        with self._changed:
            self._state.paused.add(slot)

    def resume(self, slot: str) -> None:
        """See Broker.resume."""
        with self._changed:
            self._state.paused.discard(slot)
            self._state.serve_armed(slot)

    def waiting(self, slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> list[Waiting]:
        """See Broker.waiting."""
        cursor = _parse_entry_id((after or b"0-0").decode())
        with self._changed:
            queue = self._state.queue(slot, priority)
            free = {entry_id: lease.sealed for entry_id, lease in queue.leases.items() if lease.owner == _NOBODY}
            found = sorted(
                (_parse_entry_id(entry_id.decode()), Waiting(entry_id, sealed[:head_bytes]))
                for entry_id, sealed in {**free, **queue.waiting}.items()
            )
            return [waiting for order, waiting in found if order > cursor][:count]

    def withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """See Broker.withdraw."""
        with self._changed:
            return sum(self._state.withdraw(slot, priority, job, result_ttl_ms) for job in jobs)

    def replay(
        self, slot: str, entry: str, job: Publication, job_ttl_ms: int, *, keeps_acceptance: bool = False
    ) -> Replay:
        """See Broker.replay."""
        with self._changed:
            outcome = self._state.replay(slot, entry, job, job_ttl_ms, keeps_acceptance)
            self._state.serve_armed(slot)
            return outcome

    def purge_dead(self, slot: str, entries: Sequence[str]) -> int:
        """See Broker.purge_dead."""
        with self._changed:
            letters = self._state.slots[slot].dead_letters
            return sum(letters.pop(entry, None) is not None for entry in entries)

    def dead_letters(self, slot: str, after: str = "", count: int = 100) -> list[DeadLetter]:
        """See Broker.dead_letters."""
        cursor = _parse_entry_id(after or "0-0")
        with self._changed:
            letters = self._state.slots[slot].dead_letters.values()
            later = [letter for letter in letters if _parse_entry_id(letter.entry) > cursor]
            return [structs.replace(letter, sealed=b"") for letter in later[:count]]

    def dead_letter(self, slot: str, entry: str) -> DeadLetter | None:
        """See Broker.dead_letter."""
        with self._changed:
            return self._state.slots[slot].dead_letters.get(entry)

    def close(self) -> None:
        """See Broker.close. The broker lives on as long as another end does."""
        self.drop_armed()
        if self._answered is not None:
            os.close(self._answered)
            self._answered = None


@dataclass(slots=True)
class _Record:
    """A job's one record; a result once its state is terminal."""

    tenant: str
    priority: Priority
    entry_id: bytes
    reply: str
    idempotency_digest: str
    state: State = State.QUEUED
    result: bytes = b""
    is_cancel_requested: bool = False
    is_followed: bool = False
    """Somebody subscribed or the job emitted: its end goes to its event stream as well."""

    def is_entry(self, priority: Priority, entry_id: bytes) -> bool:
        """Whether this is the live record of a job that was accepted as that entry."""
        return (self.state, self.priority, self.entry_id) == (State.QUEUED, priority, entry_id)

    def job_record(self) -> JobRecord:
        """What the record says by itself. A terminal record's tenant is inside its sealed result."""
        if self.state is State.QUEUED:
            return JobRecord(self.state, self.tenant, cancel_requested=self.is_cancel_requested)
        return JobRecord(self.state, "", self.result)

    def encoded(self) -> bytes:
        """A terminal record as it travels in a reply: state, a dash, the sealed result."""
        return self.state.value.encode() + b"-" + self.result


@dataclass(slots=True)
class _Lease:
    """A job that was handed out: to whom, when or when last renewed, and how often so far."""

    sealed: bytes
    owner: str
    since_ms: float
    deliveries: int = 1


@dataclass(slots=True, eq=False)
class _ArmedClaim:
    """A worker that waits for jobs; `handed` is its answer."""

    consumer: str
    slots: tuple[str, ...]
    count: int
    until_ms: float
    wake: Callable[[], None]
    handed: list[Delivery] = field(default_factory=list)


class _Queue:
    """The jobs of one slot and priority: those that nobody was handed yet, and those under a lease."""

    __slots__ = ("accepted_first_ms", "last_id", "leases", "waiting")

    def __init__(self) -> None:
        # An OrderedDict, for a plain one takes ever longer to find its first key as keys leave at the front.
        self.waiting: OrderedDict[bytes, bytes] = OrderedDict()
        self.leases: dict[bytes, _Lease] = {}
        self.accepted_first_ms: dict[bytes, int] = {}
        """Of entries that came back from the dead letters and keep their deadline."""
        self.last_id: EntryId = (0, 0)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.leases)

    def add(self, sealed: bytes, now_ms: float) -> bytes:
        """The id of the new entry."""
        self.last_id = _next_entry_id(self.last_id, now_ms)
        entry_id = b"%d-%d" % self.last_id
        self.waiting[entry_id] = sealed
        return entry_id

    def take(self, consumer: str, count: int, now_ms: float) -> list[tuple[bytes, bytes]]:
        """Hand the first `count` waiting jobs to the consumer, as (entry id, sealed)."""
        taken = [self.waiting.popitem(last=False) for _ in range(min(count, len(self.waiting)))]
        for entry_id, sealed in taken:
            self.leases[entry_id] = _Lease(sealed, consumer, now_ms)
        return taken

    def lapsed(self, before_ms: float) -> list[bytes]:
        """Ids of jobs whose lease began at or before `before_ms`, oldest job first."""
        return self._leased(lambda lease: lease.since_ms <= before_ms)

    def leased_to(self, owners: Collection[str]) -> list[bytes]:
        """Ids of jobs that belong to one of these, oldest job first."""
        return self._leased(lambda lease: lease.owner in owners)

    def _leased(self, is_meant: Callable[[_Lease], bool]) -> list[bytes]:
        found = (entry_id for entry_id, lease in self.leases.items() if is_meant(lease))
        return sorted(found, key=lambda entry_id: _parse_entry_id(entry_id.decode()))

    def remove(self, entry_id: bytes) -> None:
        """Forget the entry, wherever it is."""
        self.waiting.pop(entry_id, None)
        self.leases.pop(entry_id, None)
        self.accepted_first_ms.pop(entry_id, None)

    def has(self, entry_id: bytes) -> bool:
        """Whether the entry is here, waiting or under a lease."""
        return entry_id in self.waiting or entry_id in self.leases

    def head_ms(self) -> int | None:
        """When the oldest waiting job was accepted; None when none waits."""
        return _parse_entry_id(next(iter(self.waiting)).decode())[0] if self.waiting else None

    def depth(self, slot: str, priority: Priority, now_ms: float) -> Depth:
        """The queue as operators see it."""
        head_ms = self.head_ms()
        oldest_s = 0.0 if head_ms is None else max(0.0, now_ms - head_ms) / 1000
        return Depth(slot, priority, len(self), len(self.leases), oldest_s)


class _Slot:
    """The four queues of a slot, its dead letters and its flow: tenants' jobs in flight and the drain rate."""

    __slots__ = ("_mark", "_mark_ms", "_rate", "dead_letters", "drained", "in_flight", "last_dead_id", "queues")

    def __init__(self) -> None:
        self.queues = tuple(_Queue() for _ in Priority)
        self.dead_letters: dict[str, DeadLetter] = {}
        self.last_dead_id: EntryId = (0, 0)
        self.in_flight: defaultdict[str, int] = defaultdict(int)
        self.drained = 0
        self._mark = 0
        self._mark_ms: float | None = None
        self._rate = 0.0

    def leave(self, tenant: str) -> None:
        """One job fewer in flight."""
        self.in_flight[tenant] -= 1
        if self.in_flight[tenant] <= 0:
            del self.in_flight[tenant]

    def retry_after_s(self, jobs: int, now_ms: float) -> float:
        """Time until `jobs` more have left, at the rate at which they were committed lately; 1 s without one."""
        elapsed_ms = -1.0 if self._mark_ms is None else now_ms - self._mark_ms
        if not 0 <= elapsed_ms <= _RATE_UNTIL_MS:
            self._mark, self._mark_ms = self.drained, now_ms
        elif elapsed_ms >= _RATE_AFTER_MS:
            self._rate = (self.drained - self._mark) / elapsed_ms
            self._mark, self._mark_ms = self.drained, now_ms
        if self._rate <= 0:
            return 1.0
        return max(10, min(30_000, math.ceil(jobs / self._rate))) / 1000


class _Expiring(Generic[Value]):
    """Values by key, each until its own time."""

    __slots__ = ("_due", "_now_ms", "_values")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._values: dict[str, tuple[float, Value]] = {}
        self._due: list[tuple[float, str]] = []

    def __getitem__(self, key: str) -> Value:
        return self._values[key][1]

    def get(self, key: str) -> Value | None:
        """The value, or None when there is none any more."""
        found = self._values.get(key)
        return found[1] if found is not None and found[0] > self._now_ms() else None

    def values(self) -> list[Value]:
        """The values that are still there, in the order in which they were put."""
        now_ms = self._now_ms()
        return [value for until_ms, value in self._values.values() if until_ms > now_ms]

    def put(self, key: str, value: Value, ttl_ms: float) -> None:
        """Keep the value for `ttl_ms` from now, and forget others whose time has passed."""
        now_ms = self._now_ms()
        while self._due and self._due[0][0] <= now_ms:
            _, due = heapq.heappop(self._due)
            if due in self._values and self._values[due][0] <= now_ms:
                del self._values[due]
        self._values[key] = (now_ms + ttl_ms, value)
        heapq.heappush(self._due, (now_ms + ttl_ms, key))

    def extend(self, key: str, ttl_ms: float) -> None:
        """Let the value, if it is still there, live for `ttl_ms` from now."""
        value = self.get(key)
        if value is not None:
            self.put(key, value, ttl_ms)

    def pop(self, key: str) -> None:
        """Forget the value."""
        self._values.pop(key, None)


class _Stream:
    """Entries of a reply or event stream, in order of their ids."""

    __slots__ = ("entries", "last_id")

    def __init__(self, last_id: EntryId = (0, 0)) -> None:
        self.entries: list[tuple[EntryId, list[bytes]]] = []
        self.last_id = last_id

    def append(self, entry_id: EntryId, fields: list[bytes], cap: float) -> None:
        """Add an entry, and drop the oldest beyond `cap`."""
        self.last_id = entry_id
        self.entries.append((entry_id, fields))
        if len(self.entries) > cap:
            del self.entries[0]

    def has_heard(self, attempt: bytes, count: int, after: int) -> bool:
        """Whether an attempt's `count` events after sequence number `after` (0: its first) are here already."""
        if after:
            return self.last_id != (after, 0)
        began = (self.last_id[0] - count, 0)
        return any(entry_id == began and fields[3] == attempt for entry_id, fields in self.entries[-count - 1 :])

    def position_after(self, entry_id: EntryId) -> int:
        """How many entries are not after `entry_id`."""
        return bisect_right(self.entries, entry_id, key=itemgetter(0))


class _State:
    """What a server would hold; every method is one step under `changed`."""

    def __init__(self, clock: Clock, dead_letters_bytes: int) -> None:
        self.clock = clock
        self.dead_letters_bytes = dead_letters_bytes
        self.changed = threading.Condition()
        self.slots: defaultdict[str, _Slot] = defaultdict(_Slot)
        self.records: _Expiring[_Record] = _Expiring(self.now_ms)
        self.idempotency: _Expiring[tuple[str, str]] = _Expiring(self.now_ms)
        """Fingerprint and job id by idempotency key."""
        self.streams: _Expiring[_Stream] = _Expiring(self.now_ms)
        self.reports: _Expiring[bytes] = _Expiring(self.now_ms)
        self.crashes: _Expiring[frozenset[str]] = _Expiring(self.now_ms)
        """Incidents by entry; see crashes_key."""
        self.specs: dict[tuple[str, str], bytes] = {}
        """By slot and version; an empty version is the one that answers."""
        self.activated: dict[str, tuple[int, bytes]] = {}
        """Epoch and record by slot."""
        self.paused: set[str] = set()
        self.armed: list[_ArmedClaim] = []

    def now_ms(self) -> float:
        return self.clock() * 1000

    def queue(self, slot: str, priority: Priority) -> _Queue:
        return self.slots[slot].queues[priority]

    def active(self, slot: str) -> bytes:
        """What deliveries carry of the version that answers."""
        activated = self.activated.get(slot)
        return b"%d %s" % activated if activated else b""

    def lease_of(self, consumer: str, slot: str, priority: Priority, entry_id: bytes) -> _Lease | None:
        """The lease, when it is this consumer's."""
        lease = self.queue(slot, priority).leases.get(entry_id)
        return lease if lease is not None and lease.owner == consumer else None

    def admit(self, slot: str, job: Publication, limits: Limits, refusals: int) -> Receipt:
        """Accept or refuse one job; `refusals` counts this one in, were it refused for want of room."""
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
        record = _Record(job.tenant, job.priority, entry_id, job.reply, job.idempotency_digest)
        self.records.put(job.job_id, record, limits.job_ttl_ms + OUTLIVES_MS)
        if job.idempotency_digest:
            self.idempotency.put(
                idempotency_key(slot, job.idempotency_digest),
                (job.fingerprint, job.job_id),
                limits.job_ttl_ms + OUTLIVES_MS,
            )
        flow.in_flight[job.tenant] += 1
        return Receipt("accepted", job.job_id)

    def claim(self, consumer: str, wish: Claim) -> list[Delivery]:
        """Most urgent first; `reserve` goes to the lower band whose head has waited longest, if too long."""
        if wish.slot in self.paused:
            return []
        found: list[Delivery] = []
        bands, visited = tuple(Priority), 0
        urgent = wish.credit - wish.reserve
        while len(found) < urgent and visited < len(bands):
            found += self.hand_out(consumer, wish.slot, bands[visited], urgent - len(found))
            visited += 1
        if len(found) < urgent:
            return found
        for band in [*self._aged(wish, bands[visited:]), *bands[max(visited - 1, 0) :]]:
            found += self.hand_out(consumer, wish.slot, band, wish.credit - len(found))
        return found

    def _aged(self, wish: Claim, bands: Sequence[Priority]) -> list[Priority]:
        """The band whose head has waited longest, when that is longer than the wish allows."""
        before_ms = self.now_ms() - wish.ageing_ms
        heads = [(head_ms, band) for band in bands if (head_ms := self.queue(wish.slot, band).head_ms()) is not None]
        aged = [(head_ms, band) for head_ms, band in heads if head_ms <= before_ms]
        return [min(aged)[1]] if aged else []

    def hand_out(self, consumer: str, slot: str, priority: Priority, count: int) -> list[Delivery]:
        """Up to `count` waiting jobs of one queue."""
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

    def pass_on(
        self, consumer: str, slot: str, choose: Callable[[_Queue], Sequence[bytes]], count: int
    ) -> list[Delivery]:
        """Up to `count` leased jobs of a slot, those that are chosen, go to another consumer."""
        found: list[Delivery] = []
        for priority in Priority if slot not in self.paused else ():
            queue = self.queue(slot, priority)
            for entry_id in choose(queue)[: count - len(found)]:
                lease = queue.leases[entry_id]
                lease.owner, lease.since_ms = consumer, self.now_ms()
                lease.deliveries += 1
                found.append(
                    Delivery(
                        slot,
                        priority,
                        entry_id,
                        lease.sealed,
                        lease.deliveries,
                        len(self.crashes.get(crashes_key(slot, priority, entry_id)) or ()),
                        queue.accepted_first_ms.get(entry_id, 0),
                        self.active(slot),
                    )
                )
        return found

    def serve_armed(self, slot: str) -> None:
        """Hand waiting jobs to the workers that asked, in the order in which they did."""
        if not self.armed or slot in self.paused:
            return
        now_ms = self.now_ms()
        for armed in [claim for claim in self.armed if slot in claim.slots and now_ms < claim.until_ms]:
            armed.handed += [
                delivery
                for priority in Priority
                for delivery in self.hand_out(armed.consumer, slot, priority, armed.count)
            ]
            if armed.handed:
                self.armed.remove(armed)
                armed.wake()

    def commit(self, consumer: str, commit: Commit, result_ttl_ms: int) -> CommitStatus:
        """One job's end: no effect unless the consumer holds it."""
        if self.lease_of(consumer, commit.slot, commit.priority, commit.entry_id) is None:
            settled = self.records.get(commit.job_id)
            is_ours = settled is not None and (settled.state, settled.result) == (commit.state, commit.sealed)
            return CommitStatus.COMMITTED if is_ours else CommitStatus.FENCED
        self.queue(commit.slot, commit.priority).remove(commit.entry_id)
        record = self.records.get(commit.job_id)
        if record is not None and record.state is not State.QUEUED:
            # The job left when it ended: this entry was a repetition of its message.
            return CommitStatus.GONE
        self.slots[commit.slot].leave(commit.tenant)
        if record is None:
            return CommitStatus.GONE
        self.slots[commit.slot].drained += 1
        self.settle(commit.job_id, record, commit.state, commit.sealed, result_ttl_ms)
        return CommitStatus.COMMITTED

    def put_aside(self, delivery: Delivery, reason: str, deliveries: int, job_id: str) -> None:
        """Write a dead letter, about `job_id` if the bytes were accepted as that; the oldest make room."""
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
        """Take an entry that nobody holds out of its queue; its job, if it has a record, ends cancelled."""
        queue = self.queue(slot, priority)
        lease = queue.leases.get(job.entry_id)
        if lease.owner != _NOBODY if lease else job.entry_id not in queue.waiting:
            return False
        queue.remove(job.entry_id)
        record = self.records.get(job.job_id)
        if record is not None and record.is_entry(priority, job.entry_id):
            self.slots[slot].leave(record.tenant)
            self.settle(job.job_id, record, State.CANCELLED, job.sealed, ttl_ms)
            if record.reply:
                self.tell(slot, record.reply, [(job.job_id, record)])
        elif record is None and job.tenant:
            # Its record has expired: it still counts as in flight.
            self.slots[slot].leave(job.tenant)
        return True

    def replay(self, slot: str, entry: str, job: Publication, job_ttl_ms: int, keeps_acceptance: bool) -> Replay:
        """Put a dead letter back as the job it was."""
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
        fresh = _Record(job.tenant, job.priority, entry_id, job.reply, job.idempotency_digest)
        self.records.put(job.job_id, fresh, job_ttl_ms + OUTLIVES_MS)
        self.streams.pop(events_key(job.job_id))
        if key:
            self.idempotency.extend(key, job_ttl_ms + OUTLIVES_MS)
        if not is_orphan:
            self.slots[slot].in_flight[job.tenant] += 1
        del letters[entry]
        return Replay.REPLAYED

    def settle(self, job_id: str, record: _Record, state: State, sealed: bytes, ttl_ms: int) -> None:
        """Turn the record into its result, and tell those who follow the job."""
        record.state, record.result = state, sealed
        self.records.extend(job_id, ttl_ms)
        if record.idempotency_digest:
            self.idempotency.extend(idempotency_key(slot_of(job_id), record.idempotency_digest), ttl_ms)
        if record.is_followed:
            # 1 is `queued` and 2 `started`, which nobody needs in writing.
            history = self.streams.get(events_key(job_id)) or _Stream((2, 0))
            self.append_event(events_key(job_id), history, Event(state.value), ttl_ms)

    def tell(self, slot: str, reply: str, finished: Sequence[tuple[str, _Record]]) -> None:
        """One entry for a client's finished jobs; the lane's is kept until it is read."""
        fields: list[bytes] = []
        for job_id, record in finished:
            encoded = record.encoded()
            fields += (job_id.rpartition(".")[2].encode(), encoded if len(encoded) <= _INLINE_BYTES else b"")
        if reply == lane_key(slot):
            self.append(reply, fields, cap=math.inf, ttl_ms=math.inf)
        else:
            self.append(reply, fields, cap=REPLY_CAP, ttl_ms=REPLY_TTL_MS)

    def append(self, key: str, fields: list[bytes], *, cap: float, ttl_ms: float) -> None:
        """Add an entry under an id of the clock's."""
        stream = self.streams.get(key) or _Stream()
        self._append(key, stream, _next_entry_id(stream.last_id, self.now_ms()), fields, cap, ttl_ms)

    def append_event(self, key: str, history: _Stream, event: Event, ttl_ms: float) -> None:
        """Add an event under the next sequence number."""
        fields = [b"t", event.type.encode(), b"d", event.sealed]
        self._append(key, history, (history.last_id[0] + 1, 0), fields, EVENTS_CAP, ttl_ms)

    def _append(
        self, key: str, stream: _Stream, entry_id: EntryId, fields: list[bytes], cap: float, ttl_ms: float
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


def _receiver(version: str) -> str:
    return f"version {version}"


def _parse_entry_id(entry_id: str) -> EntryId:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)


def _next_entry_id(last_id: EntryId, now_ms: float) -> EntryId:
    """Later than `last_id`, also when the clock went back."""
    return (int(now_ms), 0) if int(now_ms) > last_id[0] else (last_id[0], last_id[1] + 1)
