"""The seam between Penstock and a broker, both ends side by side.

    producer                      broker                                worker
    publish ---------------> record + queue entry ---- claim ----------> holds a lease
                             record + lease       <--- renew ----------- while it holds the job in memory
                             events               <--- emit ------------ chunks and progress, holder only
    read, records <--------- record becomes result <-- commit ---------- holder only, first commit wins

Rules that every broker keeps, and that tests/conformance checks:
  * publish is one step: it writes a record and a queue entry for each accepted job, and nothing for a refused one.
    Publishing the same job id again changes nothing.
  * A claimed job belongs to one consumer until it is committed or released, or until its lease lapses: `lease_ms`
    have passed by the broker's clock since the claim or the last renewal. Then `take_over` claims it again.
  * commit is one step: the record becomes the result, the entry leaves the queue, the client is told. It has
    no effect on a job that the consumer no longer holds.
  * A paused slot hands out no jobs; publishing, committing and reading continue.
  * A dead letter keeps its bytes, its reason and its counts. Replaying it is one step and keeps the job id.
  * A record outlives its job's lifetime by an hour, so that a late reader learns why the job never ran.
Times are the broker's own, in ms since the epoch. A slot is the name of a model; see registry/queues.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec

from penstock.registry.queues import Priority

__all__ = [
    "ALL_BANDS",
    "Announced",
    "Backlog",
    "Broker",
    "CancelOutcome",
    "Claim",
    "Commit",
    "CommitStatus",
    "DeadLetter",
    "Delivery",
    "Depth",
    "Emission",
    "FleetEnd",
    "Held",
    "JobRecord",
    "Limits",
    "OperatorEnd",
    "Position",
    "ProducerEnd",
    "Publication",
    "Quarantined",
    "Rating",
    "Receipt",
    "Renewal",
    "Replay",
    "State",
    "StreamEntry",
    "Usage",
    "WaitingEntry",
    "Withdrawal",
    "WorkerEnd",
]


class State(Enum):
    """A job's state; the value is the first byte of its record. All but QUEUED are terminal."""

    QUEUED = "Q"
    COMPLETED = "C"
    FAILED = "F"
    CANCELLED = "X"
    EXPIRED = "E"
    DEAD = "D"

    # That of Enum is a Python function. Each commit looks its state up.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of admission, which `publish` keeps. `tenant_max_in_flight` of 0 means no limit."""

    max_depth: int
    tenant_max_in_flight: int
    job_ttl_ms: int


class Publication(msgspec.Struct, frozen=True, gc=False):
    """One sealed job to publish. `idempotency_digest` is the digest of (tenant, idempotency key), empty without a key;
    `fingerprint` is the digest of its payload: two payloads under one key are a conflict. `deadline_ms` counts from
    acceptance; 0: no deadline. `webhook` is the line of the job's record that tells where to report its end, see
    registry/webhook_target.py; empty: nowhere. `account` is the id of the API key that pays for the job; empty:
    none. `prompt_tokens` counts in its usage: tokens of the inputs that the model's result will not tell."""

    job_id: str
    priority: Priority
    sealed: bytes
    tenant: str
    reply: str = ""
    idempotency_digest: str = ""
    fingerprint: str = ""
    deadline_ms: int = 0
    webhook: str = ""
    account: str = ""
    prompt_tokens: int = 0

    def lifetime_ms(self, job_ttl_ms: int) -> int:
        """How long after its acceptance the job may start."""
        # Twice for each job: a comparison takes a third of a call of `min`.
        return self.deadline_ms if 0 < self.deadline_ms < job_ttl_ms else job_ttl_ms


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a publication: accepted, exists (a job of this id was accepted before, and has ended or replies
    to another client), known (the first job of its idempotency key answers), conflict, full, tenant-full or memory
    (the broker is short of it). `job_id` is the job that answers; `retry_after_s` is set when the refusal is because
    the queue or memory is full."""

    outcome: str
    job_id: str
    retry_after_s: float = 0.0


class Backlog(NamedTuple):
    """A slot's jobs that have not ended, and how many were committed so far."""

    jobs: int
    committed: int


class JobRecord(msgspec.Struct, frozen=True, gc=False):
    """The state of a job. `result` is the sealed result of a terminal job, else empty; `is_claimed`: a worker holds
    the job; `deliveries` counts how often it was claimed; `left_ms`: the time until its deadline or the end of its
    lifetime, negative afterwards; `holder` is the consumer that holds it. A terminal job has no `tenant` here: its
    sealed result has it."""

    state: State
    tenant: str
    result: bytes = b""
    is_claimed: bool = False
    deliveries: int = 0
    cancel_requested: bool = False
    left_ms: int | None = None
    holder: str = ""


