"""The seam between Penstock and a broker, both ends side by side.

    producer                      broker                                worker
    publish ---------------> record + queue entry ---- claim ----------> holds a lease
                             record + lease       <--- renew ----------- while it holds the job in memory
                             events               <--- emit ------------ chunks and progress, holder only
    read, records <--------- record becomes result <-- commit ---------- holder only, first commit wins

Rules that every broker keeps, and that tests/conformance checks:
  * publish is one step: a record and a queue entry for each accepted job, nothing at all for a refused one;
    publishing the same job id again changes nothing.
  * A claimed job belongs to one consumer until it is committed, released, or `lease_ms` have passed by the
    broker's clock since it was claimed or last renewed; then `take_over` gives it to the consumer that asks.
  * commit is one step: the record turns into the result, the entry leaves the queue, the client is told. It has
    no effect for a job that the consumer no longer holds.
  * A paused slot hands out nothing; all else goes on.
  * What is put aside keeps its bytes and what is known about them, and goes back in one step under its own id.
  * A record outlives its job's lifetime by an hour, so that whoever asks late reads why it never ran.
Times are the broker's own, in ms since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from penstock.registry.queues import Priority

__all__ = [
    "Broker",
    "CancelOutcome",
    "Claim",
    "Commit",
    "DeadLetter",
    "Delivery",
    "Depth",
    "Event",
    "FleetEnd",
    "Held",
    "Limits",
    "Publication",
    "Receipt",
    "Renewal",
    "Replay",
    "JobRecord",
    "State",
    "StreamEntry",
    "CommitStatus",
    "Waiting",
    "Withdrawal",
]


class State(Enum):
    """A job's state; the value is the first byte of its record. All but QUEUED are terminal."""

    QUEUED = "Q"
    COMPLETED = "C"
    FAILED = "F"
    CANCELLED = "X"
    EXPIRED = "E"
    DEAD = "D"


@dataclass(frozen=True, slots=True)
class Limits:
    """Admission: what `publish` refuses beyond. Times in ms; 0 in flight means no limit."""

    max_depth: int
    tenant_max_in_flight: int
    job_ttl_ms: int


