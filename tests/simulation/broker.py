"""An end of the broker in memory whose calls go over a bad network, and what is known about the truth behind it.

    call -- refused: no effect          -- repeated: effect twice, the second answer
         -- unheard: effect, no answer  -- late: no answer, and the effect comes afterwards
         -- slow: time passes before and after the effect, and the other parts go on

The `serve_*` methods are the broker's side of each call; mutants.py breaks them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, ParamSpec, Protocol, TypeVar

from penstock.registry.broker.base import (
    ALL_BANDS,
    CancelOutcome,
    Claim,
    Commit,
    CommitStatus,
    Delivery,
    Depth,
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
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Keyring, ResultHeader, open_job, open_result
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import Priority, slot_of
from tests.simulation.plan import LEASE_S, Plan
from tests.simulation.virtual_time import EPOCH_S, Schedule

__all__ = ["TTL_MS", "UNSIGNED", "Bystander", "Caller", "Entry", "Truth", "UnreliableEnd", "opened"]

T = TypeVar("T")
P = ParamSpec("P")
Entry = tuple[str, Priority, bytes]
"""A queue entry: slot, priority, entry id."""

TTL_MS: Final = 7 * 86_400_000
"""How long jobs and results are kept: longer than the clock can jump in one schedule."""
UNSIGNED: Final = Keyring.parse(None)
_BANDS: Final = tuple(Priority)
_ONCE: Final = frozenset(
    (*("job_record", "job_records", "waiting", "read"), *("arm", "collect", "disarm", "workers", "paused"))
)
"""Calls whose effect does not come twice, nor after the caller has left."""
_FAILURES: Final = ("refused", "refused", "unheard", "unheard", "repeated", "late")


@lru_cache(maxsize=256)
def opened(sealed: bytes) -> tuple[ResultHeader, memoryview | bytes]:
    """A result as `open_result` returns it. It is checked when it is committed, and again when its client has it."""
    return open_result(sealed, UNSIGNED)


class Caller(Protocol):
    """The process at this end."""

    label: str
    cut_until: float
    """Its connection is down until then."""
    disturbed_at: float
    """When it last may have been kept from renewing its leases."""

    def wait(self, delay: float) -> None:
        """Lets time pass in the middle of what it does. Raises Crash when it died meanwhile."""

    def holds(self, entry: Entry) -> bool:
        """Whether it is alive and has the job in memory."""

    def is_winding_up(self) -> bool:
        """Whether what it does now was begun after it had been told to stop."""


class Bystander:
    """A process that lives through everything and holds no jobs: its calls may fail, and that is all."""

    def __init__(self, schedule: Schedule, label: str) -> None:
        self.schedule = schedule
        self.label = label
        self.cut_until = 0.0
        self.disturbed_at = 0.0

    def wait(self, delay: float) -> None:
        """See Caller.wait."""
        self.schedule.elapse(delay)

    def holds(self, entry: Entry) -> bool:
        """See Caller.holds."""
        return False

    def is_winding_up(self) -> bool:
        """See Caller.is_winding_up."""
        return False


@dataclass(slots=True)
class Truth:
    """What really happened at the broker."""

    accepted_ms: dict[str, int] = field(default_factory=dict)
    """By job id: when it was accepted, as its entry has it."""
    accepted_at: dict[str, float] = field(default_factory=dict)
    """By job id: when it was accepted, in virtual time."""
    lifetime_ms: dict[str, int] = field(default_factory=dict)
    """By job id: the time in which it may start, counted from its acceptance."""
    expires_ms: dict[str, float] = field(default_factory=dict)
    """By job id: when that time ends by the broker's clock."""
    withdrawn: dict[str, float] = field(default_factory=dict)
    """By job id: when it was cancelled while no worker held it, in virtual time."""
    crashes: Counter[str] = field(default_factory=Counter)
    """By job id: how often a process died, and not while it wound up, with the job on its model."""
    replayed: Counter[str] = field(default_factory=Counter)
    """By job id: how often an operator put its dead letter back."""
    when_dead_lettered: Callable[[str, str], None] = lambda _slot, _job_id: None
    """Called with slot and job id of every new dead letter."""
    when_handed_over: Callable[[list[Entry], str], None] = lambda _entries, _version: None
    """Called with what was given back for those that have a version."""
    callers: dict[str, Caller] = field(default_factory=dict)
    """Workers by consumer."""
    answering: dict[str, list[tuple[float, int, str]]] = field(default_factory=dict)
    """By slot: since when, in virtual time, by which epoch, which version has answered."""
    lost: set[str] = field(default_factory=set)
    """Ids of jobs that the broker lost with all its data, and that were not accepted again."""

    def lose_everything(self) -> None:
        """The broker knows of nothing any more that it had accepted or was told."""
        self.lost.update(self.accepted_at)
        for known in (self.accepted_at, self.withdrawn, self.crashes, self.replayed):
            known.clear()

    def has_lost(self, job_ids: Sequence[str]) -> bool:
        """Whether the broker lost a job with one of these ids, and has not accepted it again under the other one."""
        return not self.lost.isdisjoint(job_ids) and not any(job_id in self.accepted_at for job_id in job_ids)