class Rating(Enum):
    """What `rate` did."""

    COUNTED = "counted"
    REPEATED = "repeated"
    """The job was rated before."""
    UNKNOWN = "unknown"
    """There is no result of the job."""


class CancelOutcome(Enum):
    """What became of a job that had not ended. `CANCELLED`: it will never run. `REQUESTED`: a worker holds the job and
    is told to stop. `UNKNOWN`: there is no such job. `FOLLOWED`: the job goes on; another process
    waits for it."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"
    UNKNOWN = "unknown"
    FOLLOWED = "followed"


class StreamEntry(NamedTuple):
    """One entry of a reply or event stream; `fields` alternate name, value."""

    key: str
    entry_id: str
    fields: list[bytes]


class Position(NamedTuple):
    """How far the events of a job go: the sequence number of the last one, and the bytes of all envelopes so far,
    deleted ones included. `seq` of 0: nothing was emitted, or the consumer has lost the job."""

    seq: int = 0
    size: int = 0


ALL_BANDS: Final[Mapping[str, int]] = MappingProxyType({})
"""The bands of a blocking claim that names none: those of all priorities."""


class Claim(NamedTuple):
    """A worker's request for up to `credit` jobs of `slot`. `reserve` of them are kept for the lower priority whose
    oldest job has waited longest, if that is longer than `ageing_ms`.

    `credit_bytes`: no further job is claimed when the sealed bytes of the claimed ones have reached it, or have reached
    CLAIM_BYTES. The last one may exceed it, and any positive credit gets a job. One job of the reserve is claimed
    beyond it. `expected_bytes`: the size of a job, as a guess; a good one saves steps inside the broker.
    `bands`: only jobs of so many priorities, the most urgent ones."""

    slot: str
    credit: int
    reserve: int
    ageing_ms: int
    credit_bytes: int = 1 << 50
    expected_bytes: int = 1 << 20
    bands: int = len(Priority)


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One claimed job. `entry_id` is `<ms>-<n>`, with the ms at which the broker accepted the job. `attempt` counts its
    deliveries, `crashes` the processes that died while the job ran: only `take_over` and `adopt` find any.
    `exceeded_s` is the limit that the last forward of the job exceeded; 0: the job may have a forward.
    `accepted_first_ms` is set for a replayed dead letter with a deadline. `active` is the record of the slot's active
    version (see `activate`) at the time of the claim; empty when no version was promoted."""

    slot: str
    priority: Priority
    entry_id: bytes
    sealed: bytes
    attempt: int = 1
    crashes: int = 0
    accepted_first_ms: int = 0
    active: bytes = b""
    exceeded_s: float = 0.0

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


class Emission(NamedTuple):
    """One envelope of `events` events to append to a held job's stream as one entry, whose id has the number of the
    last event. `attempt` names this run of the job. `after` is the position that the run's previous emission returned.
    Events before number `keep_from` are deleted. `resumes`: a run that begins continues the events of the one before,
    and does not void them."""

    held: Held
    attempt: str
    sealed: bytes
    events: int = 1
    after: Position = Position()
    keep_from: int = 0
    resumes: bool = False


class Renewal(NamedTuple):
    """`lost`: jobs that now belong to another consumer or to none. `cancelled`: ids of jobs whose cancellation was
    requested."""

    lost: frozenset[Held]
    cancelled: frozenset[str]


class Usage(NamedTuple):
    """What an account has used of a model in a month: accepted jobs, and tokens: those that were counted at acceptance,
    and those of the texts of ended jobs."""

    jobs: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Commit(msgspec.Struct, frozen=True, gc=False):
    """How one held job ended; `sealed` is the result envelope. `account` is the id of the API key that pays for the
    tokens of a text; empty: none."""

    slot: str
    priority: Priority
    entry_id: bytes
    job_id: str
    state: State
    sealed: bytes
    tenant: str
    reply: str = ""
    idempotency_digest: str = ""
    account: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0


class CommitStatus(Enum):
    """`COMMITTED`: this commit is the job's result, also when it is repeated. `FENCED`: the consumer no longer holds
    the job; the record has another result or none. `GONE`: the consumer held the entry, but the job's record had
    expired or had a result."""

    COMMITTED = "committed"
    FENCED = "fenced"
    GONE = "gone"


class Depth(NamedTuple):
    """One queue: `jobs` waiting or running, `running` jobs, and the age of the oldest waiting job."""

    slot: str
    priority: Priority
    jobs: int
    running: int
    oldest_waiting_s: float


