"""Brokers and drains that break one promise each: what the simulator must catch, or its silence says nothing.

Each is a small change to the side that it breaks, by which `finding` it is caught, and nothing else about it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from msgspec import structs

from penstock.registry.broker.base import (
    CancelOutcome,
    Claim,
    Commit,
    CommitStatus,
    Delivery,
    Held,
    JobRecord,
    Limits,
    Publication,
    Receipt,
    Renewal,
    Replay,
    State,
)
from penstock.registry.broker.memory_queue import Lease
from penstock.registry.envelope import Failure
from penstock.registry.queues import Priority, slot_of
from penstock.safety.cache_entry import key_of
from penstock.workers.backlog import Waiting
from penstock.workers.batch_run import BatchRun
from penstock.workers.batching.batcher import Batcher, Pending, _SubQueue
from penstock.workers.cache import AnswerCache, L1Cache, SingleFlight
from penstock.workers.claims import Claimer
from penstock.workers.completer import Completer
from penstock.workers.intake import Intake
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeaseKeeper
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.runtime.tracebacks import ModelTrace
from penstock.workers.transfers import JobTransfers
from penstock.workers.versions.deployment_store import DeploymentStore
from penstock.workers.versions.version import ServedVersion
from tests.simulation.broker import Entry, UnreliableEnd
from tests.simulation.checker import Mutation
from tests.simulation.parts import SteppedExecutor, SteppedRouter, SteppedScheduler
from tests.simulation.plan import LEASE_S
from tests.simulation.worker import STEPPED, SteppedDrain

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken promise, and the beginning of the finding that must show it."""

    mutation: Mutation
    finding: str


class _Popping(UnreliableEnd):
    """Entries can be taken off their queue before they are committed; a commit does without them."""

    def pop(self, entries: Sequence[Entry]) -> None:
        for slot, priority, entry_id in entries:
            self._state.queue(slot, priority).remove(entry_id)

    def serve_renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        return Renewal(frozenset(), super().serve_renew(consumer, held).cancelled)

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        for commit in commits:
            record = self._state.records.get(commit.job_id)
            leases = self._state.queue(commit.slot, commit.priority).leases
            if record is not None and record.state is State.QUEUED and commit.entry_id not in leases:
                leases[commit.entry_id] = Lease(b"", consumer, self.now_ms())
        return super().serve_exchange(consumer, commits, claims, result_ttl_ms)


class PopWithoutRecord(_Popping):
    """A claim takes the job off the queue, and no record says which worker has it."""

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        statuses, deliveries = super().serve_exchange(consumer, commits, claims, result_ttl_ms)
        self.pop([_entry(delivery) for delivery in deliveries])
        return statuses, deliveries

    def _collected(self) -> list[Delivery]:
        deliveries = super()._collected()
        self.pop([_entry(delivery) for delivery in deliveries])
        return deliveries


class AckBeforeCommit(SteppedScheduler):
    """The job leaves the queue when its batch is formed."""

    def next_run(self, expired: list[Waiting], *, is_idle: bool) -> BatchRun | None:
        run = super().next_run(expired, is_idle=is_idle)
        if run is not None:
            assert isinstance(self.end, _Popping)
            self.end.pop([_entry(job.delivery) for job in run.jobs])
        return run


class NoFence(UnreliableEnd):
    """A commit is accepted from any worker, whichever holds the job and whatever was committed before."""

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        for commit in commits:
            record = self._state.records.get(commit.job_id)
            if record is not None and record.result != commit.sealed:
                record.state = State.QUEUED
                self._state.queue(commit.slot, commit.priority).leases[commit.entry_id] = Lease(b"", consumer, 0.0)
        return super().serve_exchange(consumer, commits, claims, result_ttl_ms)


class LeaseNeverRenewed(UnreliableEnd):
    """A renewal is answered and not carried out."""

    def serve_renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        before = {entry: lease.since_ms for entry, lease in self._leases(held)}
        renewal = super().serve_renew(consumer, held)
        for entry, lease in self._leases(held):
            lease.since_ms = before[entry]
        return renewal

    def _leases(self, held: Sequence[Held]) -> list[tuple[Entry, Lease]]:
        entries = [(job.slot, job.priority, job.entry_id) for job in held]
        return [
            (entry, lease)
            for entry in entries
            if (lease := self._state.queue(entry[0], entry[1]).leases.get(entry[2])) is not None
        ]