class UnreliableEnd(MemoryBroker):
    """One process's end. The first end makes the broker; others are given it as `shared`."""

    def __init__(
        self, schedule: Schedule, plan: Plan, truth: Truth, caller: Caller, shared: UnreliableEnd | None
    ) -> None:
        super().__init__(schedule.broker_clock, result_ttl_ms=TTL_MS, shared=shared)
        self.schedule = schedule
        self.truth = truth
        self._plan = plan
        self._is_lossy = bool(plan.loss or plan.delay)
        self._caller = caller
        self._attempts: defaultdict[Entry, set[int]] = defaultdict(set)
        """By entry: the deliveries that this process got."""
        self.rouse: Callable[[], None] = lambda: None
        """Called when an armed claim has an answer."""

    def _wake(self) -> None:
        super()._wake()
        self.rouse()

    def fileno(self) -> int:
        """A schedule has no descriptors: the worker's wake-up asks `has_answer`."""
        return 0

    def has_answer(self) -> bool:
        """Whether the armed claim has one."""
        return self._armed is not None and bool(self._armed.claimed)

    def now_ms(self) -> float:
        """See WorkerEnd.now_ms."""
        schedule = self.schedule
        return (EPOCH_S + schedule.now + schedule.skew_s) * 1000

    def _call(self, name: str, serve: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One call of `serve` with these arguments, as the network lets it pass."""
        schedule, caller = self.schedule, self._caller
        now = schedule.now
        is_down = now < schedule.down_until or now < caller.cut_until
        if schedule.is_over or not (is_down or (self._is_lossy and now < self._plan.until)):
            return serve(*args, **kwargs)
        if is_down:
            fate = "late" if name not in _ONCE and schedule.rng.random() < 0.2 else "refused"
        elif schedule.rng.random() < self._plan.loss:
            fate = schedule.rng.choice(_FAILURES[:4] if name in _ONCE else _FAILURES)
            schedule.inject(f"call {fate}", f"{caller.label} {name}")
        elif schedule.rng.random() < self._plan.delay:
            schedule.injected["call slow"] += 1
            caller.wait(schedule.rng.uniform(0.0, 0.02))
            served = serve(*args, **kwargs)
            caller.wait(schedule.rng.uniform(0.0, 0.02))
            return served
        else:
            return serve(*args, **kwargs)
        if schedule.now >= schedule.down_until:
            # A pause of the broker keeps all callers from renewing; any other fault disturbs this caller only.
            caller.disturbed_at = schedule.now
        if fate == "repeated":
            serve(*args, **kwargs)
            return serve(*args, **kwargs)
        if fate == "unheard":
            serve(*args, **kwargs)
        elif fate == "late":
            # A broker that wakes serves what lies in its sockets before anything else.
            later = schedule.rng.choice((0.0, schedule.rng.uniform(0.0, 0.5)))
            schedule.after(
                max(0.0, schedule.down_until - schedule.now) + later, lambda: _served(serve(*args, **kwargs))
            )
        raise BrokerUnavailable(f"{name}: {fate}")

    # Producers' end

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """See ProducerEnd.publish."""
        return self._call("publish", self.serve_publish, slot, jobs, limits)

    def serve_publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """The broker's side of `publish`."""
        receipts = super().publish(slot, jobs, limits)
        for receipt in receipts:
            if receipt.outcome in ("accepted", "exists", "known"):
                self.truth.lost.discard(receipt.job_id)
            self._note_acceptance(receipt.job_id)
        self.schedule.note(f"publish {[(receipt.job_id[-4:], receipt.outcome) for receipt in receipts]}")
        return receipts

    def _note_acceptance(self, job_id: str) -> None:
        record = self._state.records.get(job_id)
        if record is not None:
            self.truth.accepted_ms[job_id] = int(record.entry_id.partition(b"-")[0])
            if job_id not in self.truth.accepted_at:
                self.truth.accepted_at[job_id] = self.schedule.now
                self.truth.expires_ms[job_id] = int(self.now_ms()) + self.truth.lifetime_ms[job_id]

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """See ProducerEnd.cancel."""
        return self._call("cancel", self.serve_cancel, job_id, tenant, sealed)

    def serve_cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """The broker's side of `cancel`."""
        outcome = super().cancel(job_id, tenant, sealed)
        if outcome is CancelOutcome.CANCELLED:
            self.truth.withdrawn[job_id] = self.schedule.now
        told = "too late" if isinstance(outcome, JobRecord) else outcome.value
        self.schedule.note(f"cancel {job_id[-4:]} {told}")
        return outcome

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """See ProducerEnd.job_record."""
        look = super().job_record
        return self._call("job_record", look, job_id, subscribe=subscribe)

    def expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """See ProducerEnd.expire."""
        return self._call("expire", self.serve_expire, job_id, tenant, sealed)

    def serve_expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """The broker's side of `expire`. No job ends before its time, and none that a live worker holds."""
        record = self._state.records.get(job_id)
        entry = (slot_of(job_id), record.priority, record.entry_id) if record is not None else None
        lease = self._state.queue(*entry[:2]).leases.get(entry[2]) if entry is not None else None
        is_ended = super().expire(job_id, tenant, sealed)
        if is_ended and entry is not None:
            self.schedule.note(f"expire {job_id[-4:]}")
            if self.now_ms() < self.truth.expires_ms[job_id]:
                self.schedule.violate(f"expired before its deadline: {job_id[-4:]}")
            if lease is not None:
                self._check_holder(entry, lease.owner)
        return is_ended

    def _check_holder(self, entry: Entry, consumer: str) -> None:
        """No client ends a job of a worker that lives and could renew its leases whenever the broker was there."""
        owner = self.truth.callers.get(consumer)
        if owner is not None and owner.holds(entry) and owner.disturbed_at < self.schedule.now - 2 * LEASE_S:
            self.schedule.violate(f"expired under the living: {owner.label} by {self._caller.label}")

    def waiting(self, slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> list[WaitingEntry]:
        """See OperatorEnd.waiting."""
        look = super().waiting
        return self._call("waiting", look, slot, priority, after, count, head_bytes)

    def withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """See OperatorEnd.withdraw."""
        if not jobs:
            return 0
        return self._call("withdraw", self.serve_withdraw, slot, priority, jobs, result_ttl_ms)

    def serve_withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """The broker's side of `withdraw`."""
        self.schedule.note(f"withdraw {[job.job_id[-4:] for job in jobs]}")
        return super().withdraw(slot, priority, jobs, result_ttl_ms)

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """See ProducerEnd.read."""
        return self._call("read", super().read, cursors, 0, count)

    def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """See ProducerEnd.job_records."""
        return self._call("job_records", super().job_records, job_ids)

    def activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """See FleetEnd.activate."""
        history = self.truth.answering[slot]
        if epoch > history[-1][1]:
            history.append((self.schedule.now, epoch, version))
        return self.serve_activate(slot, epoch, record, version, spec)

    def serve_activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """The broker's side of `activate`."""
        return super().activate(slot, epoch, record, version, spec)

    # Workers' end

    def exchange(
        self,
        consumer: str,
        commits: Sequence[Commit],
        claims: Sequence[Claim],
        result_ttl_ms: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """See WorkerEnd.exchange."""
        # A forward may run meanwhile. The broker does its part before or after that.
        is_slow = meanwhile is not None and self.schedule.rng.random() < 0.5
        if meanwhile is not None and is_slow:
            meanwhile()
        if claims and self._caller.is_winding_up():
            self.schedule.violate(f"claimed after its stop: {self._caller.label}")
        answer = self._call("exchange", self.serve_exchange, consumer, commits, claims, result_ttl_ms)
        if meanwhile is not None and not is_slow:
            meanwhile()
        return answer

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """The broker's side of `exchange`."""
        statuses, deliveries = super().exchange(consumer, commits, claims, result_ttl_ms)
        self._check_order(claims, deliveries)
        self._check_ends(commits, statuses)
        self._note_attempts(deliveries)
        if statuses:
            ended = [(commit.job_id[-4:], verdict.value) for commit, verdict in zip(commits, statuses, strict=True)]
            self.schedule.note(f"commit {self._caller.label} {ended}")
        if deliveries:
            self.schedule.note(f"claim {self._caller.label} {_shown(deliveries)}")
        return statuses, deliveries

    def _check_order(self, claims: Sequence[Claim], deliveries: Sequence[Delivery]) -> None:
        """No job is handed out while a more urgent one of its model waits; ageing is off in simulations."""
        for wish in claims if deliveries else ():
            least = max((each.priority for each in deliveries if each.slot == wish.slot), default=Priority.CRITICAL)
            if any(self._state.queue(wish.slot, band).waiting for band in _BANDS if band < least):
                self.schedule.violate(f"claimed a less urgent job first: {self._caller.label} {_shown(deliveries)}")

    def _note_attempts(self, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            self._attempts[each.slot, each.priority, each.entry_id].add(each.attempt)

    def _check_ends(self, commits: Sequence[Commit], statuses: Sequence[CommitStatus]) -> None:
        """A result tells in which delivery its job was answered, one of those to this worker; none expires early."""
        for commit, verdict in zip(commits, statuses, strict=True):
            if verdict is not CommitStatus.COMMITTED:
                continue
            told = opened(commit.sealed)[0].attempt
            had = self._attempts[commit.slot, commit.priority, commit.entry_id]
            if told not in had:
                self.schedule.violate(f"told of attempt {told}: {commit.job_id[-4:]} had {sorted(had)}")
            is_early = commit.state is State.EXPIRED and self.now_ms() < self.truth.expires_ms[commit.job_id]
            # The clock may have gone back since the worker looked at it.
            if is_early and not self.schedule.injected["jump"]:
                self.schedule.violate(f"expired before its deadline: {commit.job_id[-4:]}")

    def arm(
        self, consumer: str, slots: Sequence[str], count: int, block_ms: int, bands: Mapping[str, int] = ALL_BANDS
    ) -> None:
        """See WorkerEnd.arm."""
        if self._caller.is_winding_up():
            self.schedule.violate(f"claimed after its stop: {self._caller.label}")
        self._call("arm", super().arm, consumer, slots, count, block_ms, bands)

    def collect(self) -> list[Delivery]:
        """See WorkerEnd.collect."""
        return self._call("collect", self._collected)

    def disarm(self) -> list[Delivery]:
        """See WorkerEnd.disarm."""
        return self._call("disarm", self._collected)

    def _collected(self) -> list[Delivery]:
        deliveries = super().collect()
        if deliveries:
            self.schedule.note(f"collect {self._caller.label} {_shown(deliveries)}")
            self._note_attempts(deliveries)
        return deliveries

    def drop_armed(self) -> None:
        """See WorkerEnd.drop_armed. The connection is closed: no call that could fail."""
        super().collect()

    def renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        """See WorkerEnd.renew."""
        return self._call("renew", self.serve_renew, consumer, held)

    def serve_renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        """The broker's side of `renew`."""
        renewal = super().renew(consumer, held)
        if renewal.lost or renewal.cancelled:
            lost = sorted(job.job_id[-4:] for job in renewal.lost)
            stopped = sorted(job_id[-4:] for job_id in renewal.cancelled)
            self.schedule.note(f"renew {self._caller.label} lost {lost} cancelled {stopped}")
        return renewal

    def take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        """See WorkerEnd.take_over."""
        asked_ms = self.now_ms()
        return self._call("take_over", self.serve_asked, asked_ms, consumer, slot, lease_ms, count)

    def serve_asked(self, asked_ms: float, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        """Nothing is taken over for a call that was long on its way, as registry/broker/lua/take_over.lua has it.

        While it was, the broker may have been away, and the leases of the living have lapsed like all others.
        """
        if self.now_ms() - asked_ms > min(1250.0, max(250.0, lease_ms / 4)):
            return []
        return self.serve_take_over(consumer, slot, lease_ms, count)

    def serve_take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        """The broker's side of `take_over`."""
        place = self._state.slots[slot]
        if not place.has_leases:
            return super().take_over(consumer, slot, lease_ms, count)
        owners: dict[Entry, str] = {}
        for priority, queue in zip(_BANDS, place.queues, strict=True):
            if queue.leases:
                owners.update({(slot, priority, entry_id): lease.owner for entry_id, lease in queue.leases.items()})
        deliveries = self.hand_over(super().take_over(consumer, slot, lease_ms, count))
        if deliveries:
            self.schedule.note(f"take over {self._caller.label} {_shown(deliveries)}")
            for delivery in deliveries:
                self._check_owner(delivery, owners)
        return deliveries

    def hand_over(self, deliveries: list[Delivery]) -> list[Delivery]:
        """What `take_over` found; no crash may be counted that did not happen."""
        self._note_attempts(deliveries)
        for delivery in deliveries:
            job_id = open_job(delivery.sealed, UNSIGNED)[0].id
            if delivery.crashes > self.truth.crashes[job_id]:
                self.schedule.violate(
                    f"counted {delivery.crashes} crashes of {self.truth.crashes[job_id]}: {job_id[-4:]}"
                )
        return deliveries

    def _check_owner(self, delivery: Delivery, owners: Mapping[Entry, str]) -> None:
        """No worker takes over from one that lives and could renew its leases all the time."""
        entry = (delivery.slot, delivery.priority, delivery.entry_id)
        owner = self.truth.callers.get(owners.get(entry, ""))
        if owner is None or not owner.holds(entry):
            return
        since = self.schedule.now - 2 * LEASE_S
        if self.schedule.disturbed_at < since and owner.disturbed_at < since:
            self.schedule.violate(f"taken from the living: {owner.label} by {self._caller.label} {_shown([delivery])}")

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        """See WorkerEnd.release."""
        if held:
            self._call("release", self._released, consumer, held, version)

    def _released(self, consumer: str, held: Sequence[Held], version: str) -> None:
        """Whatever is given back, and to whom, that it was handed out is not counted."""
        mine = [
            (job, lease, lease.deliveries)
            for job in held
            if (lease := self._state.lease_of(consumer, job.slot, job.priority, job.entry_id)) is not None
        ]
        if version:
            self.serve_hand_over(consumer, held, version)
            if mine:
                self.truth.when_handed_over([_entry_of(job) for job, _, _ in mine], version)
        else:
            self.serve_release(consumer, held)
        for job, lease, deliveries in mine:
            if lease.deliveries >= deliveries and lease.owner != consumer:
                self.schedule.violate(f"counted as an attempt: {job.job_id[-4:]}")

    def serve_release(self, consumer: str, held: Sequence[Held]) -> None:
        """The broker's side of `release` to any worker."""
        super().release(consumer, held)
        self.schedule.note(f"release {self._caller.label} {[job.job_id[-4:] for job in held]}")

    def serve_hand_over(self, consumer: str, held: Sequence[Held], version: str) -> None:
        """The broker's side of `release` to those that have a version."""
        super().release(consumer, held, version=version)
        self.schedule.inject("hand over", f"{self._caller.label} {version} {[job.job_id[-4:] for job in held]}")

    def adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        """See WorkerEnd.adopt."""
        return self._call("adopt", self.serve_adopt, consumer, slot, versions, count)

    def serve_adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        """The broker's side of `adopt`."""
        if not self._state.slots[slot].has_leases:
            return []
        deliveries = self.hand_over(super().adopt(consumer, slot, versions, count))
        if deliveries:
            self.schedule.note(f"adopt {self._caller.label} {_shown(deliveries)}")
        return deliveries

    def depths(self, slot: str) -> list[Depth]:
        """No check reads the gauges that a worker sets once a second."""
        return []

    def workers(self) -> list[bytes]:
        """See FleetEnd.workers."""
        return self._call("workers", super().workers)

    def report(self, worker: str, report: bytes, ttl_ms: int) -> bool:
        """See WorkerEnd.report."""
        return self._call("report", super().report, worker, report, ttl_ms)

    def announce(self, slot: str, spec: bytes, versions: Mapping[str, bytes], *, replaces: bool) -> None:
        """See WorkerEnd.announce."""
        announce = super().announce
        self._call("announce", announce, slot, spec, versions, replaces=replaces)

    def suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        """See WorkerEnd.suspect."""
        self._call("suspect", self.serve_suspect, slot, jobs, incident, ttl_ms)

    def serve_suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        """The broker's side of `suspect`."""
        super().suspect(slot, jobs, incident, ttl_ms)
        self.schedule.note(f"suspect {[job.job_id[-4:] for job in jobs]}")

    def dead_letter(
        self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b""
    ) -> bool:
        """See WorkerEnd.dead_letter."""
        return self._call("dead_letter", self.serve_dead_letter, consumer, delivery, reason, job_id, sealed)

    def serve_dead_letter(self, consumer: str, delivery: Delivery, reason: str, job_id: str, sealed: bytes) -> bool:
        """The broker's side of `dead_letter`."""
        is_dead = super().dead_letter(consumer, delivery, reason, job_id=job_id, sealed=sealed)
        self.schedule.note(f"dead letter {self._caller.label} {job_id[-4:]} {'done' if is_dead else 'lost'}")
        if is_dead:
            self.truth.when_dead_lettered(delivery.slot, job_id)
        return is_dead

    def replay(
        self, slot: str, entry: str, job: Publication, job_ttl_ms: int, *, keeps_acceptance: bool = False
    ) -> Replay:
        """See OperatorEnd.replay."""
        return self._call("replay", self.serve_replay, slot, entry, job, job_ttl_ms, keeps_acceptance)

    def serve_replay(self, slot: str, entry: str, job: Publication, job_ttl_ms: int, keeps_acceptance: bool) -> Replay:
        """The broker's side of `replay`."""
        letter = super().read_dead_letter(slot, entry)
        outcome = super().replay(slot, entry, job, job_ttl_ms, keeps_acceptance=keeps_acceptance)
        if letter is not None and outcome is Replay.REPLAYED:
            self.truth.replayed[job.job_id] += 1
            del self.truth.crashes[job.job_id]
            if not keeps_acceptance:
                self._note_acceptance(job.job_id)
                self.truth.expires_ms[job.job_id] = int(self.now_ms()) + self.truth.lifetime_ms[job.job_id]
        self.schedule.note(f"replay {job.job_id[-4:]} {outcome.value}")
        return outcome

    def paused(self, slots: Sequence[str]) -> frozenset[str]:
        """See WorkerEnd.paused."""
        return self._call("paused", super().paused, slots)

    # The truth

    def leased_to(self, consumer: str) -> list[Entry]:
        """The entries that a consumer has the lease of."""
        return [
            (slot, priority, entry_id)
            for slot, place in self._state.slots.items()
            for priority, queue in zip(_BANDS, place.queues, strict=True)
            for entry_id, lease in queue.leases.items()
            if lease.owner == consumer
        ]

    def put_back(self, slot: str, epoch: int, record: bytes) -> None:
        """A client that may write to the broker can replace the record that is there."""
        self._state.activated[slot] = (epoch, record)

    def lose_everything(self) -> None:
        """The broker comes back empty."""
        super().lose_everything()
        self.truth.lose_everything()

    def unfinished(self) -> int:
        """Entries that are still in a queue."""
        return sum(len(queue) for place in self._state.slots.values() for queue in place.queues)

    def has_unfinished(self) -> bool:
        """Whether there are any."""
        for place in self._state.slots.values():
            for queue in place.queues:
                if queue.waiting or queue.leases:
                    return True
        return False


def _entry_of(job: Held) -> Entry:
    return job.slot, job.priority, job.entry_id


def _served(_: object) -> None:
    """The answer of a call whose caller has left."""


def _shown(deliveries: Sequence[Delivery]) -> list[tuple[str, str, int]]:
    return [(each.priority.label, each.entry_id.decode()[-7:], each.attempt) for each in deliveries]