class DeadLetter(msgspec.Struct, frozen=True, gc=False):
    """Bytes that no worker can or may run again. `entry` is the letter's id, `accepted_as` the id of the queue entry
    from which it came, accepted at `accepted_ms`. `job_id` and `tenant` are empty for bytes that were no accepted job.
    `sealed` is filled in by `read_dead_letter` only."""

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
    def dead_lettered_ms(self) -> int:
        """When it became a dead letter, by the broker's clock."""
        return int(self.entry.partition("-")[0])


class Replay(Enum):
    """The outcome of a replay. `MISSING`: no dead letter has this id. `LIVE`: its job is in the queue. `SETTLED`: its
    job has ended in another way. `SUPERSEDED`: its idempotency key belongs to another job now."""

    REPLAYED = "replayed"
    MISSING = "missing"
    LIVE = "live"
    SETTLED = "settled"
    SUPERSEDED = "superseded"


class WaitingEntry(NamedTuple):
    """A queue entry that no worker holds. `head` holds its first bytes."""

    entry_id: bytes
    head: bytes
    accepted_first_ms: int = 0
    """When the job of a replayed dead letter was accepted; 0: with this entry."""

    @property
    def accepted_ms(self) -> int:
        """When the job was accepted, in ms of the broker's clock."""
        return self.accepted_first_ms or int(self.entry_id.partition(b"-")[0])


class Withdrawal(NamedTuple):
    """A waiting entry to withdraw, and the state and the sealed result of its job: CANCELLED, or EXPIRED when its time
    has passed. `job_id` and `tenant` are empty for bytes that are no job."""

    entry_id: bytes
    job_id: str = ""
    tenant: str = ""
    sealed: bytes = b""
    state: State = State.CANCELLED


class Announced(NamedTuple):
    """A model as its workers announce it: the spec of the active version as JSON, and the reports about their keys."""

    spec: bytes | None
    key_reports: tuple[bytes, ...] = ()


class Quarantined(NamedTuple):
    """A foreign key that was quarantined: one of ours that another program had replaced by a key of another type.

    `name` is its present key, `key` its former one; `kind` is its type, as the broker names it."""

    name: str
    at_ms: int
    kind: str
    key: str