class TakeOverOfTheLiving(UnreliableEnd):
    """Any lease counts as lapsed."""

    def serve_take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        return super().serve_take_over(consumer, slot, 0, count)


class TakeOverForgotten(UnreliableEnd):
    """Only what was released is ever handed out again."""

    def serve_take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        return super().serve_take_over(consumer, slot, 1 << 50, count)


class TakeOverLate(UnreliableEnd):
    """A lease counts as lapsed after three times its length."""

    def serve_take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        return super().serve_take_over(consumer, slot, 3 * lease_ms, count)


class LateTakeOver(UnreliableEnd):
    """A take-over that was long on its way is served like any other."""

    def serve_asked(self, asked_ms: float, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        return self.serve_take_over(consumer, slot, lease_ms, count)


class _GapUnseen(LeaseKeeper):
    """However long the broker was away, others' leases count as theirs to renew."""

    def _is_after_gap(self, now: float) -> bool:
        return False


class _GapSeenLate(LeaseKeeper):
    """The first take-over after a gap is asked for before the gap is noticed."""

    def _take_over(self) -> None:
        is_after_gap, self._last_contact = self._is_after_gap(self._clock()), self._clock()
        super()._take_over()
        if is_after_gap:
            self._may_take_over_at = self._clock() + self._lease_s


class _ShortGapUnseen(LeaseKeeper):
    """Gaps of less than a second are none, however short the leases are."""

    def _is_after_gap(self, now: float) -> bool:
        return now - self._last_contact > max(1.0, self._lease_s / 2)


class TakeOverAfterAPause(SteppedDrain):
    """A worker takes over before the living had the time to renew."""

    keeper: type[LeaseKeeper] = _GapUnseen

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.leases.__class__ = self.keeper


class IdleTakesOverAfterAPause(TakeOverAfterAPause):
    """A worker that holds nothing does so, as its first call after the pause is the take-over itself."""

    keeper = _GapSeenLate


class TakeOverAfterAShortPause(TakeOverAfterAPause):
    """A worker does so when the pause was short, and the leases as well."""

    keeper = _ShortGapUnseen


class ToldTwice(UnreliableEnd):
    """A commit that is repeated, because its answer was lost, tells its client again."""

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        held = [self._state.lease_of(consumer, each.slot, each.priority, each.entry_id) for each in commits]
        statuses, deliveries = super().serve_exchange(consumer, commits, claims, result_ttl_ms)
        for commit, lease, verdict in zip(commits, held, statuses, strict=True):
            if lease is None and verdict is CommitStatus.COMMITTED:
                with self._changed:
                    self._tell_clients([commit])
        return statuses, deliveries


class DeliveriesCountedAsCrashes(UnreliableEnd):
    """Every delivery but the first counts as if its process had died of the job."""

    def hand_over(self, deliveries: list[Delivery]) -> list[Delivery]:
        return super().hand_over([structs.replace(each, crashes=each.attempt - 1) for each in deliveries])


class ReleaseCountedAsCrash(UnreliableEnd):
    """What a draining worker gives back is held against it."""

    def serve_release(self, consumer: str, held: Sequence[Held]) -> None:
        super().serve_release(consumer, held)
        for job in held:
            super().serve_suspect(job.slot, [job], f"release at {self.now_ms()}", 1 << 40)


class CrashesForgotten(UnreliableEnd):
    """No crash of a job is counted."""

    def serve_suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        """Nothing is kept."""


class CrashCountedTwice(UnreliableEnd):
    """A report that is repeated counts again."""

    def serve_suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        super().serve_suspect(slot, jobs, f"{incident} at {self.now_ms()} {self.schedule.rng.random()}", ttl_ms)


class CommitNotAtomic(UnreliableEnd):
    """Now and then a result is written and its entry stays in the queue."""

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        places = [(self._state.queue(commit.slot, commit.priority).leases, commit.entry_id) for commit in commits]
        held = [(leases, entry_id, leases.get(entry_id)) for leases, entry_id in places]
        answer = super().serve_exchange(consumer, commits, claims, result_ttl_ms)
        for leases, entry_id, lease in held:
            if lease is not None and self.schedule.rng.random() < 0.05:
                leases[entry_id] = lease
        return answer


class ReplyWithoutRecord(UnreliableEnd):
    """The client is told, and now and then nothing is written."""

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        answer = super().serve_exchange(consumer, commits, claims, result_ttl_ms)
        for commit in commits:
            record = self._state.records.get(commit.job_id)
            if record is not None and self.schedule.rng.random() < 0.05:
                record.state, record.result = State.QUEUED, b""
        return answer


class RecordWithoutReply(UnreliableEnd):
    """A result is written, and its client is not told."""

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        silent = [structs.replace(commit, reply="") for commit in commits]
        return super().serve_exchange(consumer, silent, claims, result_ttl_ms)


class IdempotencyForgotten(UnreliableEnd):
    """A key is not remembered."""

    def serve_publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        return super().serve_publish(slot, [structs.replace(job, idempotency_digest="") for job in jobs], limits)


class PublishedTwice(UnreliableEnd):
    """The same job offered again is a second entry."""

    def serve_publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        for job in jobs:
            if self._state.records.get(job.job_id) is not None:
                self._state.queue(slot, job.priority).add(job.sealed, self.now_ms())
        return super().serve_publish(slot, jobs, limits)


class AcceptedWithoutRoom(UnreliableEnd):
    """A full queue says that it has taken the job."""

    def serve_publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        return [Receipt("accepted", each.job_id) for each in super().serve_publish(slot, jobs, limits)]


class RefusedAndKept(UnreliableEnd):
    """A full queue refuses the job and takes it all the same."""

    def serve_publish(self, slot: str, jobs: Sequence[Publication], limits: Limits) -> list[Receipt]:
        receipts = super().serve_publish(slot, jobs, limits)
        full = [job for job, receipt in zip(jobs, receipts, strict=True) if receipt.outcome == "full"]
        super().serve_publish(slot, full, Limits(1 << 30, 0, limits.job_ttl_ms))
        return receipts


class CancelForgotten(UnreliableEnd):
    """A waiting job is said to be withdrawn, and stays."""

    def serve_cancel(self, job_id: str, tenant: str, sealed: bytes) -> CancelOutcome | JobRecord:
        record = self._state.records.get(job_id)
        if record is None or record.state is not State.QUEUED:
            return super().serve_cancel(job_id, tenant, sealed)
        queue = self._state.queue(slot_of(job_id), record.priority)
        waiting = queue.waiting.get(record.entry_id)
        outcome = super().serve_cancel(job_id, tenant, sealed)
        if waiting is not None:
            queue.waiting[record.entry_id] = waiting
        return outcome


class LeastUrgentFirst(UnreliableEnd):
    """A claim begins with the lowest band."""

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        statuses, found = super().serve_exchange(consumer, commits, (), result_ttl_ms)
        for wish in claims:
            for band in reversed(Priority):
                found += self._state.hand_out(consumer, wish.slot, band, wish.credit - len(found))
        self._check_order(claims, found)
        return statuses, found


class ExpiredEarly(UnreliableEnd):
    """A client may end a job a quarter of a second before its deadline."""

    def job_record(self, job_id: str, *, subscribe: bool = False) -> JobRecord | None:
        record = super().job_record(job_id, subscribe=subscribe)
        if record is None or record.left_ms is None:
            return record
        return structs.replace(record, left_ms=record.left_ms - 250)

    def serve_expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        record = self._state.records.get(job_id)
        if record is not None and record.state is State.QUEUED:
            record.expires_ms -= 250
        return super().serve_expire(job_id, tenant, sealed)


class ExpiredUnderTheLiving(UnreliableEnd):
    """A client ends an overdue job although a worker holds it."""

    def serve_expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        slot, leases = slot_of(job_id), self._state.lease_ms
        known, leases[slot] = leases.get(slot, 1000), 0
        is_ended = super().serve_expire(job_id, tenant, sealed)
        leases[slot] = known
        return is_ended


class _OtherCount(UnreliableEnd):
    """A client ends the job under a lapsed lease by another rule."""

    def count(self, lease: Lease) -> None:
        """Changes what was counted before the call."""

    def serve_expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        record = self._state.records.get(job_id)
        lease = (
            self._state.queue(slot_of(job_id), record.priority).leases.get(record.entry_id)
            if record is not None and record.state is State.QUEUED
            else None
        )
        if lease is not None:
            self.count(lease)
        return super().serve_expire(job_id, tenant, sealed)


class ExpiredAfterAPause(_OtherCount):
    """A lease that was not renewed for twice its length is enough, also after a pause of the broker."""

    def count(self, lease: Lease) -> None:
        if self.now_ms() - lease.since_ms >= 2 * LEASE_S * 1000:
            lease.asked_ms, lease.counted_ms = self.now_ms(), LEASE_S * 1000


class ExpiredAfterASecondPause(_OtherCount):
    """The time between two calls counts in full, also when the broker was paused in between."""

    def count(self, lease: Lease) -> None:
        if lease.asked_ms >= lease.since_ms:
            lease.counted_ms += self.now_ms() - lease.asked_ms


class ExpiredAndKept(UnreliableEnd):
    """An expired job stays in its queue."""

    def serve_expire(self, job_id: str, tenant: str, sealed: bytes) -> bool:
        record = self._state.records.get(job_id)
        queue = self._state.queue(slot_of(job_id), record.priority) if record is not None else None
        waiting = queue.waiting.get(record.entry_id) if queue is not None and record is not None else None
        is_ended = super().serve_expire(job_id, tenant, sealed)
        if is_ended and waiting is not None and queue is not None and record is not None:
            record.state, record.result = State.QUEUED, b""
            queue.waiting[record.entry_id] = waiting
        return is_ended


class LateJobsRun(SteppedScheduler):
    """Deadlines and cancellations are not checked again before a forward."""

    @staticmethod
    def too_late_check(broker_now: Callable[[], float]) -> Callable[[Sequence[ClaimedJob]], Mapping[int, Failure]]:
        return lambda _jobs: {}


class FollowerDropped(SingleFlight):
    """A job that joined an equal one is forgotten."""

    def join_all(self, jobs: Iterable[ClaimedJob], version: ServedVersion) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
        joined = super().join_all(jobs, version)
        self._followers.clear()
        return joined


class _UpsideDown(Batcher[ClaimedJob]):
    """The least urgent job leads a batch."""

    def _most_urgent(self) -> tuple[_SubQueue[ClaimedJob], Pending[ClaimedJob]]:
        lane, leader = super()._most_urgent()
        return lane, next((band[0] for band in reversed(lane.bands) if band), leader)


class LowerPriorityBatched(SteppedDrain):
    """A batch is led by the least urgent job."""

    def load(self) -> None:
        super().load()
        for version in self.lifecycle.turns:
            version.queue.batcher.__class__ = _UpsideDown


class NothingReleased(UnreliableEnd):
    """A release is answered and not carried out."""

    def serve_release(self, consumer: str, held: Sequence[Held]) -> None:
        """The leases stay."""


class ClaimsWhileStopping(SteppedDrain):
    """SIGTERM does not end the claims."""

    def _wind_up(self) -> bool:
        self._exchange([self.parts.claimer.claim_of(model, 1, 1) for model in self.lifecycle.models])
        return super()._wind_up()


class NeighboursPay(Completer):
    """One bad job fails its whole batch."""

    def collect(self, runs: Iterable[BatchRun]) -> None:
        for run in (runs := list(runs)):
            failure = next((answer for answer in run.answers if isinstance(answer, Failure)), None)
            if failure is not None:
                run.answers = [failure for _ in run.answers]
        super().collect(runs)


class AnswersSwapped(Completer):
    """Within a batch each job gets the next one's answer."""

    def collect(self, runs: Iterable[BatchRun]) -> None:
        for run in (runs := list(runs)):
            run.answers = [*run.answers[1:], *run.answers[:1]]
        super().collect(runs)


class PauseForgotten(UnreliableEnd):
    """An operator's pause is answered and not carried out."""

    def pause(self, slot: str) -> None:
        """Nothing is kept."""


class SuspectsInCompany(JobTransfers):
    """Suspects run with the others."""

    def admit(self, deliveries: Sequence[Delivery]) -> None:
        super().admit(deliveries)
        while self._backlog.suspects:
            version, job = self._backlog.pop_suspect()
            self._backlog.add(version, [job])


class PoisonTolerated(Intake):
    """Two more processes may die of a job than is said."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_crashes += 2


class StaleVersion(JobTransfers):
    """A worker hears of a promotion once a second, and not with the jobs that it claims."""

    def admit(self, deliveries: Sequence[Delivery]) -> None:
        models = self._parts.lifecycle.models
        super().admit([structs.replace(each, active=models[each.slot].record) for each in deliveries])


class VersionsShareAFlight(SteppedRouter):
    """Equal jobs join each other, whichever version answers them."""

    def _join(self, jobs: list[ClaimedJob], version: ServedVersion) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
        for job in jobs:
            job.digest = key_of(job.header, job.body, "", tenant=job.header.tenant)
        return super()._join(jobs, version)


class _NeverForgetting(L1Cache):
    """Answers outlive their version."""

    def forget(self, content_hash: str) -> int:
        return 0


class VersionsShareAnswers(AnswerCache):
    """The answer of one version is cached for equal jobs of every other, also after a promotion."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory.__class__ = _NeverForgetting

    def find_all(self, jobs: Sequence[ClaimedJob], version: ServedVersion) -> list[EncodedOutputs | None]:
        for job in jobs:
            job.digest = key_of(job.header, job.body, "", tenant=job.header.tenant)
        return self.memory.get_all([job.digest for job in jobs])


class CachedAnswersSwapped(AnswerCache):
    """Jobs that are alike but for their numbers share one cached answer."""

    def find_all(self, jobs: Sequence[ClaimedJob], version: ServedVersion) -> list[EncodedOutputs | None]:
        for job in jobs:
            job.digest = f"{job.header.tenant} {version.name} {version.label}".encode()
        return super().find_all(jobs, version)


class OlderDecisionStands(UnreliableEnd):
    """The decision that comes last wins, not the one that was made last."""

    def serve_activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        self._state.activated.pop(slot, None)
        return super().serve_activate(slot, epoch, record, version, spec)


class OtherContentServes(SteppedDrain):
    """What was loaded is never compared with what was promoted."""

    def _follow_lifecycle(self) -> None:
        was_loading = self.lifecycle.loader.is_busy
        super()._follow_lifecycle()
        for version in self.lifecycle.turns if was_loading else ():
            version.model = version.model._replace(content_hash="0" * 64)


class FailsAtTheFirst(SteppedRouter):
    """A worker that has not got the version which a job names does not ask whether another has."""

    def find_elsewhere(self, job: ClaimedJob, *, waiting: int) -> ServedVersion | str | Failure | None:
        place = super().find_elsewhere(job, waiting=waiting)
        if isinstance(place, ServedVersion):
            return place
        self.when_nowhere(job.header.model, job.header.version)
        return self._placement.not_served(job)


class AdoptForgotten(UnreliableEnd):
    """No worker adopts jobs that were handed over, until their lease has lapsed."""

    def serve_adopt(self, consumer: str, slot: str, versions: Sequence[str], count: int) -> list[Delivery]:
        return []


class HandedToNoWorker(UnreliableEnd):
    """A job that is handed over belongs for ever to a worker that does not exist."""

    def serve_hand_over(self, consumer: str, held: Sequence[Held], version: str) -> None:
        super().serve_hand_over(consumer, held, version)
        for job in held:
            lease = self._state.lease_of(f"version {version}", job.slot, job.priority, job.entry_id)
            if lease is not None:
                lease.owner, lease.since_ms = "a ghost", inf


class HandOverIsAnAttempt(UnreliableEnd):
    """That a worker had the job which has not got its version counts."""

    def serve_hand_over(self, consumer: str, held: Sequence[Held], version: str) -> None:
        super().serve_hand_over(consumer, held, version)
        for job in held:
            lease = self._state.lease_of(f"version {version}", job.slot, job.priority, job.entry_id)
            if lease is not None:
                lease.deliveries += 1


class AnotherVersionAnswers(SteppedDrain):
    """Where the version that a job names is not here, the active one answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lifecycle = self.lifecycle
        named = lifecycle.named
        object.__setattr__(
            lifecycle, "named", lambda name, wanted: named(name, wanted) or lifecycle.models[name].active
        )


class _ForgetfulMachine:
    """Decisions are written down, and no start reads them."""

    def __init__(self, machine: DeploymentStore) -> None:
        self._machine = machine

    def last(self, model: str) -> bytes:
        return b""

    def keep(self, model: str, active: bytes) -> None:
        self._machine.keep(model, active)


class UnplacedForgotten(SteppedDrain):
    """Unplaced jobs are not given back at a stop."""

    def give_back_waiting(self) -> None:
        self._backlog.take_unplaced(with_searched=True)
        super().give_back_waiting()


class TooFewThreads(SteppedExecutor):
    """Model threads are as many as the first version needs."""

    def grow(self, threads: int) -> None:
        """None is added."""


class ReplayLost(UnreliableEnd):
    """A dead letter is said to be back in the queue, and is nowhere."""

    def serve_replay(self, slot: str, entry: str, job: Publication, job_ttl_ms: int, keeps_acceptance: bool) -> Replay:
        outcome = super().serve_replay(slot, entry, job, job_ttl_ms, keeps_acceptance)
        record = self._state.records.get(job.job_id)
        if outcome is Replay.REPLAYED and record is not None:
            self._state.queue(slot, job.priority).remove(record.entry_id)
        return outcome


class HangsForgiven(SteppedExecutor):
    """A forward over its limit is never given up: its job runs until it becomes a dead letter."""

    def give_up(self, run: BatchRun) -> ModelTrace:
        return ModelTrace("", "")


class KeysOutliveTheData(UnreliableEnd):
    """A broker that comes back without its jobs still knows their idempotency keys."""

    def lose_everything(self) -> None:
        known = self._state.idempotency
        super().lose_everything()
        self._state.idempotency = known


class AnnouncedOnce(SteppedDrain):
    """Models are announced when they are loaded, and not again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self.lifecycle.announcements, "publish_again", lambda *, replaces: None)