class Publication(msgspec.Struct, frozen=True, gc=False):
    """One sealed job on its way in. `idempotency_digest` is the digest of (tenant, idempotency key),
    empty without a key; `fingerprint` tells the same payload from another under that key."""

    job_id: str
    priority: Priority
    sealed: bytes
    tenant: str
    reply: str = ""
    idempotency_digest: str = ""
    fingerprint: str = ""


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What became of a publication: `outcome` is accepted, known (the key's first job answers), conflict,
    full, tenant-full or memory (the broker is short of it). `job_id` is the job that answers for it; `retry_after_s`
    goes with a refusal for room."""

    outcome: str
    job_id: str
    retry_after_s: float = 0.0


class JobRecord(msgspec.Struct, frozen=True, gc=False):
    """A job as its record shows it: `result` is the sealed result of a terminal job, else empty;
    `is_claimed` says whether a worker holds it; `deliveries` how often it was handed out. `tenant` is empty for a
    terminal job: its sealed result says."""

    state: State
    tenant: str
    result: bytes = b""
    is_claimed: bool = False
    deliveries: int = 0
    cancel_requested: bool = False


class CancelOutcome(Enum):
    """`CANCELLED`: it will never run. `REQUESTED`: a worker holds it and is told to stop. `SETTLED`: too late.
    `UNKNOWN`: no such job."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"
    SETTLED = "settled"
    UNKNOWN = "unknown"


class StreamEntry(NamedTuple):
    """One entry of a reply or event stream; `fields` alternate name, value."""

    key: str
    entry_id: str
    fields: list[bytes]


class Event(NamedTuple):
    """One event to emit: `sealed` is an event envelope, or empty for a bare state."""

    type: str
    sealed: bytes = b""


class Claim(NamedTuple):
    """A worker's wish: up to `credit` jobs of `slot`, `reserve` of them kept for the oldest lower band
    once that has waited longer than `ageing_ms`."""

    slot: str
    credit: int
    reserve: int
    ageing_ms: int


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One claimed job. `entry_id` is `<ms>-<n>`: the ms at which the broker accepted it. `attempt` counts its
    deliveries, `crashes` the processes that died while it ran; only `take_over` finds any. `accepted_first_ms` is
    set for a job that came back from the dead letters with a deadline of its own. `active` is what `activate` had
    written of the slot when the job was claimed, empty for nothing."""

    slot: str
    priority: Priority
    entry_id: bytes
    sealed: bytes
    attempt: int = 1
    crashes: int = 0
    accepted_first_ms: int = 0
    active: bytes = b""

    @property
    def accepted_ms(self) -> int:
        """When the broker accepted the job, by the broker's clock."""
        return self.accepted_first_ms or int(self.entry_id.partition(b"-")[0])


class Held(NamedTuple):
    """A job that a worker holds in memory."""

    slot: str
    priority: Priority
    entry_id: bytes
    job_id: str


class Renewal(NamedTuple):
    """`lost`: jobs that now belong to another consumer or to none; `cancelled`: job ids whose cancellation was
    asked for."""

    lost: frozenset[Held]
    cancelled: frozenset[str]


class Commit(msgspec.Struct, frozen=True, gc=False):
    """How one held job ended; `sealed` is the result envelope."""

    slot: str
    priority: Priority
    entry_id: bytes
    job_id: str
    state: State
    sealed: bytes
    tenant: str
    reply: str = ""
    idempotency_digest: str = ""


class CommitStatus(Enum):
    """`COMMITTED`: this commit is the job's result, also when it is repeated. `FENCED`: the consumer no longer holds
    the job, and another result or none stands.
    `GONE`: it held the job, but the record had expired; there is nobody left to tell."""

    COMMITTED = "committed"
    FENCED = "fenced"
    GONE = "gone"


class Depth(NamedTuple):
    """One queue: jobs waiting or running, jobs running, and the age of the oldest waiting one."""

    slot: str
    priority: Priority
    jobs: int
    running: int
    oldest_waiting_s: float


class DeadLetter(msgspec.Struct, frozen=True, gc=False):
    """Bytes that were put aside. `entry` names the letter, `accepted_as` the queue entry that it was, accepted at
    `accepted_ms`; `job_id` and `tenant` are empty for bytes that were no accepted job. `sealed` is filled in by
    `dead_letter` only."""

    slot: str
    entry: str
    reason: str
    priority: Priority
    accepted_as: str
    accepted_ms: int
    deliveries: int
    crashes: int
    size: int
    job_id: str = ""
    tenant: str = ""
    sealed: bytes = b""

    @property
    def buried_ms(self) -> int:
        """When it was put aside, by the broker's clock."""
        return int(self.entry.partition("-")[0])


class Replay(Enum):
    """What became of a dead letter that was to go back. `MISSING`: there is none of that name. `LIVE`: its job is in
    the queue. `SETTLED`: its job has another end by now. `SUPERSEDED`: its idempotency key is another job's by now."""

    REPLAYED = "replayed"
    MISSING = "missing"
    LIVE = "live"
    SETTLED = "settled"
    SUPERSEDED = "superseded"


class Waiting(NamedTuple):
    """A queue entry that no worker holds; `head` is how its bytes begin."""

    entry_id: bytes
    head: bytes


class Withdrawal(NamedTuple):
    """A waiting entry to withdraw, and the sealed result that its job ends with; `job_id` and `tenant` are empty for
    bytes that are no job."""

    entry_id: bytes
    job_id: str = ""
    tenant: str = ""
    sealed: bytes = b""


class ProducerEnd(Protocol):
    """What clients need. Calls raise BrokerUnavailable when the broker does not answer in time."""

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """Accept or refuse each job, in order and in one step. The caller bounds bytes and count of a call."""

    def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """The jobs' records; None for those that have none. `is_claimed` is not filled in."""

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """One job, with `is_claimed`; `subscribe` makes its terminal event appear on its event stream."""

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome:
        """Withdraw a waiting job, with `sealed` as its result; of a running one, ask its worker to stop."""

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """Entries after each stream's cursor, waiting up to `block_ms`, or less, for the first."""

    def trim(self, key: str, before: str) -> None:
        """Forget the entries of a reply stream up to and including `before`."""

    def nudge(self, key: str) -> None:
        """Append an empty entry to a reply stream, so that a blocked `read` of it returns."""

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """The model's spec as JSON: of the version that answers, or of the one that is named."""


class WorkerEnd(Protocol):
    """What workers need. `consumer` is unique to one boot of one worker."""

    def prepare(self, slots: Sequence[str]) -> None:
        """Make the queues of these slots ready to be claimed from. Repeating it changes nothing."""

    def exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """Commit and claim in one round trip; verdicts in the order of `commits`. A paused slot hands out nothing."""

    def arm(self, consumer: str, slots: Sequence[str], count: int, block_ms: int) -> None:
        """Ask to be handed up to `count` jobs per queue when some arrive; `fileno` becomes readable then."""

    def fileno(self) -> int:
        """Readable once an armed claim has an answer."""

    def collect(self) -> list[Delivery]:
        """The answer of the armed claim, empty when its time ran out; it is no longer armed."""

    def disarm(self) -> list[Delivery]:
        """Withdraw the armed claim; what it had been handed meanwhile is returned."""

    def drop_armed(self) -> None:
        """Forget the armed claim after an error on it; leases bring back what it may have been handed."""

    def paused(self, slots: Sequence[str]) -> frozenset[str]:
        """Those of the slots that operators have paused. Until it is asked again, `arm` leaves these out."""

    def renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        """Extend the leases of jobs that the consumer still owns."""

    def take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        """Claim jobs whose lease has lapsed or that were released; none of a paused slot."""

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        """Give held jobs back at once; the next `take_over` of anyone finds them. Not an attempt that failed.

        version: hand them over to the workers that have this version of their model. `adopt` finds them at once, and
        they are leased to nobody but these: when they have waited for a lease, `take_over` of anyone finds them.
        """

    def adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        """Claim jobs that were handed over to the workers that have one of these versions; none of a paused slot."""

    def suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        """Add one crash to jobs that were running when a process died, whoever holds them now.

        `incident` names that process: repeating the call, for all or some of the jobs, counts nothing again. Jobs
        that wait for their first claim or have ended are left alone. The count is kept until `ttl_ms` after its
        last crash.
        """

    def emit(self, consumer: str, held: Held, events: Sequence[Event], ttl_ms: int, *, after: int) -> int:
        """Append to a running job's event stream; returns the sequence number of its last event.

        `after` is what the attempt's previous call returned, 0 on its first: that one begins with a `started`
        entry, or `reset` where an earlier attempt left events. A call that is repeated because its answer was lost
        appends nothing. Returns 0, and nothing happens, when the consumer lost the job.
        """

    def bury(self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b"") -> bool:
        """Move a held job, or bytes that cannot be one, to the dead letters with the reason, as the queue has them.

        Returns False, and nothing happens, when the consumer lost them. The oldest dead letters make room for it.

        job_id: the job that the bytes claim to be. It ends dead, with `sealed` as its result, if its record names
        this very entry.
        """

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        """Publish the spec of the version that is named; without one of the version that answers, unless another was
        promoted: then that one's stands."""

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """What `activate` has written of these slots; empty for nothing."""

    def report(self, worker: str, report: bytes, ttl_ms: int) -> None:
        """Say that this worker lives, with its report as JSON; an empty report withdraws it."""

    def now_ms(self) -> float:
        """The broker's clock."""


class FleetEnd(Protocol):
    """What those need who choose which version of a model answers."""

    def models(self) -> list[str]:
        """Names of the models that have a spec."""

    def workers(self) -> list[bytes]:
        """The reports of live workers."""

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """See ProducerEnd.spec."""

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        """See WorkerEnd.put_spec."""

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""

    def activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """Make a version the one that answers from the next claim on, with its spec, in one step.

        Every delivery carries `<epoch> <record>` from then on. Returns False, and nothing happens, when a record of
        this epoch or a later one stands there; repeating a call confirms it.
        """


class Broker(ProducerEnd, WorkerEnd, FleetEnd, Protocol):
    """All ends, and what operators look at."""

    def depths(self, slot: str) -> list[Depth]:
        """The four queues of a slot, most urgent first."""

    def drained(self, slot: str) -> int:
        """How many jobs of the slot workers have answered, ever: the difference of two looks is the throughput."""

    def pause(self, slot: str) -> None:
        """Hand out no job of the slot until `resume`, also after a restart; jobs are accepted, running ones go on.

        A blocking claim that was armed before may still be handed some.
        """

    def resume(self, slot: str) -> None:
        """End a pause."""

    def waiting(self, slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> list[Waiting]:
        """Up to `count` entries that no worker holds, oldest first, after `after` (empty: from the first)."""

    def withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """Take waiting entries out of the queue; each job ends cancelled. Returns how many left it.

        What a worker claimed meanwhile is left alone. The caller bounds bytes and count of a call.
        """

    def replay(
        self, slot: str, entry: str, job: Publication, job_ttl_ms: int, *, keeps_acceptance: bool = False
    ) -> Replay:
        """Put a dead letter's bytes back into the queue as `job`, in one step, for a lifetime of `job_ttl_ms`.

        It is queued as if it had been accepted now, but for a deadline if it `keeps_acceptance`; its count of
        deliveries begins anew. The bytes of `job` itself are not used.
        """

    def purge_dead(self, slot: str, entries: Sequence[str]) -> int:
        """Forget dead letters; returns how many there were."""

    def dead_letters(self, slot: str, after: str = "", count: int = 100) -> list[DeadLetter]:
        """Up to `count` dead letters after the one called `after`, oldest first, without their bytes.

        Few when they are large: only an empty answer says that there are no more.
        """

    def dead_letter(self, slot: str, entry: str) -> DeadLetter | None:
        """One dead letter with its bytes; None when there is none of that name."""

    def close(self) -> None:
        """Give the connections back."""