class ProducerEnd(Protocol):
    """The calls of clients. Each raises BrokerUnavailable when the broker does not answer in time."""

    def publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        """Accept or refuse each job, in order and in one step. The caller bounds bytes and count of a call."""

    def job_records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """The record of each job, or None. Of a job that has not ended, only state and tenant are filled in."""

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        """The record of one job, or None. With `subscribe` the job's terminal event appears on its event stream."""

    def cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """Withdraw a waiting job, with `sealed` as its result. If a worker holds the job, ask the worker to stop.

        Returns the terminal record of a job that had ended. Its tenant is not compared: the sealed result has it."""

    def abandon(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        """The same as `cancel`, for a submitter that waits no longer. Nothing happens to a job that is followed."""

    def follow(self, job_ids: Sequence[str], follower: str, ttl_ms: int) -> None:
        """Note for `ttl_ms` that a process waits for jobs which it has not submitted. `follower` names that wait."""

    def unfollow(self, job_ids: Sequence[str], follower: str) -> None:
        """End a `follow`."""

    def expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        """End a job whose deadline or lifetime has passed, with `sealed` as its result. Returns whether it did.

        Nothing happens before that time by the broker's clock, to a job that has ended, and while a worker holds the
        job: that worker ends it. A worker that may live keeps the job, also after a pause of the broker. Its lease has
        lapsed for good when such calls counted the length of a lease after the lapse without a renewal in between: a
        call counts the time since the call before, and a quarter of a lease at most. So the caller asks again.
        """

    def rate(self, job_id: str, experiment: str, version: str, quality: float) -> Rating:
        """Count the quality of an ended job for its arm of an experiment, once for each job.

        The sums stay for 90 days after the last call."""

    def read(self, cursors: Mapping[str, str], block_ms: int, count: int = 256) -> list[StreamEntry]:
        """Entries after each stream's cursor. Waits for the first one for at most `block_ms`."""

    def trim(self, key: str, before: str) -> None:
        """Delete the entries of a reply stream up to and including `before`."""

    def nudge(self, key: str) -> None:
        """Append an empty entry to a reply stream, so that a blocked `read` of it returns."""

    def spec(self, slot: str, version: str = "") -> bytes | None:
        """The spec of a version as JSON, or None. Without `version`, the spec of the active version."""

    def announced(self, slot: str) -> Announced:
        """The spec of the active version and the reports of `report_keys`, in one round trip.

        A report may be seen for as long again as it was published for.
        """

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """See WorkerEnd.actives."""


class WorkerEnd(Protocol):
    """The calls of workers. `consumer` is unique to one boot of one worker."""

    def prepare(self, slots: Sequence[str]) -> None:
        """Make the queues of these slots ready for claims. Repeating the call changes nothing."""

    def exchange(
        self,
        consumer: str,
        commits: Sequence[Commit],
        claims: Sequence[Claim],
        result_ttl_ms: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        """Commit and claim in one round trip. Returns a status for each commit, in order, and the claimed jobs.

        meanwhile: called once the calls are on their way, where they could be sent.
        """

    def arm(
        self, consumer: str, slots: Sequence[str], count: int, block_ms: int, bands: Mapping[str, int] = ALL_BANDS
    ) -> None:
        """Begin a blocking claim of up to `count` jobs per queue. `fileno` becomes readable when some arrive.

        bands: how many of the most urgent priorities are claimed of a slot, if not all.
        """

    def fileno(self) -> int:
        """A descriptor that is readable when the armed claim has an answer."""

    def collect(self) -> list[Delivery]:
        """The jobs of the armed claim, none when its time ran out. The claim is no longer armed."""

    def disarm(self) -> list[Delivery]:
        """Withdraw the armed claim, and return the jobs that it had claimed meanwhile."""

    def unblock(self) -> None:
        """From any thread: the armed claim takes no further job. What it has taken is for `collect` or `disarm`."""

    def drop_armed(self) -> None:
        """Drop the armed claim after an error on it. If it had claimed jobs, their leases lapse."""

    def paused(self, slots: Sequence[str]) -> frozenset[str]:
        """The paused ones among these slots. `arm` leaves them out until the next call of `paused`."""

    def renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        """Extend the leases of the jobs that the consumer still holds."""

    def take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        """Claim jobs that were released or whose lease has lapsed. A paused slot hands out none."""

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        """Give held jobs back. The next `take_over` of any consumer claims them; this delivery is not counted.

        version: hand the jobs over to workers that have this version of their model. `adopt` claims them at once;
        `take_over` claims them when they have waited for as long as a lease.
        """

    def adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        """Claim jobs that were released for one of these versions. A paused slot hands out none."""

    def suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        """Count one crash for jobs that were running when a process died, whichever consumer holds them now.

        `incident` names that process, see incidents.py: a job counts each incident once, so that the call may be
        repeated. Jobs that were never claimed or have ended are unchanged. The incidents are kept until `ttl_ms` after
        the last one.
        """

    def job_events(self, job_id: str) -> list[StreamEntry]:
        """The entries of a job's event stream, from the first that is kept."""

    def emit(self, consumer: str, emissions: Sequence[Emission], ttl_ms: int, *, max_bytes: int) -> list[Position]:
        """Append events of running jobs, each job named once; return the new position of each job, in order.

        The first emission of a run also appends a `started` entry, or `reset` where an earlier run left events. These
        are deleted when all of them would take more than `max_bytes`. Repeating a call appends nothing. For a job that
        the consumer has lost, nothing happens.
        """

    def dead_letter(
        self, consumer: str, delivery: Delivery, reason: str, *, job_id: str = "", sealed: bytes = b""
    ) -> bool:
        """Move a held entry to the dead letters with its bytes and the reason. The oldest dead letters make room.

        Returns False, and nothing happens, when the consumer has lost the entry.

        job_id: the job that the bytes claim to be. If its record names this very entry, the job ends as DEAD with
        `sealed` as its result.
        """

    def put_spec(self, slot: str, spec: bytes, version: str = "") -> None:
        """Publish the spec of a version. Without `version`, publish it as the active one's, unless one was promoted."""

    def announce(self, slot: str, spec: bytes, versions: Mapping[str, bytes], *, replaces: bool) -> None:
        """Publish the specs of a served model again: `spec` as the active version's, unless one was promoted, and those
        of `versions`. Unless it `replaces`, it fills in what the broker has lost, and leaves the rest.
        """

    def actives(self, slots: Sequence[str]) -> dict[str, bytes]:
        """The record of each slot's active version, as `<epoch> <record>`; empty when no version was promoted."""

    def report(self, worker: str, report: bytes, ttl_ms: int) -> bool:
        """Publish the report of a live worker as JSON, for `ttl_ms`. An empty report withdraws it.

        Returns whether the broker had the report of this connection's last call. If not, the broker's data may have
        been cleared or restored from an older copy, or the report has expired.
        """

    def report_keys(self, slot: str, report: bytes, ttl_ms: int, *, is_live: bool = True) -> None:
        """Publish a live worker's report about its signing keys, for `ttl_ms`. Not live: withdraw the same report."""

    def observe(self, slot: str, experiment: str, field: str, figures: bytes, ttl_ms: int) -> None:
        """Keep what a worker has counted of an experiment, under its field, until `ttl_ms` after the last such call.

        See safety/arm_figures.py. Repeating the call changes nothing.
        """

    def quarantine(self, slots: Sequence[str]) -> None:
        """Quarantine foreign keys: keys of these models that another program has replaced by keys of another type.

        Any other call does so, too, with those that it meets.
        """

    def take_quarantined(self) -> list[Quarantined]:
        """The foreign keys that this connection has quarantined since the last call."""

    def now_ms(self) -> float:
        """The broker's clock."""


class FleetEnd(Protocol):
    """The calls that choose the active version of a model."""

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
        """Make a version the active one, with its spec, in one step. Every later delivery carries `<epoch> <record>`.

        Returns False, and nothing happens, when another record of this epoch or a later one is active. Repeating the
        call returns True.
        """

    def observations(self, slot: str, experiment: str) -> dict[str, bytes]:
        """The figures of each field that `observe` has kept for an experiment."""

    def ratings(self, slot: str, experiment: str) -> dict[str, bytes]:
        """The sums that `rate` has kept for an experiment, by version; see safety/arm_figures.py."""


class OperatorEnd(FleetEnd, Protocol):
    """The calls of operators: queues, pauses, dead letters, versions."""

    def depths(self, slot: str) -> list[Depth]:
        """The four queues of a slot, most urgent first."""

    def usage(self, slot: str) -> dict[tuple[str, str], Usage]:
        """What was used of the slot, by account and month of UTC, such as `2026-11`.

        A job counts once: when it is accepted, and its tokens when it is committed.
        """

    def committed(self, slot: str) -> int:
        """How many jobs of the slot were committed so far. The difference of two readings is the throughput."""

    def pause(self, slot: str) -> None:
        """Hand out no job of the slot until `resume`, also after a restart. Publishing and running jobs continue.

        A blocking claim that was armed before may still claim jobs.
        """

    def resume(self, slot: str) -> None:
        """End a pause."""

    def waiting(self, slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> list[WaitingEntry]:
        """Up to `count` entries after `after` that no worker holds, oldest first. Empty `after`: from the first."""

    def newest_entry(self, slot: str, priority: Priority) -> bytes:
        """The id of the newest entry of the queue, waiting or held; empty: there is none.

        Ids only grow, also after the broker's clock was set back: a later entry has a greater one.
        """

    def queued_job(self, job_id: str) -> Delivery | None:
        """The queue entry of a job that has not ended, with its incidents, as a worker would get it. Claims nothing.

        `attempt` and `active` are not filled in.
        """

    def withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """Remove waiting entries from the queue and end their jobs. Returns how many were removed.

        Entries that a worker has claimed meanwhile stay. The caller bounds bytes and count of a call.
        """

    def replay(
        self, slot: str, entry: str, job: Publication, job_ttl_ms: int, *, keeps_acceptance: bool = False
    ) -> Replay:
        """Put a dead letter's bytes back into the queue as `job`, in one step, for a lifetime of `job_ttl_ms`.

        The job is queued as if it had been accepted now, and its deliveries are counted from 0. With
        `keeps_acceptance` its deadline counts from its first acceptance. `job.sealed` is not used.
        """

    def purge_dead(self, slot: str, entries: Sequence[str]) -> int:
        """Delete dead letters. Returns how many of them existed."""

    def dead_letters(self, slot: str, after: str = "", count: int = 100) -> list[DeadLetter]:
        """Up to `count` dead letters after `after`, oldest first, without their bytes.

        The answer is shorter when the letters are large. Only an empty answer means that there are no more.
        """

    def read_dead_letter(self, slot: str, entry: str) -> DeadLetter | None:
        """One dead letter with its bytes, or None."""

    def quarantined(self, slot: str = "") -> list[Quarantined]:
        """The foreign keys of a slot that were quarantined and still exist, oldest first; see WorkerEnd.quarantine.

        Without a slot: those of the keys that belong to no slot.
        """


class Broker(ProducerEnd, WorkerEnd, OperatorEnd, Protocol):
    """All three ends."""

    def close(self) -> None:
        """Close the connections."""