class OnlyExceptionsCaught(SteppedExecutor):
    """What a model raises fails its job if it is an Exception, and ends the model thread otherwise."""

    def run(self, run: BatchRun) -> None:
        super().run(run)
        if any(isinstance(answer, Failure) and "GeneratorExit" in answer.message for answer in run.answers):
            raise GeneratorExit


class ReportedOutsideTheGuard(Completer):
    """The text of an error is sent as the model made it, and a failure to send it ends the I/O thread."""

    def _sealed(self, outcome: JobOutcome) -> tuple[JobOutcome, Commit]:
        if outcome.failure is not None and "\\ud800" in outcome.failure.message:
            failure = structs.replace(outcome.failure, message="\ud800")
            return self._commit_of(structs.replace(outcome, answer=failure))
        return super()._sealed(outcome)


class ClaimsIgnoreBytes(Claimer):
    """A worker claims as many jobs as it has room for, whatever their size."""

    def claim_of(self, model: str, credit: int, nbytes: int, bands: int = len(Priority)) -> Claim:
        return super().claim_of(model, credit, 1 << 50, bands)


class CreditIgnored(UnreliableEnd):
    """The broker hands out as many jobs as a claim asks for, whatever their size."""

    def serve_exchange(
        self, consumer: str, commits: Sequence[Commit], claims: Sequence[Claim], result_ttl_ms: int
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        boundless = [claim._replace(credit_bytes=1 << 50) for claim in claims]
        return super().serve_exchange(consumer, commits, boundless, result_ttl_ms)


class InterruptedForgotten(SteppedDrain):
    """The jobs of an instance that died are never given back."""

    def _serve(self) -> None:
        self.parts.executor.take_interrupted()
        super()._serve()


def _entry(delivery: Delivery) -> Entry:
    return delivery.slot, delivery.priority, delivery.entry_id


def _broken(end: type[UnreliableEnd], finding: str) -> Mutant:
    return Mutant(Mutation(end.__name__, end=end), finding)


_PARTS: Final[tuple[tuple[type[Any], str], ...]] = (
    (SteppedDrain, "drain"),
    (JobTransfers, "transfers"),
    (SteppedScheduler, "scheduler"),
    (SteppedRouter, "router"),
    (SingleFlight, "flights"),
    (AnswerCache, "answers"),
    (Completer, "completer"),
    (Intake, "intake"),
    (SteppedExecutor, "executor"),
    (Claimer, "claimer"),
)
"""What a mutant may be, and its place among the parts of a drain."""


def _misled(part: type[Any], finding: str, *, end: type[UnreliableEnd] = UnreliableEnd) -> Mutant:
    (place,) = [name for kind, name in _PARTS if issubclass(part, kind)]
    return Mutant(Mutation(part.__name__, end, replace(STEPPED, **{place: part})), finding)


MUTANTS: Final[tuple[Mutant, ...]] = (
    _broken(PopWithoutRecord, "lost"),
    _misled(AckBeforeCommit, "lost", end=_Popping),
    _broken(NoFence, "duplicated"),
    _broken(LeaseNeverRenewed, "taken from the living"),
    _broken(TakeOverOfTheLiving, "taken from the living"),
    _broken(TakeOverForgotten, "no end"),
    _broken(TakeOverLate, "not redelivered"),
    _broken(LateTakeOver, "taken from the living"),
    _misled(TakeOverAfterAPause, "taken from the living"),
    _misled(IdleTakesOverAfterAPause, "taken from the living"),
    _misled(TakeOverAfterAShortPause, "taken from the living"),
    _broken(ToldTwice, "duplicated"),
    _broken(DeliveriesCountedAsCrashes, "counted"),
    _broken(ReleaseCountedAsCrash, "counted"),
    _broken(CrashCountedTwice, "counted"),
    _broken(CrashesForgotten, "no end"),
    _broken(CommitNotAtomic, "ran twice"),
    _broken(ReplyWithoutRecord, "lost"),
    _broken(RecordWithoutReply, "lost"),
    _broken(IdempotencyForgotten, "two records"),
    _broken(PublishedTwice, "ran twice"),
    _broken(AcceptedWithoutRoom, "lost"),
    _broken(RefusedAndKept, "unexpected"),
    _broken(CancelForgotten, "ran after it was withdrawn"),
    _broken(LeastUrgentFirst, "claimed a less urgent job first"),
    _misled(LowerPriorityBatched, "batched a less urgent job first"),
    _misled(LateJobsRun, "ran after its deadline"),
    _broken(ExpiredEarly, "expired before its deadline"),
    _broken(ExpiredUnderTheLiving, "expired under the living"),
    _broken(ExpiredAfterAPause, "expired under the living"),
    _broken(ExpiredAfterASecondPause, "expired under the living"),
    _broken(ExpiredAndKept, "duplicated"),
    _misled(FollowerDropped, "no end"),
    _broken(NothingReleased, "left with"),
    _misled(ClaimsWhileStopping, "claimed after its stop"),
    _misled(NeighboursPay, "ended failed"),
    _misled(AnswersSwapped, "the answer of another"),
    _misled(SuspectsInCompany, "a suspect in company"),
    _misled(PoisonTolerated, "outlived"),
    _broken(ReplayLost, "lost"),
    _broken(PauseForgotten, "ran while its model was paused"),
    _misled(StaleVersion, "answered by a version of before"),
    _misled(VersionsShareAFlight, "the answer of another version"),
    _misled(VersionsShareAnswers, "the answer of another version"),
    _misled(CachedAnswersSwapped, "the answer of another"),
    _broken(OlderDecisionStands, "answered by a version of before"),
    _misled(OtherContentServes, "content of another version"),
    _misled(FailsAtTheFirst, "failed, and a worker had it"),
    _broken(AdoptForgotten, "not adopted"),
    _broken(HandedToNoWorker, "no end"),
    _broken(HandOverIsAnAttempt, "counted as an attempt"),
    _misled(AnotherVersionAnswers, "answered by another version than it named"),
    _misled(UnplacedForgotten, "left with"),
    _misled(TooFewThreads, "fewer model threads"),
    _misled(HangsForgiven, "ran after its time-out"),
    _broken(KeysOutliveTheData, "lost"),
    _misled(AnnouncedOnce, "not announced"),
    _misled(OnlyExceptionsCaught, "raised GeneratorExit"),
    _misled(ReportedOutsideTheGuard, "raised UnicodeEncodeError"),
    _misled(ClaimsIgnoreBytes, "asked for more bytes"),
    _broken(CreditIgnored, "more bytes than its credit"),
    _misled(InterruptedForgotten, "no end"),
    Mutant(Mutation("DecisionsForgotten", deployments=_ForgetfulMachine), "answered by a version of before"),
)
